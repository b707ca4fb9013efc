"""Library functions are replaced while Dynamo traces: right numbers, every argument honoured or refused.

Where flash-linear-attention is not installed (it needs Triton and transformers), modules stand in for it that have
its layout and the signatures of fla-core 0.6.0, and, like it on a CPU, cannot compute anything. The truth is the
recurrence in float64 and, for layers, the formulas written out. With the library installed the same tests run
on it, and its own layers too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeco_compile
from zeco_compile import substitutes
from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.passes.errors import UnsupportedArgument
from zeco_compile.testing import assert_equivalent, assert_refused

INSTALLED = importlib.util.find_spec("fla") is not None
needs_fla = pytest.mark.skipif(not INSTALLED, reason="flash-linear-attention is not installed")

_QKV = "q, k, v"
_STATES = "scale=None, initial_state=None, output_final_state=False"
_DISABLED = "@torch.compiler.disable\n"
SIGNATURES = {
    "fla.ops.gla": [
        f"{_DISABLED}def chunk_gla({_QKV}, g, {_STATES}, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None)",
        "def fused_chunk_gla(**kwargs)",
        f"def fused_recurrent_gla({_QKV}, gk=None, gv=None, {_STATES}, reverse=False, state_v_first=False, "
        "cu_seqlens=None, **kwargs)",
    ],
    "fla.ops.simple_gla": [
        f"{_DISABLED}def chunk_simple_gla({_QKV}, g=None, g_gamma=None, {_STATES}, state_v_first=False, "
        "cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        f"def fused_chunk_simple_gla({_QKV}, g=None, g_gamma=None, {_STATES}, cu_seqlens=None)",
        f"def fused_recurrent_simple_gla({_QKV}, g=None, g_gamma=None, {_STATES}, reverse=False, "
        "state_v_first=False, cu_seqlens=None, **kwargs)",
        f"def parallel_simple_gla({_QKV}, g=None, scale=None, output_attentions=False, cu_seqlens=None, "
        "cu_seqlens_cpu=None)",
    ],
    "fla.ops.retention": [
        f"{_DISABLED}def chunk_retention({_QKV}, {_STATES}, cu_seqlens=None, **kwargs)",
        f"{_DISABLED}def fused_chunk_retention({_QKV}, {_STATES}, cu_seqlens=None)",
        f"def fused_recurrent_retention({_QKV}, {_STATES}, reverse=False, state_v_first=False, cu_seqlens=None, "
        "**kwargs)",
        f"def parallel_retention({_QKV}, scale=None, output_attentions=False, cu_seqlens=None)",
    ],
    "fla.ops.lightning_attn": [
        f"{_DISABLED}def chunk_lightning_attn({_QKV}, layer_idx, num_layers, {_STATES}, cu_seqlens=None, **kwargs)",
        f"def fused_recurrent_lightning_attn({_QKV}, layer_idx, num_layers, {_STATES}, reverse=False, "
        "cu_seqlens=None)",
    ],
    "fla.ops.linear_attn": [
        f"{_DISABLED}def chunk_linear_attn({_QKV}, {_STATES}, normalize=True, cu_seqlens=None)",
        f"{_DISABLED}def fused_chunk_linear_attn({_QKV}, {_STATES}, normalize=True, cu_seqlens=None)",
        f"def fused_recurrent_linear_attn({_QKV}, {_STATES}, reverse=False, normalize=False, cu_seqlens=None)",
    ],
    "fla.modules.norm.layernorm": [
        "def layer_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, "
        "is_rms_norm=False)",
        "def group_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, "
        "is_rms_norm=False, num_groups=1)",
        "def rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False)",
        "def layer_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5, "
        "prenorm=False, residual_in_fp32=False, is_rms_norm=False, num_groups=1)",
        "def group_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5, "
        "prenorm=False, residual_in_fp32=False, is_rms_norm=False, num_groups=1)",
        "def rms_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5, "
        "prenorm=False, residual_in_fp32=False)",
    ],
    "fla.modules.norm.fused_norm_gate": [
        f"def {name}_norm_gated(x, g, weight, bias, activation='swish', residual=None, prenorm=False, "
        "residual_in_fp32=False, eps=1e-6)"
        for name in ("layer", "rms")
    ],
    "fla.modules.norm.l2norm": ["def l2norm(x, eps=1e-6, output_dtype=None)"],
    "fla.modules.activations": [
        "def logsigmoid(x, temperature=1.)",
        "def swish_fwd(x, output_contiguous=False)",
        "def swish_bwd(x, dy, output_contiguous=False)",
        "def sigmoid_fwd(x, output_contiguous=False)",
        "def sigmoid_bwd(x, dy, output_contiguous=False)",
        "def swiglu_fwd(x, y, output_contiguous=False)",
        "def swiglu_fwdbwd(x, y, g, use_weight=False, output_contiguous=False)",
        "def swiglu_linear(x, y, weight, bias)",
    ],
    "fla.modules.causal_conv1d.ops": [
        "def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, "
        "activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, "
        "cp_context=None, **kwargs)",
    ],
    "fla.ops.rwkv6": [
        f"{_DISABLED}def chunk_rwkv6(r, k, v, w, u, {_STATES}, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs)",
        f"def fused_recurrent_rwkv6(r, k, v, w, u, {_STATES}, reverse=False, cu_seqlens=None)",
    ],
    "fla.modules.token_shift": [
        f"{_DISABLED}def token_shift(x, cu_seqlens=None, cache=None, output_cache=False, chunk_indices=None)",
    ],
    "fla.modules.rotary.ops": [
        "def rotary_embedding(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
        "chunk_indices=None)",
    ],
}


def module_of(name: str, signatures: list[str]) -> types.ModuleType:
    """A module whose functions cannot compute, like the library's without a GPU."""
    module = types.ModuleType(name)
    body = ":\n    raise RuntimeError('0 active drivers ([]). There should only be one.')\n"
    exec("import torch\n" + "\n".join(signature + body for signature in signatures), vars(module))
    return module


def library(name: str) -> Callable[..., Any]:
    """A function of the library by its full name, from what stands in for it where it is not installed."""
    module, _, function = name.rpartition(".")
    if importlib.util.find_spec("fla") is not None:
        return getattr(importlib.import_module(module), function)
    if module not in sys.modules:
        sys.modules[module] = module_of(module, SIGNATURES[module])
    return getattr(sys.modules[module], function)


@pytest.fixture(autouse=True)
def installed() -> None:
    torch._dynamo.reset()
    substitutes.install()


def compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One graph, traced and run by another backend than ours: the replacements hold for all."""
    torch._dynamo.reset()  # a test compiles one line for many functions
    return torch.compile(function, backend="aot_eager", fullgraph=True)(*args, **kwargs)


class Inputs:
    """Slowly decaying gates that differ by head."""

    def __init__(self, tokens: int = 10, dtype: torch.dtype = torch.float64, heads: int = 3) -> None:
        torch.manual_seed(0)
        shape = (2, tokens, heads)
        self.q, self.k = (torch.randn(*shape, 4).abs().to(dtype).requires_grad_() for _ in range(2))
        self.v = torch.randn(*shape, 5).to(dtype).requires_grad_()
        rates = torch.tensor([0.02, 0.1, 0.4]).repeat(heads)[:heads]
        self.g = (-rates[:, None] * torch.rand(*shape, 4)).to(dtype).requires_grad_()
        self.g_head = (-rates * torch.rand(shape)).to(dtype).requires_grad_()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.state = torch.randn(2, heads, 4, 5).to(wide).requires_grad_()
        self.keys = torch.rand(2, 1, heads, 4).to(wide).requires_grad_()

    def leaves(self) -> list[Tensor]:
        return [value for value in vars(self).values() if value.requires_grad]


def truth(x: Inputs, g: Tensor | None, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if g is not None and g.dim() == 1:
        g = g.expand(x.q.shape[:3])
    given = [None if t is None else t.double() for t in (x.q, x.k, x.v, g)]
    o, final_state = recurrent_gated_linear_attention(
        *given, scale=0.5, initial_state=None if state is None else state.double(), output_final_state=True
    )
    assert final_state is not None
    return o, final_state


def retention_gate(heads: int) -> Tensor:
    return (1 - 2.0 ** (-5.0 - torch.arange(heads, dtype=torch.float))).log()


def lightning_gate(heads: int, layer: int, layers: int) -> Tensor:
    return -(8 / heads * (1 - layer / layers)) * torch.arange(heads, dtype=torch.float)


def flipped(state: Tensor) -> Tensor:
    return state.transpose(-1, -2)


GLA, SIMPLE, RETENTION, LIGHTNING, LINEAR = (
    f"fla.ops.{name}." for name in ("gla", "simple_gla", "retention", "lightning_attn", "linear_attn")
)

# Every call: the library's function, how it is called, and the gate and states of the recurrence it stands for.
CALLS: dict[str, tuple[str, Callable[[Any, Inputs], Any], Callable[[Inputs], Any]]] = {
    "chunk_gla": (GLA + "chunk_gla", lambda f, x: f(x.q, x.k, x.v, x.g), lambda x: (x.g, None)),
    "chunk_gla, by position": (
        GLA + "chunk_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, 0.5, x.state, True),
        lambda x: (x.g, x.state),
    ),
    "chunk_gla, states the other way round": (
        GLA + "chunk_gla",
        lambda f, x: f(
            x.q, x.k, x.v, g=x.g, initial_state=flipped(x.state), output_final_state=True, state_v_first=True
        ),
        lambda x: (x.g, x.state, flipped),
    ),
    "fused_recurrent_gla": (
        GLA + "fused_recurrent_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, initial_state=x.state, output_final_state=True, reverse=False),
        lambda x: (x.g, x.state),
    ),
    "fused_recurrent_gla, no gate": (
        GLA + "fused_recurrent_gla",
        lambda f, x: f(x.q, x.k, x.v, None, None, None, None, True, False, False, None),
        lambda x: (None, None),
    ),
    "fused_recurrent_gla, old name": (
        GLA + "fused_recurrent_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, output_final_state=True, transpose_state_layout=True),
        lambda x: (x.g, None, flipped),
    ),
    **{
        name: (
            SIMPLE + name,
            lambda f, x: f(x.q, x.k, x.v, x.g_head, initial_state=x.state, output_final_state=True),
            lambda x: (x.g_head, x.state),
        )
        for name in ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla")
    },
    "chunk_simple_gla, constant per head": (
        SIMPLE + "chunk_simple_gla",
        lambda f, x: f(x.q, x.k, x.v, g_gamma=-0.1 * torch.arange(3.0), chunk_size=16),
        lambda x: (-0.1 * torch.arange(3.0), None),
    ),
    "parallel_simple_gla": (
        SIMPLE + "parallel_simple_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g_head),
        lambda x: (x.g_head, None),
    ),
    **{
        name: (
            RETENTION + name,
            lambda f, x: f(x.q, x.k, x.v, initial_state=x.state, output_final_state=True),
            lambda x: (retention_gate(3), x.state),
        )
        for name in ("chunk_retention", "fused_chunk_retention", "fused_recurrent_retention")
    },
    "parallel_retention": (
        RETENTION + "parallel_retention",
        lambda f, x: f(x.q, x.k, x.v),
        lambda x: (retention_gate(3), None),
    ),
    **{
        name: (
            LIGHTNING + name,
            lambda f, x: f(x.q, x.k, x.v, 1, 4, output_final_state=True),
            lambda x: (lightning_gate(3, 1, 4), None),
        )
        for name in ("chunk_lightning_attn", "fused_recurrent_lightning_attn")
    },
    **{
        name: (
            LINEAR + name,
            lambda f, x: f(x.q, x.k, x.v, initial_state=x.state, output_final_state=True, normalize=False),
            lambda x: (None, x.state),
        )
        for name in ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn")
    },
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("call", CALLS)
def test_attention_equals_the_recurrence(call: str, dtype: torch.dtype) -> None:
    name, how, what = CALLS[call]
    function, x = library(name), Inputs(dtype=dtype)
    o, final_state = compiled(lambda: how(function, x))

    gate, state, *layout = what(x)
    want, want_state = truth(x, gate, state)
    tolerance = 1e-10 if dtype == torch.float64 else 3e-2
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), want, rtol=tolerance, atol=tolerance)
    outputs, wanted = [o], [want]
    if final_state is not None:
        assert final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        want_state = layout[0](want_state) if layout else want_state
        torch.testing.assert_close(final_state.double(), want_state, rtol=tolerance, atol=tolerance)
        outputs, wanted = [o, final_state], [want, want_state]
    if dtype == torch.float64:
        cotangents = [torch.randn_like(each) for each in wanted]
        got, expected = (
            torch.autograd.grad(values, x.leaves(), cotangents, allow_unused=True)
            for values in (outputs, wanted)
        )
        for leaf, one, other in zip(x.leaves(), got, expected, strict=True):
            one, other = (torch.zeros_like(leaf) if each is None else each for each in (one, other))
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("asked", [True, False], ids=["states", "no states"])
@pytest.mark.parametrize("given", ["pair", "tensor", "nothing"])
def test_normalised_linear_attention(given: str, asked: bool) -> None:
    function, x = library(LINEAR + "chunk_linear_attn"), Inputs()
    initial = {"pair": (x.state, x.keys), "tensor": x.state, "nothing": None}[given]
    o, (kv, z) = compiled(lambda: function(x.q, x.k, x.v, initial_state=initial, output_final_state=asked))

    want, want_kv = truth(x, None, None if initial is None else x.state)
    keys = x.k.cumsum(1) + (x.keys if given == "pair" else 0)
    want = want / ((x.q * 0.5 * keys).sum(-1, keepdim=True) + 1e-10)
    torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(z, keys[:, -1:], rtol=1e-10, atol=1e-10)
    assert (kv is not None) == asked
    if asked:
        torch.testing.assert_close(kv, want_kv, rtol=1e-10, atol=1e-10)
    got, expected = (torch.autograd.grad(y.sum(), (x.q, x.k, x.v)) for y in (o, want))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# ----- two ranks


class Projected:
    """What `Inputs` has, computed by a model."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> None:
        self.q, self.k, self.v, self.g, self.g_head, self.state = q, k, v, g, g[..., 0], state


class Calls(nn.Module):
    """Projections, then the library's function where it is compiled, and the recurrence where it is not."""

    def __init__(
        self, name: str, how: Callable[[Any, Any], Any], what: Callable[[Any], Any], heads: int = 3
    ) -> None:
        super().__init__()
        self.library, self.how, self.what = library(name), how, what
        self.inner = nn.Linear(6, heads * (4 + 4 + 5 + 4))
        self.heads = heads

    def forward(self, x: Tensor, state: Tensor) -> Any:
        parts = self.inner(x).unflatten(-1, (self.heads, -1)).split([4, 4, 5, 4], -1)
        rates = torch.tensor([0.02, 0.1, 0.4], dtype=x.dtype).repeat(self.heads)[: self.heads, None]
        named = Projected(parts[0], parts[1].abs(), parts[2], -rates * parts[3].sigmoid(), state)
        if torch.compiler.is_compiling():
            return self.how(self.library, named)
        gate, initial, *layout = self.what(named)
        o, final_state = truth(named, gate, initial)  # type: ignore[arg-type]
        return o, layout[0](final_state) if layout else final_state


def two_inputs(tokens: int, heads: int = 3) -> Callable[[], tuple[Tensor, Tensor]]:
    def inputs() -> tuple[Tensor, Tensor]:
        state = torch.randn(2, heads, 4, 5)
        zeco_compile.mark_sequence(state, None)
        return torch.randn(2, tokens, 6), state

    return inputs


@pytest.mark.parametrize(
    "call",
    [
        "chunk_gla, states the other way round",
        "fused_recurrent_gla",
        "fused_recurrent_simple_gla",
        "chunk_retention",
        "chunk_linear_attn",
    ],
)
def test_the_state_travels(call: str) -> None:
    found = assert_equivalent(
        lambda: Calls(*CALLS[call]), two_inputs(22), world_size=2, output_dims=(1, None)
    )
    (region,) = found.regions
    assert region["how"] == "by name"


def test_as_many_heads_as_tokens_of_a_rank() -> None:
    """The decays of heads are made by arange: it must not be taken for one of positions."""
    name = RETENTION + "fused_recurrent_retention"

    def model() -> nn.Module:
        return Calls(
            name,
            lambda f, x: f(x.q, x.k, x.v, initial_state=x.state, output_final_state=True),
            lambda x: (retention_gate(4), x.state),
            heads=4,
        )

    for tokens in (8, 16):
        assert_equivalent(model, two_inputs(tokens, heads=4), world_size=2, output_dims=(1, None))


def test_normaliser_needs_no_exchange_of_its_own() -> None:
    name = LINEAR + "chunk_linear_attn"

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.library = library(name)
            self.inner = nn.Linear(6, 3 * (4 + 4 + 5))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.inner(x).unflatten(-1, (3, -1)).split([4, 4, 5], -1)
            q, k = q.exp(), k.exp()
            if torch.compiler.is_compiling():
                return self.library(q, k, v)[0]
            scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
            return torch.einsum("bhts,bshv->bthv", scores / scores.sum(-1, keepdim=True), v)

    found = assert_equivalent(Normalised, lambda: torch.randn(2, 22, 6), world_size=2, rtol=1e-9)
    assert len(found.regions) == 1
    assert found.reports[0]["decisions"] == []


def test_layers_on_two_ranks() -> None:
    """Convolution, norms and gate as fla.layers.GatedLinearAttention has them, around the attention."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = library(GLA + "chunk_gla")
            self.convolution = library("fla.modules.causal_conv1d.ops.causal_conv1d")
            self.norm = library("fla.modules.norm.layernorm.rms_norm")
            self.gated = library("fla.modules.norm.fused_norm_gate.rms_norm_gated")
            self.inner = nn.Linear(6, 6)
            self.conv = nn.Conv1d(6, 6, 4, groups=6)
            self.weight = nn.Parameter(torch.rand(6))
            self.gain = nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                y = self.norm(x, self.weight, None)
                y, _ = self.convolution(y, self.conv.weight.squeeze(1), self.conv.bias, x, activation="silu")
                y = y.unflatten(-1, (2, 3))
                o, _ = self.attention(y, y, y, -y.sigmoid())
                return self.gated(o, y, self.gain, None).flatten(2)
            y = F.rms_norm(x, (6,), self.weight, 1e-5)
            y = F.silu(self.conv(F.pad(y.transpose(1, 2), (3, 0)))).transpose(1, 2) + x
            y = y.unflatten(-1, (2, 3))
            o, _ = recurrent_gated_linear_attention(
                y, y, y, -y.sigmoid(), scale=3**-0.5, output_final_state=False
            )
            return (F.rms_norm(o, (3,), self.gain, 1e-6) * F.silu(y)).flatten(2)

    found = assert_equivalent(Layer, lambda: torch.randn(2, 14, 6), world_size=2)
    assert len(found.regions) == 1
    assert {each["decision"] for each in found.reports[0]["decisions"]} == {"halo exchange"}


@pytest.mark.parametrize("name", ["chunk_rwkv6", "fused_recurrent_rwkv6"])
def test_rwkv_on_two_ranks(name: str) -> None:
    """Token shift and a bonus for each token's own value, as fla.layers.RWKV6Attention has them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = library("fla.ops.rwkv6." + name)
            self.shift = library("fla.modules.token_shift.token_shift")
            self.parts = nn.Linear(6, 4 * 6)
            self.mix, self.bonus = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                delta = self.shift(x)
            else:
                delta = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) - x
            r, k, v, w = self.parts(x + delta * self.mix).unflatten(-1, (4, 2, 3)).unbind(2)
            w = -torch.exp(w)
            if torch.compiler.is_compiling():
                return self.attention(r, k, v, w, self.bonus, scale=0.5)[0].flatten(2)
            state, rows = x.new_zeros(x.shape[0], 2, 3, 3), []
            for t in range(x.shape[1]):
                new = k[:, t, :, :, None] * v[:, t, :, None]
                rows.append(((state + self.bonus[..., None] * new) * r[:, t, :, :, None]).sum(-2) * 0.5)
                state = state * w[:, t].exp()[..., None] + new
            return torch.stack(rows, 1).flatten(2)

    found = assert_equivalent(Layer, lambda: torch.randn(2, 14, 6), world_size=2)
    assert [region["family"] for region in found.regions] == ["per channel"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [4, 6])
def test_rotary_embedding_on_two_ranks(interleaved: bool, turned: int) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotate = library("fla.modules.rotary.ops.rotary_embedding")
            self.inner = nn.Linear(6, 12)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x).unflatten(-1, (2, 6))
            angles = torch.outer(
                torch.arange(x.shape[1], dtype=x.dtype), 0.3 ** torch.arange(turned // 2, dtype=x.dtype)
            )
            if torch.compiler.is_compiling():
                return self.rotate(y, angles.cos(), angles.sin(), interleaved)
            turn = torch.polar(torch.ones_like(angles), angles)[:, None]
            pairs = y[..., :turned]
            pairs = (
                pairs.unflatten(-1, (-1, 2))
                if interleaved
                else pairs.unflatten(-1, (2, -1)).transpose(-1, -2)
            )
            out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
            out = out.flatten(-2) if interleaved else out.transpose(-1, -2).flatten(-2)
            return torch.cat([out, y[..., turned:]], -1)

    assert_equivalent(Layer, lambda: torch.randn(2, 14, 6), world_size=2)


# ----- what is refused

REFUSED: dict[str, tuple[str, Callable[[Any, Inputs], Any], str]] = {
    "packed": (
        GLA + "chunk_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, cu_seqlens=torch.tensor([0, 4, 10])),
        "packed",
    ),
    "final state of RWKV": (
        "fla.ops.rwkv6.chunk_rwkv6",
        lambda f, x: f(x.q, x.k, x.v, x.g, x.g[0, 0], output_final_state=True)[0],
        "`output_final_state`",
    ),
    "rotary embedding of later rows": (
        "fla.modules.rotary.ops.rotary_embedding",
        lambda f, x: f(x.q, x.q[0, :, 0, :2], x.q[0, :, 0, :2], seqlen_offsets=3),
        "`seqlen_offsets`",
    ),
    "reverse": (GLA + "fused_recurrent_gla", lambda f, x: f(x.q, x.k, x.v, x.g, reverse=True), "`reverse`"),
    "gate of values": (GLA + "fused_recurrent_gla", lambda f, x: f(x.q, x.k, x.v, x.g, x.v), "`gv`"),
    "unknown": (
        GLA + "fused_recurrent_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, beta=0.1),
        "`beta` is not known",
    ),
    "no such parameter": (
        GLA + "chunk_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, beta=None),
        "none of its parameters",
    ),
    "too many": (
        GLA + "chunk_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, *[None] * 7),
        "11 positional arguments",
    ),
    "head first": (
        SIMPLE + "chunk_simple_gla",
        lambda f, x: f(x.q, x.k, x.v, head_first=True),
        "`head_first`",
    ),
    "two gates": (
        SIMPLE + "chunk_simple_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g_head, torch.zeros(3)),
        "both given",
    ),
    "two layouts": (
        GLA + "fused_recurrent_gla",
        lambda f, x: f(x.q, x.k, x.v, x.g, state_v_first=True, transpose_state_layout=True),
        "both given",
    ),
    "scores": (
        RETENTION + "parallel_retention",
        lambda f, x: f(x.q, x.k, x.v, output_attentions=True),
        "scores",
    ),
    "a pair without normaliser": (
        LINEAR + "chunk_linear_attn",
        lambda f, x: f(x.q, x.k, x.v, initial_state=(x.state, x.keys), normalize=False),
        "a pair",
    ),
    "activation": (
        "fla.modules.norm.fused_norm_gate.rms_norm_gated",
        lambda f, x: f(x.v, x.v, None, None, "relu"),
        "'relu' is none of",
    ),
    "rows of another call": (
        "fla.modules.causal_conv1d.ops.causal_conv1d",
        lambda f, x: f(x.q[:, :, 0], x.q[0, 0, 0].diag(), initial_state=x.q[:, :4, 0]),
        "`initial_state`",
    ),
    "no weight": (
        "fla.modules.causal_conv1d.ops.causal_conv1d",
        lambda f, x: f(x.q[:, :, 0]),
        "`weight` is None",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_line(case: str) -> None:
    name, how, message = REFUSED[case]
    function, x = library(name), Inputs()

    def user_code() -> Any:
        return how(function, x)

    with pytest.raises(UnsupportedArgument, match=message) as refused:
        torch.compile(user_code, backend="zeco", fullgraph=True)()
    assert name.rpartition(".")[2] in str(refused.value)
    assert refused.value.location.file == __file__


def test_refused_on_every_rank() -> None:
    name = GLA + "chunk_gla"

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.library = library(name)

        def forward(self, x: Tensor, bounds: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                return self.library(x, x, x, -x * x, cu_seqlens=bounds)[0]
            return x

    def inputs() -> tuple[Tensor, Tensor]:
        bounds = torch.tensor([0, 5, 12])
        zeco_compile.mark_sequence(bounds, None)
        return torch.randn(1, 12, 2, 3), bounds

    for fullgraph in (True, False):
        messages = assert_refused(
            Packed, inputs, world_size=2, error=UnsupportedArgument, match="cu_seqlens", fullgraph=fullgraph
        )
        assert all("self.library(x, x, x, -x * x, cu_seqlens=bounds)" in message for message in messages)


def test_explain_reports_the_refusal() -> None:
    function, x = library(GLA + "chunk_gla"), Inputs()
    report = zeco_compile.explain(lambda q, g: function(q, q, q, g, cu_seqlens=q[0, :, 0, 0]), x.q, x.g)
    assert "packed sequences" in report.error


def test_other_backends_leave_what_is_refused_to_the_library() -> None:
    """A graph break around the library's own function, as if nothing had been registered."""
    module = module_of("fla.ops.gla", SIGNATURES["fla.ops.gla"])
    reached = []

    def fused_recurrent_gla(
        q: Any, k: Any, v: Any, gk: Any = None, reverse: bool = False, **kwargs: Any
    ) -> Any:
        reached.append((reverse, kwargs))
        return q + 1, None

    with Replaced("fla.ops.gla", module):
        module.fused_recurrent_gla = torch.compiler.disable(fused_recurrent_gla)  # type: ignore[attr-defined]
        x = torch.randn(1, 6, 2, 3)
        graphs = []

        def backend(gm: Any, inputs: Any) -> Any:
            graphs.append(gm)
            return gm.forward

        def model(x: Tensor) -> Tensor:
            return module.fused_recurrent_gla(x.sin(), x, x, reverse=True, answer=42)[0].cos()

        got = torch.compile(model, backend=backend)(x)
    assert torch.equal(got, (x.sin() + 1).cos())
    assert reached == [(True, {"answer": 42})]
    assert len(graphs) == 2


# ----- registration


class Replaced:
    """Puts a module into sys.modules for a while."""

    def __init__(self, name: str, module: types.ModuleType) -> None:
        self.name, self.module = name, module

    def __enter__(self) -> None:
        self.before = sys.modules.get(self.name)
        sys.modules[self.name] = self.module

    def __exit__(self, *_: Any) -> None:
        del sys.modules[self.name]
        if self.before is not None:
            sys.modules[self.name] = self.before


def test_every_function_object_is_registered_once() -> None:
    with Replaced("fla.ops.gla", module_of("fla.ops.gla", SIGNATURES["fla.ops.gla"])):
        assert substitutes.register() == [GLA + "chunk_gla", GLA + "fused_recurrent_gla"]
        assert substitutes.register() == []
    # the library imported again: other objects
    with Replaced("fla.ops.gla", module_of("fla.ops.gla", SIGNATURES["fla.ops.gla"])):
        assert substitutes.register() == [GLA + "chunk_gla", GLA + "fused_recurrent_gla"]


def test_a_replacement_that_somebody_else_has_registered_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    module = module_of("fla.ops.gla", SIGNATURES["fla.ops.gla"])
    function = module.chunk_gla  # type: ignore[attr-defined]
    torch.compiler.substitute_in_graph(function, skip_signature_check=True)(
        lambda q, *args, **kwargs: (q * 2, None)
    )
    with Replaced("fla.ops.gla", module):
        assert substitutes.register() == [GLA + "fused_recurrent_gla"]
        x = torch.ones(1, 2, 1, 3)
        assert torch.equal(compiled(lambda: function(x, x, x, x)[0]), x * 2)
    assert "chunk_gla already has a replacement" in caplog.text


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        ("def chunk_gla(**kwargs)", "it has no parameter q"),
        ("def chunk_gla(q, k, v, g, beta)", "its parameter beta is unknown"),
        ("def chunk_gla(*args, q, k, v, g)", "any number of arguments"),
        ("def chunk_gla(q, k, v, g, scale=-1)", "its scale is -1 by default"),
    ],
)
def test_other_versions_of_a_function_are_left_alone(
    signature: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Replaced("fla.ops.gla", module_of("fla.ops.gla", [signature])),
        caplog.at_level("INFO", logger="zeco_compile.substitutes"),
    ):
        assert substitutes.register() == []
    assert why in caplog.text


def test_names_that_are_no_functions_are_left_alone() -> None:
    module = types.ModuleType("fla.ops.gla")
    module.chunk_gla = object()  # type: ignore[attr-defined]
    module.__getattr__ = lambda name: pytest.fail("looked for a name that is not there")  # type: ignore[method-assign]
    with Replaced("fla.ops.gla", module):
        assert substitutes.register() == []


SCRIPT = """
import sys, types
import torch
compiled = torch.compile(lambda x: x + 1, backend="zeco", fullgraph=True)
assert compiled(torch.ones(2, 3)).sum() == 12
assert not any(name.split(".")[0] in ("fla", "transformers", "triton.language") for name in sys.modules)
torch._dynamo.reset()

# imported after the backend, after a compilation and after a reset
module = sys.modules["fla.ops.gla"] = types.ModuleType("fla.ops.gla")
exec('''
import torch
@torch.compiler.disable
def chunk_gla(q, k, v, g, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    raise RuntimeError("no GPU")
''', vars(module))
x, options = torch.rand(1, 5, 2, 3), {"codegen": "aot_eager"}
compiled = torch.compile(lambda x: module.chunk_gla(x, x, x, -x), backend="zeco", fullgraph=True, options=options)
o, state = compiled(x)
assert o.shape == x.shape and state is None
try:
    module.chunk_gla(x, x, x, -x)
except RuntimeError as error:
    assert str(error) == "no GPU"
else:
    raise AssertionError("eager calls are to reach the library")
"""


def test_nothing_is_imported_and_a_library_imported_late_is_seen() -> None:
    """In a fresh process, which looks the backend up by its name."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, timeout=300)


# ----- layers


def wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
@pytest.mark.parametrize("affine", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("added", [True, False], ids=["residual", "no residual"])
def test_norms(added: bool, affine: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(2, 5, 6).to(dtype), torch.randn(2, 5, 6).to(dtype)
    weight, bias = (torch.rand(6).to(dtype), torch.rand(6).to(dtype)) if affine else (None, None)
    residual = torch.randn(2, 5, 6).to(dtype) if added else None
    total = x.double() + (residual.double() if residual is not None else 0)
    layer = F.layer_norm(total, (6,), wide(weight), wide(bias), 1e-5)
    rms = F.rms_norm(total, (6,), wide(weight), 1e-5) + (bias.double() if bias is not None else 0)
    group = F.group_norm(total.flatten(0, 1), 2, wide(weight), wide(bias), 1e-5).view_as(x)
    linear = torch.randn(4, 6).to(dtype)

    norm, gate = "fla.modules.norm.layernorm.", "fla.modules.norm.fused_norm_gate."
    after = {"residual": residual, "eps": 1e-5, "prenorm": True}
    for name, arguments, options, want in (
        (norm + "layer_norm", (), {}, layer),
        (norm + "rms_norm", (), {}, rms),
        (norm + "group_norm", (), {"num_groups": 2}, group),
        (norm + "layer_norm_linear", (linear, None), {}, layer @ linear.double().T),
        (norm + "rms_norm_linear", (linear, None), {}, rms @ linear.double().T),
        (norm + "group_norm_linear", (linear, None), {"num_groups": 2}, group @ linear.double().T),
        (gate + "layer_norm_gated", (), {"g": g}, layer * F.silu(g.double())),
        (gate + "rms_norm_gated", (), {"g": g, "activation": "sigmoid"}, rms * g.double().sigmoid()),
    ):
        function = library(name)
        if "g" in options:
            y, passed_on = compiled(
                lambda f, o: f(x, weight=weight, bias=bias, **o, **after), function, options
            )
        else:
            y, passed_on = compiled(
                lambda f, a, o: f(x, weight, bias, *a, **o, **after), function, arguments, options
            )
        tolerance = 1e-10 if dtype == torch.float64 else 2e-2
        assert y.dtype == dtype, name
        torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(passed_on.double(), total, rtol=tolerance, atol=tolerance)


def test_what_a_norm_passes_on_has_the_dtype_that_was_asked_for() -> None:
    function = library("fla.modules.norm.layernorm.rms_norm")
    x = torch.randn(2, 5, 6).bfloat16()
    y, passed_on = compiled(lambda: function(x, None, None, prenorm=True, residual_in_fp32=True))
    assert (y.dtype, passed_on.dtype) == (torch.bfloat16, torch.float32)
    y, passed_on = compiled(lambda: function(x, None, None, residual=x.double(), prenorm=True))
    assert (y.dtype, passed_on.dtype) == (torch.bfloat16, torch.float64)
    assert compiled(lambda: function(x, None, None)).shape == x.shape


def test_units() -> None:
    torch.manual_seed(0)
    x, y, g = (torch.randn(2, 5, 6, dtype=torch.float64).requires_grad_() for _ in range(3))
    weight, bias = torch.randn(4, 6).double(), torch.randn(4).double()
    activations = "fla.modules.activations."
    z = F.silu(x) * y
    dx, dy = torch.autograd.grad(z, (x, y), g)
    (dswish,) = torch.autograd.grad(F.silu(x), x, g)
    (dsigmoid,) = torch.autograd.grad(x.sigmoid(), x, g)
    for name, arguments, want in (
        (activations + "swish_fwd", (x,), F.silu(x)),
        (activations + "swish_bwd", (x, g), dswish),
        (activations + "sigmoid_fwd", (x,), x.sigmoid()),
        (activations + "sigmoid_bwd", (x, g), dsigmoid),
        (activations + "logsigmoid", (x, 16.0), F.logsigmoid(x) / 16),
        (activations + "swiglu_fwd", (x, y), z),
        (activations + "swiglu_fwdbwd", (x, y, g), (dx, dy)),
        (activations + "swiglu_fwdbwd", (x, y, g, True), (dx, dy, z)),
        (activations + "swiglu_linear", (x, y, weight, bias), F.linear(z, weight, bias)),
        ("fla.modules.norm.l2norm.l2norm", (x,), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()),
    ):
        function = library(name)
        torch.testing.assert_close(compiled(lambda f, a: f(*a), function, arguments), want)


# ----- the library itself


@needs_fla
@pytest.mark.parametrize("module", SIGNATURES)
def test_the_stand_in_has_the_signatures_of_the_library(module: str) -> None:
    stand_in = module_of(module, SIGNATURES[module])
    for signature in SIGNATURES[module]:
        name = signature.rpartition("def ")[2].partition("(")[0]
        ours, theirs = (
            [(p.name, p.kind, p.default) for p in inspect.signature(getattr(m, name)).parameters.values()]
            for m in (stand_in, importlib.import_module(module))
        )
        assert ours == theirs, name


@needs_fla
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "mode": "fused_recurrent",
            "num_heads": 4,
            "num_kv_heads": 2,
            "use_short_conv": True,
            "conv_bias": True,
        },
        {"fuse_norm": False, "expand_k": 1.0, "clamp_min": -0.2},
    ],
    ids=["default", "short convolution and shared heads", "unfused norm"],
)
@pytest.mark.parametrize("tokens", [26, 140])  # up to 64 tokens of a call the layer takes another function
def test_gated_linear_attention_of_the_library(options: dict[str, Any], tokens: int) -> None:
    from fla.layers import GatedLinearAttention

    class Layer(GatedLinearAttention):
        """The layer itself where it is compiled; written out where it is not, since its kernels need a GPU."""

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            if torch.compiler.is_compiling():
                return super().forward(x)[0]
            q, k, v, g = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.gk_proj(x)
            if self.use_short_conv:
                convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
                q, k, v = (convolved(c, y) for c, y in zip(convolutions, (q, k, v), strict=True))
            q, k, g = (y.unflatten(-1, (-1, self.head_k_dim)) for y in (q, k, g))
            v = v.unflatten(-1, (-1, self.head_v_dim))
            k, v, g = (y.repeat_interleave(self.num_kv_groups, 2) for y in (k, v, g))
            g = F.logsigmoid(g) / self.gate_logit_normalizer
            g = g if self.clamp_min is None else g.clamp_min(self.clamp_min)
            scale = self.head_k_dim**-0.5
            o, _ = recurrent_gated_linear_attention(q, k, v, g, scale=scale, output_final_state=False)
            norm = self.g_norm_swish_gate if self.fuse_norm_and_gate else self.g_norm
            o = F.rms_norm(o, (self.head_v_dim,), norm.weight, norm.eps)
            return self.o_proj((o * F.silu(self.g_proj(x).unflatten(-1, (-1, self.head_v_dim)))).flatten(2))

    def convolved(convolution: nn.Conv1d, y: Tensor) -> Tensor:
        padded = F.pad(y.transpose(1, 2), (convolution.kernel_size[0] - 1, 0))
        y = F.conv1d(padded, convolution.weight, convolution.bias, groups=y.shape[-1])
        return F.silu(y.transpose(1, 2))

    options = {"hidden_size": 16, "num_heads": 2, **options}
    found = assert_equivalent(lambda: Layer(**options), lambda: torch.randn(2, tokens, 16), world_size=2)
    assert [region["how"] for region in found.regions] == ["by name"]
