"""What the compiler refuses, and how it says so.

Contract: an error of this file, raised while a graph is compiled, reaches the caller of the compiled
model with its own type and message. Dynamo neither wraps it nor falls back to eager, whatever its
settings, since eager on a slice of the sequence is a wrong number. Each class has a fixed message: what was
found, where in the user's source, why that cannot be compiled, what to do.

``refusing(stage)`` is the guard around the whole compilation: it lets these errors through, gives errors of
the other folders (a disagreement of the ranks) the same passage, and makes any other exception an
`InternalError`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.passes.locations import UNKNOWN, Location, innermost_user_frame
from zeco_compile.passes.torch_private import LoudBackendError, is_dynamo_restart


class CompileError(ZecoError, LoudBackendError):
    """Base of all refusals at compile time.

    ``found`` is one sentence, ``why`` one or more, ``hints`` are things to do. ``location`` is the user's
    line, ``context`` further facts as (label, text) pairs, printed like the location.
    """

    def __init__(
        self,
        found: str,
        *,
        location: Location | None = None,
        why: str = "",
        hints: Sequence[str] = (),
        context: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.found = found
        self.location = location if location is not None else UNKNOWN
        self.why = why
        self.hints = tuple(hints)
        self.context = tuple(context)
        LoudBackendError.__init__(self, _message(found, location, context, why, hints))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with message and attributes, but without what Dynamo hung onto it on the way."""
        state = {name: value for name, value in self.__dict__.items() if name not in _DYNAMO_STATE}
        return _restore, (_declared_class(type(self)), self.args, state)


_GATHER = (
    'set options={"on_unsupported": "gather"} to compute it on the whole sequence on every rank '
    "(correct, but costs the memory and communication of the full length)"
)


class UnsupportedOp(CompileError):
    """An op mixes positions of the sequence, and no rule says how to compute it on slices.

    Also raised for an op of a supported kind used in a way that is not (a dilated halo over a strided
    sequence, say): ``why`` tells which.
    """

    def __init__(
        self,
        op: str,
        *,
        location: Location,
        why: str,
        hints: Sequence[str] = (),
        node: str = "",
        gather: bool = False,
    ) -> None:
        """`gather` says that the option "gather" can compute it."""
        self.op = op
        self.node = node
        context = [("graph node", node)] if node else []
        super().__init__(
            f"`{op}` cannot be computed on one rank's slice of the sequence.",
            location=location,
            why=why,
            hints=[*hints, *([_GATHER] if gather else [])],
            context=context,
        )


class UnsupportedArgument(CompileError):
    """A library function is called with an argument that its replacement cannot honour."""

    def __init__(self, function: str, why: str, *, stack: str | None = None) -> None:
        self.function = function
        super().__init__(
            f"this call of `{function}` cannot be compiled for a sequence that the ranks share.",
            location=innermost_user_frame(stack),
            why=why,
            hints=[
                "leave the argument out, or give it the value that it has by default",
                "or compile what is before and after this call, and make the call on the whole sequence "
                "(zeco_compile.gather_sequence, shard_sequence)",
            ],
        )


class UnsupportedFunction(CompileError):
    """A library function is known to compute along the sequence what cannot be split over ranks."""

    def __init__(self, function: str, why: str, *, stack: str | None = None) -> None:
        self.function = function
        super().__init__(
            f"`{function}` cannot be computed on one rank's slice of the sequence.",
            location=innermost_user_frame(stack),
            why=why,
            hints=[
                "use a layer whose state decays by numbers (gated linear attention, Mamba-2, retention) in its place",
                "or compile what is before and after this layer, and call it on the whole sequence "
                "(zeco_compile.gather_sequence, shard_sequence)",
            ],
        )


class GraphBreak(CompileError):
    """The graph ends in a break: the code up to the next graph would run on a slice unseen."""

    def __init__(self, reason: str, *, location: Location) -> None:
        self.reason = reason
        super().__init__(
            "the model does not compile into one graph: Dynamo broke it at this line.",
            location=location,
            why="the code between two graphs runs in plain Python on this rank's slice, where the compiler "
            f"cannot see whether it mixes positions. Dynamo's reason: {_one_line(reason)}",
            hints=[
                "change this line so that Dynamo can trace it; torch.compile(..., fullgraph=True) shows the "
                "reason in full",
                'set options={"graph_breaks": "allow"} if the code between the graphs looks at no other '
                "positions",
            ],
        )


class SequenceInputError(CompileError):
    """An input does not have the sequence dimension that it is said to have, or one that cannot be used."""

    def __init__(
        self,
        input_name: str,
        shape: Sequence[Any],
        problem: str,
        *,
        location: Location | None = None,
        hints: Sequence[str] = (),
    ) -> None:
        self.input_name = input_name
        self.shape = tuple(str(size) for size in shape)
        super().__init__(
            f"input `{input_name}` of shape [{', '.join(self.shape)}]: {problem}",
            location=location,
            hints=hints
            or [
                f"call zeco_compile.mark_sequence({_argument_name(input_name)}, dim) on the tensor, with dim "
                "the dimension along which it is sliced, or None if every rank holds all of it",
                'or set options={"seq_dim": dim} if the inputs agree on another dimension',
            ],
        )


class AmbiguousSequence(SequenceInputError):
    """More than one reading of an input's dimensions fits, and they lead to different programs."""


class LengthInValue(CompileError):
    """A number that may stand for the local length is computed with, and cannot be made global."""

    def __init__(self, value: str, *, location: Location, why: str, hints: Sequence[str] = ()) -> None:
        self.value = value
        super().__init__(
            f"the value {value} may have been computed from the length of this rank's slice.",
            location=location,
            why=why,
            hints=hints
            or [
                "take the length from the shape of a tensor (x.shape[1]) where it is used, so that it can be "
                "replaced by the length of the whole sequence",
                "avoid Python loops over the length (`for t in range(T)`): they fix it to a constant",
            ],
        )


class RecognitionRefused(CompileError):
    """Code that looks like linear attention, but is provably not the recurrence that can be split."""

    def __init__(
        self,
        what: str,
        *,
        location: Location,
        why: str,
        hints: Sequence[str] = (),
        context: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.what = what
        super().__init__(
            f"{what} was not recognised as gated linear attention.",
            location=location,
            why=why,
            hints=hints
            or [
                "call zeco_compile.gated_linear_attention(q, k, v, g) here, if that is what it computes",
                "run zeco_compile.explain(model, ...) to see what else was recognised",
            ],
            context=context,
        )


class RecompilationLimit(CompileError):
    """Dynamo is about to stop compiling this function and to run it in eager, on a slice of the sequence."""

    def __init__(self) -> None:
        super().__init__(
            "this function has been compiled as often as torch._dynamo.config.recompile_limit allows; from the next "
            "time on Dynamo would run it in eager, where nothing is exchanged between the ranks.",
            hints=[
                "find out what changes from call to call: TORCH_LOGS=recompiles",
                "raise torch._dynamo.config.recompile_limit, or use fullgraph=True",
            ],
        )


class MaskChanged(CompileError):
    """A buffer whose values were relied on when the model was compiled, as a causal mask's, has others now."""

    def __init__(self, buffer: str) -> None:
        self.buffer = buffer
        super().__init__(
            f"the values of the buffer `{buffer}`, a mask or decays, were relied on when the model was compiled, and "
            "have changed.",
            hints=["call torch.compiler.reset() and compile the model again"],
        )


class InternalError(CompileError):
    """An exception that is no refusal: a fault of zeco_compile, or an exception of PyTorch below it.

    ``stage`` names the part of the compilation, ``cause`` is the exception; the end of its traceback is in
    the message, because Dynamo strips the tracebacks of backends.
    """

    def __init__(self, stage: str, cause: BaseException, *, location: Location | None = None) -> None:
        self.stage = stage
        self.cause = cause
        super().__init__(
            f"compilation failed during {stage}: {type(cause).__name__}: {_one_line(str(cause))}",
            location=location,
            why="this is not a refusal of your model but an exception that should not have happened. Falling "
            "back to eager would compute on a slice of the sequence, so the compilation stops here.",
            hints=[
                "set ZECO_DEBUG=<folder> to keep the graphs up to this point, and report them with this "
                "message",
            ],
            context=[("traceback (innermost call last)", _innermost_calls(cause))],
        )


@contextmanager
def refusing(stage: str, location: Location | None = None) -> Iterator[None]:
    """Guards a part of the compilation, so that whatever goes wrong in it is an error that the user sees.

    Passes `CompileError` and Dynamo's requests to trace again; a `ZecoError` of another folder comes out
    with its own type, made a `CompileError` as well; any other exception becomes `InternalError`. ``stage``
    completes the sentence "compilation failed during ...".
    """
    try:
        yield
    except CompileError:
        raise
    except ZecoError as error:
        raise as_compile_error(error) from error
    except Exception as error:
        if is_dynamo_restart(error):
            raise
        raise InternalError(stage, error, location=location) from error


def as_compile_error(error: ZecoError) -> CompileError:
    """The same error (type by ``isinstance``, message, attributes), as one that Dynamo lets through."""
    if isinstance(error, CompileError):
        return error
    made = _compile_error_class(type(error))
    converted = made.__new__(made)
    CompileError.__init__(converted, str(error))
    converted.args = error.args
    converted.__dict__.update(error.__dict__)
    return converted


_COMPILE_ERROR_CLASSES: dict[type, type[CompileError]] = {}


def _compile_error_class(declared: type[ZecoError]) -> type[CompileError]:
    """A class that is both `declared` and a `CompileError`, under the name of `declared`; always the same."""
    if declared not in _COMPILE_ERROR_CLASSES:
        namespace = {"__module__": declared.__module__, "__doc__": declared.__doc__, "_declared": declared}
        _COMPILE_ERROR_CLASSES[declared] = type(declared.__name__, (declared, CompileError), namespace)
    return _COMPILE_ERROR_CLASSES[declared]


def _declared_class(error_class: type) -> type:
    """The class in the source that an error class stands for: pickle finds only those by name."""
    declared: type = error_class.__dict__.get("_declared", error_class)
    return declared


def _restore(declared: type[ZecoError], args: tuple[Any, ...], state: dict[str, Any]) -> CompileError:
    """The inverse of `CompileError.__reduce__`. The constructors of subclasses take other arguments."""
    error_class = declared if issubclass(declared, CompileError) else _compile_error_class(declared)
    error = error_class.__new__(error_class)
    LoudBackendError.__init__(error, "")
    error.args = args
    error.__dict__.update(state)
    return error


# What Dynamo and its base classes store on the exception (tracer, frames, stacks): none of it can travel.
_DYNAMO_STATE = frozenset(LoudBackendError("").__dict__) - {"message"} | {
    "compile_id",
    "innermost_user_frame_summary",
    "record_filename",
}


def _message(
    found: str,
    location: Location | None,
    context: Sequence[tuple[str, str]],
    why: str,
    hints: Sequence[str],
) -> str:
    parts = [found]
    if location is not None:
        parts.append(_labelled("where", location.describe()))
    parts += [_labelled(label, text) for label, text in context]
    if why:
        parts.append(_labelled("why", why))
    if hints:
        parts.append("  what to do:")
        parts += ["    - " + _indented(hint, "      ") for hint in hints]
    return "\n".join(parts)


def _labelled(label: str, text: str) -> str:
    separator = "\n    " if "traceback" in label else " "
    return f"  {label}:{separator}{_indented(text, '    ')}"


def _indented(text: str, by: str) -> str:
    return text.strip("\n").replace("\n", f"\n{by}")


def _one_line(text: str) -> str:
    """Messages of PyTorch run over many lines, of which the first paragraph says what happened."""
    paragraph = text.strip().split("\n\n", 1)[0]
    return " ".join(paragraph.split()) or "(no message)"


def _argument_name(input_name: str) -> str:
    return input_name if input_name.isidentifier() else "tensor"


def _innermost_calls(error: BaseException, limit: int = 6) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-limit:]
    return "".join(traceback.format_list(frames)) if frames else "(none)"
