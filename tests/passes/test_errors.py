"""Each refusal has its fixed message, and reaches the user through Dynamo as it was raised."""

import pickle

import cloudpickle
import pytest
import torch
import torch._dynamo
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException

from zeco_compile.kernels.errors import InvalidShapes, ZecoError
from zeco_compile.passes.errors import (
    AmbiguousSequence,
    CompileError,
    GraphBreak,
    InternalError,
    LengthInValue,
    RecognitionRefused,
    SequenceInputError,
    UnsupportedOp,
    as_compile_error,
    refusing,
)
from zeco_compile.passes.locations import UNKNOWN, Location, user_location

WHERE = Location("/home/someone/model.py", 12, "forward", "y = x.flip(1)")


class NeedsTwo(ZecoError):
    """An error of another folder, whose constructor takes more than a message."""

    def __init__(self, rank: int, neighbour: int) -> None:
        self.rank = rank
        self.neighbour = neighbour
        super().__init__(f"rank {rank} lost {neighbour}")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def flip(x):
    return x.flip(1)


def breaks_then_flips(x):
    y = x + 1
    torch._dynamo.graph_break()
    return y.flip(1)


def compile_and_call(function, raise_error, **compile_options):
    """Calls `function`, compiled by a backend that raises what `raise_error(node)` gives."""

    def backend(gm, example_inputs):
        node = next(node for node in gm.graph.nodes if node.op.startswith("call"))
        with refusing("a test"):
            raise raise_error(node)

    return torch.compile(function, backend=backend, **compile_options)(torch.ones(2, 3))


def unsupported(node):
    return UnsupportedOp("torch.flip", location=user_location(node), why="it mixes positions.", gather=True)


# messages


def test_message_of_an_unsupported_op():
    error = UnsupportedOp(
        "torch.flip",
        location=WHERE,
        why="it reverses the sequence.",
        hints=["flip before sharding"],
        node="flip_1",
        gather=True,
    )
    assert str(error) == (
        "`torch.flip` cannot be computed on one rank's slice of the sequence.\n"
        "  where: /home/someone/model.py:12, in forward\n"
        "        y = x.flip(1)\n"
        "  graph node: flip_1\n"
        "  why: it reverses the sequence.\n"
        "  what to do:\n"
        "    - flip before sharding\n"
        '    - set options={"on_unsupported": "gather"} to compute it on the whole sequence on every rank '
        "(correct, but costs the memory and communication of the full length)"
    )
    assert (error.op, error.node, error.location) == ("torch.flip", "flip_1", WHERE)


def test_message_of_a_graph_break_keeps_dynamos_reason_on_one_line():
    error = GraphBreak(
        "Call to `print`\n  Explanation: side effect\n\n  Developer context: x", location=WHERE
    )
    assert "Dynamo's reason: Call to `print` Explanation: side effect\n" in str(error)
    assert 'options={"graph_breaks": "allow"}' in str(error)
    assert error.reason.startswith("Call to `print`")


def test_message_of_a_sequence_input_error():
    error = AmbiguousSequence("position_ids", (3, 2, "s27"), "the sequence may be dimension 1 or 2.")
    assert str(error).startswith(
        "input `position_ids` of shape [3, 2, s27]: the sequence may be dimension 1 or 2.\n  what to do:\n"
        "    - call zeco_compile.mark_sequence(position_ids, dim)"
    )
    assert isinstance(error, SequenceInputError)


def test_an_input_whose_name_is_no_identifier_is_not_put_into_code():
    error = SequenceInputError("batch['ids']", (2,), "has no dimension 1.")
    assert "mark_sequence(tensor, dim)" in str(error)


def test_messages_of_the_other_refusals_say_where_why_and_what_to_do():
    errors = [
        LengthInValue("0.125", location=WHERE, why="it multiplies a sum over the sequence."),
        RecognitionRefused("the product at `attn`", location=WHERE, why="the mask is shifted by one."),
    ]
    for error in errors:
        assert "where: /home/someone/model.py:12" in str(error)
        assert "why: " in str(error)
        assert "what to do:\n    - " in str(error)


def test_an_unknown_location_is_said_to_be_unknown():
    assert "where: unknown" in str(UnsupportedOp("aten.sort", location=UNKNOWN, why="it sorts."))


def test_an_internal_error_carries_cause_and_innermost_calls():
    with pytest.raises(InternalError) as caught, refusing("the pass `shard`", WHERE):
        {}["q"]
    error = caught.value
    assert str(error).startswith("compilation failed during the pass `shard`: KeyError: 'q'\n  where: ")
    assert isinstance(error.cause, KeyError)
    assert error.__cause__ is error.cause
    assert '{}["q"]' in str(error)
    assert "ZECO_DEBUG" in str(error)


# through Dynamo


@pytest.mark.parametrize("suppress", [False, True], ids=["", "suppress_errors"])
@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("function", [flip, breaks_then_flips])
def test_refusals_keep_type_and_message_and_never_fall_back(function, fullgraph, suppress):
    if fullgraph and function is breaks_then_flips:
        pytest.skip("Dynamo itself refuses the break, before any backend")
    with torch._dynamo.config.patch(suppress_errors=suppress), pytest.raises(UnsupportedOp) as caught:
        compile_and_call(function, unsupported, fullgraph=fullgraph)
    assert caught.type is UnsupportedOp
    assert not isinstance(caught.value, BackendCompilerFailed)
    assert f"where: {__file__}:" in str(caught.value)
    assert str(caught.value).endswith("of the full length)")


@pytest.mark.parametrize(
    "unexpected",
    [
        lambda node: KeyError("q"),
        lambda node: IndexError("Dimension out of range"),
        lambda node: NotImplementedError(),
        lambda node: AssertionError("no"),
        lambda node: torch._dynamo.exc.SkipFrame("skip"),
        lambda node: DataDependentOutputException(torch.ops.aten._local_scalar_dense.default),
        lambda node: UnsupportedOperatorException(torch.ops.aten.sin.default),
    ],
    ids=lambda make: type(make(None)).__name__,
)
@pytest.mark.parametrize("suppress", [False, True], ids=["", "suppress_errors"])
def test_unexpected_exceptions_are_internal_errors_and_never_fall_back(unexpected, suppress):
    with torch._dynamo.config.patch(suppress_errors=suppress), pytest.raises(InternalError) as caught:
        compile_and_call(flip, unexpected)
    assert type(caught.value.cause) is type(unexpected(None))


def test_without_the_guard_dynamo_would_have_fallen_back():
    """Shows that the test above tests something: the same exception, raised plainly, gives eager's result."""

    def backend(gm, example_inputs):
        raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.compile(flip, backend=backend)(x), x.flip(1))


@pytest.mark.parametrize("suppress", [False, True], ids=["", "suppress_errors"])
def test_errors_of_other_folders_come_out_under_their_own_name(suppress):
    with torch._dynamo.config.patch(suppress_errors=suppress), pytest.raises(NeedsTwo) as caught:
        compile_and_call(flip, lambda node: NeedsTwo(1, 2))
    assert str(caught.value) == "rank 1 lost 2"
    assert (caught.value.rank, caught.value.neighbour) == (1, 2)
    assert isinstance(caught.value, CompileError)
    assert type(caught.value).__name__ == "NeedsTwo"


def test_a_request_to_trace_again_passes():
    traces = []

    def backend(gm, example_inputs):
        traces.append(gm)
        if len(traces) == 1:
            with refusing("a test"):
                raise TensorifyScalarRestartAnalysis(restart_reason="see the length")
        return gm.forward

    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.compile(flip, backend=backend)(x), x.flip(1))
    assert len(traces) == 2


def test_an_interrupt_is_not_touched():
    with pytest.raises(KeyboardInterrupt), refusing("a test"):
        raise KeyboardInterrupt


# between processes


@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
@pytest.mark.parametrize(
    "error",
    [
        UnsupportedOp("torch.flip", location=WHERE, why="it mixes."),
        GraphBreak("print", location=WHERE),
        AmbiguousSequence("x", (2, 3), "two readings."),
        as_compile_error(InvalidShapes("q and k differ")),
        as_compile_error(NeedsTwo(1, 2)),
        InternalError("a test", ValueError("no")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error, pickler):
    received = pickle.loads(pickler.dumps(error))
    assert type(received).__name__ == type(error).__name__
    assert str(received) == str(error)
    assert isinstance(received, CompileError)
    assert received.location == error.location


def test_an_error_that_went_through_dynamo_travels_too():
    with pytest.raises(UnsupportedOp) as caught:
        compile_and_call(flip, unsupported)
    received = pickle.loads(pickle.dumps(caught.value))
    assert str(received) == str(caught.value)
    assert received.op == "torch.flip"


def test_a_compile_error_is_not_converted_again():
    error = as_compile_error(InvalidShapes("q and k differ"))
    assert as_compile_error(error) is error
    assert isinstance(error, InvalidShapes)
