"""Every piece of private PyTorch API that the passes use still is where it was and does what it did."""

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, UncapturedHigherOrderOpError

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
