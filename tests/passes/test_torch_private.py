"""Every piece of private PyTorch API that the passes use still is where it was and does what it did."""

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, UncapturedHigherOrderOpError

from zeco_compile.passes import torch_private
from zeco_compile.passes.torch_private import LoudBackendError, is_dynamo_restart


def test_loud_backend_error_is_of_the_types_that_dynamo_lets_through():
    error = LoudBackendError("text")
    assert isinstance(error, ShortenTraceback), "Dynamo would wrap our errors in BackendCompilerFailed"
    assert isinstance(error, UncapturedHigherOrderOpError), "suppress_errors would swallow our errors"
    assert error.remove_dynamo_frames() is error


def test_loud_backend_error_passes_through_a_compiled_call_with_its_cause():
    def backend(gm, example_inputs):
        raise LoudBackendError("text") from KeyError("cause")

    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(LoudBackendError) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert str(caught.value) == "text"
    assert isinstance(caught.value.__cause__, KeyError)
    torch._dynamo.reset()


def test_requests_to_trace_again_are_told_from_failures():
    assert is_dynamo_restart(torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason="x"))
    assert is_dynamo_restart(RestartAnalysis(restart_reason="x"))
    assert not is_dynamo_restart(LoudBackendError("text"))
    assert not is_dynamo_restart(KeyError("x"))


def test_guards_and_symbols_of_a_symbolic_size():
    """What a trace assumed of a length is found, with the symbol that its size has."""
    seen = []

    def backend(gm, example_inputs):
        mode, fakes = torch_private.fake_inputs(gm, example_inputs)
        size = next(f.shape[1] for f in fakes if isinstance(f, torch.Tensor))
        seen.append((torch_private.symbols_of_size(size), torch_private.shape_guards(mode)))
        return gm.forward

    def branches(x):
        return x + 1 if x.shape[1] > 8 else x * 2

    torch._dynamo.reset()
    x = torch.randn(2, 5)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    torch.compile(branches, backend=backend, fullgraph=True)(x)
    ((symbols, guards),) = seen
    assert len(symbols) == 1
    ((condition, source),) = guards
    assert condition.free_symbols == symbols
    assert bool(condition.subs(dict.fromkeys(symbols, 5)))
    assert "if x.shape[1] > 8" in source
    assert torch_private.symbols_of_size(5) == set()
