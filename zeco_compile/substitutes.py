"""Library functions that Dynamo cannot look into, and what it traces in their place.

flash-linear-attention's functions are Triton kernels behind ``torch.compiler.disable``: a graph break, in which the
library would attend within this rank's slice only. While Dynamo traces, each is replaced by a function of
fla_attention.py or fla_layers.py, which ends in the operator of this package (wired to its group by
passes/by_name.py) or is plain PyTorch.

Contract:
- Nothing is imported that the user has not imported: `install` registers a callback that, whenever Dynamo begins
  a compilation, looks for the functions in ``sys.modules``. Functions that a version of the library lacks, or has
  with parameters that do not fit, are left as they are.
- The replacement holds for the whole process, and for every backend, so it equals the library's own function, and
  is made only of arguments that are understood. Eager calls still reach the library.
- Every argument is honoured or refused. A call with one that is refused (sequences packed with ``cu_seqlens``,
  ``reverse=True``, a parameter that is unknown) raises `UnsupportedArgument` with the user's line where the "zeco"
  backend compiles for several ranks or for one whole graph. Everywhere else it is left to the library, in a graph
  break, as if this package were not there.
"""

from __future__ import annotations

import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from zeco_compile import (
    causal_masks,
    fla_attention,
    fla_layers,
    scans_by_name,
    torch_private,
    transformers_layers,
)
from zeco_compile.passes.errors import UnsupportedArgument, UnsupportedFunction

_log = logging.getLogger("zeco_compile.substitutes")


@dataclass(frozen=True)
class Substitute:
    """One library function and its replacement.

    ``meaning`` is a function of the parameters that are honoured, under the library's names. ``refused`` says of
    others why they cannot be; they may still be given as None or False. ``indifferent`` are those that change
    how the library computes, but not what. ``problem`` looks at the arguments together, and returns what is
    wrong with them or None; like ``meaning``, Dynamo traces it.
    """

    module: str
    name: str
    meaning: Callable[..., Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    indifferent: tuple[str, ...] = ()
    problem: Callable[[dict[str, Any]], str | None] | None = None

    @property
    def function(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Unsupported:
    """A library function that is known and has no replacement. Taken apart into its operations it would be refused,
    too, but after a long trace and at a line that says nothing of what it is."""

    module: str
    name: str
    why: str

    @property
    def function(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class ForRanks:
    """A function of the same signature that Dynamo can look into, whose meaning is easier to see in other words. They
    are traced where the "zeco" backend compiles for several ranks, and nowhere else."""

    module: str
    name: str
    meaning: Callable[..., Any]

    @property
    def function(self) -> str:
        return f"{self.module}.{self.name}"


def install() -> None:
    """From now on Dynamo traces the replacements. Call it before anything is compiled; again does nothing.

    Also after ``torch._dynamo.reset()``, which forgets callbacks, but not those made by
    `torch_private.on_compile_start`.
    """
    if not _installed:
        torch_private.on_compile_start(register)
        _installed.append(True)


def register() -> list[str]:
    """Registers the replacements of all functions that are in ``sys.modules`` by now; returns the new ones' names.

    Each function object is registered once. One for which somebody else has registered a replacement keeps that.
    """
    new = []
    known: tuple[Substitute | Unsupported | ForRanks, ...] = (*SUBSTITUTES, *UNSUPPORTED, *FOR_RANKS)
    for each in known:
        module = sys.modules.get(each.module)
        # not getattr: a module may import others to answer it
        library = None if module is None else vars(module).get(each.name)
        if library is None or id(library) in _seen:
            continue
        _seen[id(library)] = library  # kept, so that its id is not given to another object
        if _register(each, library):
            new.append(each.function)
    return new


# Function objects that have been looked at, registered or not, by id; and whether the callback is in place.
_seen: dict[int, Any] = {}
_installed: list[bool] = []


def _register(each: Substitute | Unsupported | ForRanks, library: Any) -> bool:
    if not isinstance(library, types.FunctionType):
        _log.info("%s is no Python function, and is not replaced", each.function)
        return False
    misfit = _misfit(each, library) if isinstance(each, Substitute) else None
    if misfit is not None:
        _log.info("%s is not replaced: %s", each.function, misfit)
        return False
    if isinstance(each, Unsupported):
        traceable = _refusing(each, library)
    elif isinstance(each, ForRanks):
        traceable = _for_ranks(each, library)
    else:
        traceable = _traceable(each, library)
    try:
        torch.compiler.substitute_in_graph(library, skip_signature_check=True)(traceable)
    except ValueError as taken:
        _log.warning("%s already has a replacement in Dynamo, which is kept: %s", each.function, taken)
        return False
    _log.debug("%s is replaced while tracing", each.function)
    return True


def _misfit(each: Substitute, library: types.FunctionType) -> str | None:
    """Why this version of the function is not the one that the replacement was written for."""
    theirs = inspect.signature(library).parameters
    for name, parameter in inspect.signature(each.meaning).parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in theirs:
            return f"it has no parameter {name}"
    for name, parameter in theirs.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return "it takes any number of arguments"
        required = parameter.default is inspect.Parameter.empty
        if (
            required
            and parameter.kind is not inspect.Parameter.VAR_KEYWORD
            and name not in _honoured(each.meaning)
        ):
            return f"its parameter {name} is unknown"
    if "scale" in theirs and theirs["scale"].default is not None:
        return f"its scale is {theirs['scale'].default} by default, in place of None"
    return None


@cache
def _honoured(meaning: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(meaning).parameters)


def _traceable(each: Substitute, library: types.FunctionType) -> types.FunctionType:
    """The function that Dynamo traces in place of `library`: binds the arguments by the library's own signature,
    and calls the meaning, or refuses."""
    theirs = inspect.signature(library).parameters.values()
    names = tuple(p.name for p in theirs if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    defaults = {p.name: p.default for p in theirs if p.default is not p.empty}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in theirs)
    accepted = (*names, *(p.name for p in theirs if p.kind is p.KEYWORD_ONLY))
    honoured, refused, indifferent = _honoured(each.meaning), dict(each.refused), each.indifferent
    function, meaning, problem = each.function, each.meaning, each.problem

    def leave_it(*args: Any, **kwargs: Any) -> Any:
        return library(*args, **kwargs)

    left_to_the_library = torch.compiler.disable(
        leave_it, reason=f"zeco_compile has no replacement for {function} with these arguments"
    )

    def substitute(*args: Any, **kwargs: Any) -> Any:
        given = dict(defaults)
        given.update(zip(names, args, strict=False))
        given.update(kwargs)
        why = None
        if len(args) > len(names):
            why = f"it is given {len(args)} positional arguments, but has {len(names)}."
        for name in given:
            value = given[name]
            if name in honoured and (name in accepted or open_ended):
                continue
            if name in refused and value is not None and value is not False:
                why = f"`{name}`: {refused[name]}"
            elif name not in accepted and not open_ended:
                why = f"`{name}` is none of its parameters."
            elif (
                name not in refused and name not in indifferent and not _is_default(value, defaults.get(name))
            ):
                why = f"`{name}` is not known to zeco_compile, and may change what is computed."
        if why is None and problem is not None:
            why = problem(given)
        if why is not None:
            _refuse_if_zeco(function, why)
            return left_to_the_library(*args, **kwargs)
        return meaning(**{name: given[name] for name in given if name in honoured})

    return substitute  # type: ignore[return-value]  # a plain function, as its type says


def _refusing(each: Unsupported, library: types.FunctionType) -> types.FunctionType:
    """The function that Dynamo traces in place of `library`: the same one, where it is not refused."""
    function, why, same = each.function, each.why, _same(library)

    def refuse_or_trace(*args: Any, **kwargs: Any) -> Any:
        _refuse_if_split(function, why)
        return same(*args, **kwargs)

    return refuse_or_trace  # type: ignore[return-value]  # a plain function, as its type says


def _same(library: types.FunctionType) -> types.FunctionType:
    """Another object of the same code, for which nothing is registered."""
    same = types.FunctionType(
        library.__code__, library.__globals__, library.__name__, library.__defaults__, library.__closure__
    )
    same.__kwdefaults__ = library.__kwdefaults__
    same.__dict__.update(vars(library))
    return same


def _for_ranks(each: ForRanks, library: types.FunctionType) -> types.FunctionType:
    """The function that Dynamo traces in place of `library`: the meaning for several ranks, else the same one."""
    meaning, same = each.meaning, _same(library)

    def mean_or_trace(*args: Any, **kwargs: Any) -> Any:
        return meaning(*args, **kwargs) if _is_split() else same(*args, **kwargs)

    return mean_or_trace  # type: ignore[return-value]  # a plain function, as its type says


@torch.compiler.assume_constant_result
def _is_split() -> bool:
    """Called while Dynamo traces: whether it does so for "zeco" and several ranks, or for a look at what they get."""
    return _shared_by(torch_private.current_compilation()) is not None


def _shared_by(compilation: torch_private.Compilation | None) -> str | None:
    """What is to become of what cannot be split, where several ranks share the sequence; None where they do not."""
    if compilation is None or not compilation.backend.__module__.startswith("zeco_compile."):
        return None
    if compilation.backend.__name__ != "zeco":
        return "error"
    # imported here: settings look up process groups, and this module is imported before there are any
    from zeco_compile.settings import Settings

    settings = Settings.parse(compilation.options)
    return settings.on_unsupported if settings.world_size > 1 else None


@torch.compiler.assume_constant_result
def _refuse_if_split(function: str, why: str) -> None:
    """Called while Dynamo traces: raises UnsupportedFunction where several ranks share the sequence."""
    compilation = torch_private.current_compilation()
    if compilation is not None and _shared_by(compilation) == "error":
        raise UnsupportedFunction(function, why, stack=compilation.user_stack)


def _is_default(value: Any, default: Any) -> bool:
    return value is None or value is False or value is default


@torch.compiler.assume_constant_result
def _refuse_if_zeco(function: str, why: str) -> None:
    """Called while Dynamo traces: raises UnsupportedArgument where a graph break would not do."""
    compilation = torch_private.current_compilation()
    if compilation is None or not compilation.backend.__module__.startswith("zeco_compile."):
        return
    # imported here: settings look up process groups, and this module is imported before there are any
    from zeco_compile.settings import Settings

    several = compilation.backend.__name__ != "zeco" or Settings.parse(compilation.options).world_size > 1
    if several or compilation.fullgraph:
        raise UnsupportedArgument(function, why, stack=compilation.user_stack)


# ----- what is replaced

_PACKED = (
    "packed sequences of different lengths begin and end at places that the ranks' slices do not know of; pass "
    "sequences of one length, as [B, T, ...]."
)
_VARLEN = {"cu_seqlens": _PACKED}
_REVERSE = {"reverse": "the state travels from the first position to the last, not back."}
_HEAD_FIRST = {"head_first": "the layout is [B, T, H, ...]."}
_SCORES = {"output_attentions": "the scores of all pairs of positions are never made."}
_ATTENTION = {**_VARLEN, **_HEAD_FIRST}
# cu_seqlens_cpu only repeats cu_seqlens
_INDIFFERENT = ("cu_seqlens_cpu", "chunk_size")


def _one_gate(given: dict[str, Any]) -> str | None:
    if given.get("g") is not None and given.get("g_gamma") is not None:
        return "`g` and `g_gamma` are both given; only one of them can be the gate."
    return None


def _one_layout(given: dict[str, Any]) -> str | None:
    if given.get("state_v_first") and given.get("transpose_state_layout") is not None:
        return "`state_v_first` and its old name `transpose_state_layout` are both given."
    return None


def _simple_gla_problem(given: dict[str, Any]) -> str | None:
    return _one_gate(given) or _one_layout(given)


def _linear_attn_problem(given: dict[str, Any]) -> str | None:
    if isinstance(given.get("initial_state"), tuple) and not given["normalize"]:
        return "`initial_state` is a pair, which it is only with `normalize`."
    return None


def _activation_problem(given: dict[str, Any]) -> str | None:
    if given["activation"] not in fla_layers.ACTIVATIONS:
        return f"`activation`: {given['activation']!r} is none of {', '.join(fla_layers.ACTIVATIONS)}."
    return None


def _conv_problem(given: dict[str, Any]) -> str | None:
    if given["weight"] is None:
        return "`weight` is None."
    if given["activation"] not in (None, "silu", "swish"):
        return f"`activation`: {given['activation']!r} is none of None, silu, swish."
    return None


def _rotary_problem(given: dict[str, Any]) -> str | None:
    offsets = given.get("seqlen_offsets")
    if not isinstance(offsets, int) or offsets != 0:
        return "`seqlen_offsets`: positions begin at 0, the rank's offset is added by zeco_compile."
    return None


_CONV_STATE = (
    "the rows before the sequence's first are those of another call, and are not exchanged between ranks."
)

_HF_PACKED = {"cu_seqlens": _PACKED, "seq_idx": _PACKED}
# what else the model returns: its layers hand on all keyword arguments that they are given
_HF_OUTPUTS = ("output_router_logits", "output_attentions", "output_hidden_states")


def _hf(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


SUBSTITUTES: tuple[Substitute, ...] = (
    *(
        Substitute(
            _hf(model),
            "mamba2_chunk_scan",
            transformers_layers.mamba2_chunk_scan,
            _HF_PACKED | {"z": "the gate is applied behind the scan."},
            _HF_OUTPUTS,
        )
        for model in ("mamba2", "bamba", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid")
    ),
    *(
        Substitute(
            _hf(model),
            "mamba_selective_scan",
            transformers_layers.mamba_selective_scan,
            _HF_PACKED,
            ("use_mambapy", "use_associative_scan", *_HF_OUTPUTS),
        )
        for model in ("mamba", "falcon_mamba", "jamba", "zamba")
    ),
    Substitute("fla.ops.gla", "chunk_gla", fla_attention.chunk_gla, _ATTENTION, _INDIFFERENT),
    Substitute("fla.ops.gla", "fused_chunk_gla", fla_attention.chunk_gla, _ATTENTION, _INDIFFERENT),
    Substitute(
        "fla.ops.gla",
        "fused_recurrent_gla",
        fla_attention.fused_recurrent_gla,
        {**_ATTENTION, **_REVERSE, "gv": "a gate of the value channels is not a gate of the recurrence."},
        _INDIFFERENT,
        _one_layout,
    ),
    *(
        Substitute(
            "fla.ops.simple_gla",
            name,
            fla_attention.simple_gla,
            {**_ATTENTION, **_REVERSE},
            _INDIFFERENT,
            _simple_gla_problem,
        )
        for name in ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla")
    ),
    Substitute(
        "fla.ops.simple_gla",
        "parallel_simple_gla",
        fla_attention.parallel_simple_gla,
        {**_ATTENTION, **_SCORES},
        _INDIFFERENT,
    ),
    *(
        Substitute(
            "fla.ops.retention",
            name,
            fla_attention.retention,
            {**_ATTENTION, **_REVERSE, **_SCORES},
            _INDIFFERENT,
            _one_layout,
        )
        for name in (
            "chunk_retention",
            "fused_chunk_retention",
            "fused_recurrent_retention",
            "parallel_retention",
        )
    ),
    *(
        Substitute(
            "fla.ops.lightning_attn",
            name,
            fla_attention.lightning_attn,
            {**_ATTENTION, **_REVERSE},
            _INDIFFERENT,
        )
        for name in ("chunk_lightning_attn", "fused_recurrent_lightning_attn")
    ),
    *(
        Substitute(
            "fla.ops.linear_attn",
            name,
            fla_attention.linear_attn,
            {**_ATTENTION, **_REVERSE},
            _INDIFFERENT,
            _linear_attn_problem,
        )
        for name in ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn")
    ),
    *(
        Substitute(f"fla.modules.{where}layernorm", name, meaning)
        for where in ("", "norm.")  # up to 0.5, and from 0.6 on
        for name, meaning in (
            ("layer_norm", fla_layers.layer_norm),
            ("group_norm", fla_layers.layer_norm),
            ("rms_norm", fla_layers.rms_norm),
            ("layer_norm_linear", fla_layers.layer_norm_linear),
            ("group_norm_linear", fla_layers.layer_norm_linear),
            ("rms_norm_linear", fla_layers.rms_norm_linear),
        )
    ),
    *(
        Substitute(f"fla.modules.{where}fused_norm_gate", name, meaning, problem=_activation_problem)
        for where in ("", "norm.")
        for name, meaning in (
            ("layer_norm_gated", fla_layers.layer_norm_gated),
            ("rms_norm_gated", fla_layers.rms_norm_gated),
        )
    ),
    *(Substitute(f"fla.modules.{where}l2norm", "l2norm", fla_layers.l2norm) for where in ("", "norm.")),
    *(
        # output_contiguous is about strides
        Substitute("fla.modules.activations", meaning.__name__, meaning, indifferent=("output_contiguous",))
        for meaning in (
            fla_layers.logsigmoid,
            fla_layers.swish_fwd,
            fla_layers.swish_bwd,
            fla_layers.sigmoid_fwd,
            fla_layers.sigmoid_bwd,
            fla_layers.swiglu_fwd,
            fla_layers.swiglu_fwdbwd,
            fla_layers.swiglu_linear,
        )
    ),
    Substitute(
        "fla.modules.causal_conv1d.ops",
        "causal_conv1d",
        fla_layers.causal_conv1d,
        {
            **_VARLEN,
            "initial_state": _CONV_STATE,
            "output_final_state": _CONV_STATE,
            "seq_idx": _PACKED,
            "cp_context": "the library's own context parallelism cannot be combined with this one.",
        },
        ("backend", "cu_seqlens_cpu", "chunk_indices"),
        _conv_problem,
    ),
    *(
        Substitute(
            "fla.ops.rwkv6",
            name,
            fla_attention.rwkv6,
            {
                **_ATTENTION,
                **_REVERSE,
                "output_final_state": "the state after the last token is not computed.",
            },
            _INDIFFERENT,
        )
        for name in ("chunk_rwkv6", "fused_recurrent_rwkv6")
    ),
    Substitute(
        "fla.modules.token_shift",
        "token_shift",
        fla_layers.token_shift,
        {**_VARLEN, "cache": _CONV_STATE, "output_cache": _CONV_STATE},
        ("chunk_indices",),
    ),
    *(
        Substitute(
            module,
            "rotary_embedding",
            fla_layers.rotary_embedding,
            {**_VARLEN, "inplace": "the result is another tensor."},
            ("chunk_indices", "max_seqlen", "seqlen_offsets"),
            _rotary_problem,
        )
        for module in ("fla.modules.rotary", "fla.modules.rotary.ops")  # up to 0.5, and from 0.6 on
    ),
)


# ----- what is known, and refused by name

_DELTA_RULE = (
    "this is {}: at each token the state is multiplied with a matrix, which takes out what it holds under the token's "
    "key, and not only with decays. The ranks exchange states that decay by numbers; one whose transition is a matrix "
    "is not supported."
)
_DELTA, _GATED_DELTA, _KDA = (
    _DELTA_RULE.format(name)
    for name in ("the delta rule", "the gated delta rule", "Kimi delta attention, a gated delta rule")
)

UNSUPPORTED: tuple[Unsupported, ...] = (
    *(
        Unsupported(_hf(model), f"torch_{kind}_gated_delta_rule", _GATED_DELTA)
        for model in (
            "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid", "lara_mini",
        )
        for kind in ("chunk", "recurrent")
    ),
    *(
        Unsupported(_hf(model), name, _KDA)
        for model in ("kimi_linear", "bailing_hybrid", "glm5_next")
        for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
    ),
    *(
        Unsupported(f"fla.ops.{rule}", f"{kind}_{rule}", why)
        for rule, why in (("delta_rule", _DELTA), ("gated_delta_rule", _GATED_DELTA), ("kda", _KDA))
        for kind in ("chunk", "fused_recurrent")
    ),
)  # fmt: skip

FOR_RANKS = (
    ForRanks("torch._higher_order_ops.associative_scan", "associative_scan", scans_by_name.associative_scan),
    ForRanks("torch.nn.modules.transformer", "_detect_is_causal_mask", causal_masks.detect_is_causal_mask),
)
