"""Whole random models for the property tests: drawn as plain data (`Program`), built from it in every process.

A program is a small language-model trunk as people write it: projections, perhaps a short convolution, a token
shift and rotary embeddings, linear attention in one of the spellings, an output projection, and a head. The
gates are an input, so that their gradient is compared for itself and they can take the values that broke
other systems: zero, strong ones, hard resets.

A spelling is drawn only with gates for which it gives no NaN in eager: a cumulative sum cannot hold -inf (the
difference of two is NaN) or -1e38 (the tokens behind it lose their own gates), and a mask that is multiplied
after the exponential overflows where the decay is strong.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import zeco_compile

CHANNEL, HEAD, CONSTANT, NONE = "per channel", "per head and token", "constant per head", "none"
FAMILIES = (CHANNEL, HEAD, CONSTANT, NONE)

VOCABULARY = 11
WIDTH = 8
IGNORED = -100

MILD = ("mild", "zero")  # mean -0.01 and different for each head; a gate of exactly one
ORDINARY = (*MILD, "-5", "-20")
RESETS = (*ORDINARY, "-1e38", "-inf")
_GATE = {"zero": 0.0, "-5": -5.0, "-20": -20.0, "-1e38": -1e38, "-inf": float("-inf")}


@dataclass(frozen=True)
class Spelling:
    """One way to write the attention: which families it can express, for which gates, at which lengths."""

    name: str
    families: tuple[str, ...]
    gates: tuple[str, ...]
    longest: int = 70
    how: str = "by meaning"


SPELLINGS = (
    Spelling("einsum, masked exponent", FAMILIES, ORDINARY, longest=33),
    Spelling("einsum, masked scores", FAMILIES, MILD, longest=33),
    Spelling("matmul, multiplied mask", FAMILIES, MILD),
    Spelling("matmul, masked scores", FAMILIES, MILD),
    Spelling("matmul, tril", FAMILIES, MILD),
    Spelling("heads first, masked exponent", (HEAD, CONSTANT, NONE), ORDINARY),
    Spelling("sum of products, where", FAMILIES, ORDINARY, longest=17),
    Spelling("loop, list and stack", FAMILIES, RESETS, longest=12),
    Spelling("loop, in place", FAMILIES, RESETS, longest=12),
    Spelling("by name", FAMILIES, RESETS, how="by name"),
)
BY_NAME = {spelling.name: spelling for spelling in SPELLINGS}

LENGTHS = (1, 2, 3, 4, 5, 7, 11, 12, 16, 17, 31, 33, 63, 64, 65, 70)


@dataclass(frozen=True)
class Program:
    """A model, its sizes, and how many ranks run it."""

    world_size: int
    batch: int
    local_length: int
    heads: int
    key: int
    value: int
    family: str
    spelling: str
    gates: tuple[str, ...]
    dtype: str
    layers: int
    convolution: int
    """Width of a causal depthwise convolution over q, k and v; 0 for none."""
    token_shift: bool
    rotary: bool
    head: str
    state: bool
    """By name: an initial state goes in and the final state comes out."""
    seed: int

    @property
    def length(self) -> int:
        return self.world_size * self.local_length

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def plain(self) -> dict[str, Any]:
        """The program as it travels to the ranks, which cannot import this file by its name."""
        return asdict(self)


@st.composite
def programs(draw: Any, spellings: tuple[Spelling, ...] = SPELLINGS) -> Program:
    spelling = draw(st.sampled_from(spellings))
    family = draw(st.sampled_from(spelling.families))
    key = draw(st.sampled_from((2, 3, 5, 6, 7, 12)))
    head = draw(st.sampled_from(("rows", "loss mean", "loss sum", "mean", "sum")))
    world_size = draw(st.sampled_from((1, 2, 3, 4)))
    # a loop over one token does not show what it is
    shortest = 2 if spelling.name.startswith("loop") and world_size > 1 else 1
    local_length = draw(st.sampled_from([n for n in LENGTHS if shortest <= n <= spelling.longest]))
    if world_size * local_length < 2 * world_size and head.startswith("loss"):
        head = "rows"  # one token has no next one
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return Program(
        world_size=world_size,
        batch=batch,
        local_length=local_length,
        heads=heads,
        key=key,
        value=draw(st.sampled_from([v for v in (1, 3, 5, 6, 10) if v != key])),
        family=family,
        spelling=spelling.name,
        gates=draw(st.lists(st.sampled_from(spelling.gates), min_size=1, max_size=3, unique=True).map(tuple)),
        dtype=draw(st.sampled_from(("float64", "float32"))),
        layers=draw(st.integers(1, 2)),
        convolution=draw(st.sampled_from((0, 0, 1, 2, 3, 4, 5, 6))),
        token_shift=draw(st.booleans()),
        rotary=key % 2 == 0 and draw(st.booleans()),
        head=head,
        state=spelling.how == "by name" and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


# --------------------------------------------------------------------------------------------------- the models


def build(plain: dict[str, Any]) -> nn.Module:
    return Trunk(Program(**plain))


def inputs(plain: dict[str, Any]) -> tuple[Any, ...]:
    """(x, gates or None, labels, initial states or None): the whole sequence."""
    program = Program(**plain)
    draw = torch.Generator().manual_seed(program.seed)
    x = torch.randn(program.batch, program.length, WIDTH, generator=draw, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, (program.batch, program.length), generator=draw)
    ignored = torch.rand(labels.shape, generator=draw) < 0.6
    ignored[0, -1] = False  # a mean over no label at all would be NaN
    return x, _gates(program, draw), labels.masked_fill(ignored, IGNORED), _states(program, draw)


def _gates(program: Program, draw: torch.Generator) -> Tensor | None:
    if program.family in (CONSTANT, NONE):
        return None
    per_channel = program.family == CHANNEL
    shape = [program.batch, program.length, program.layers, program.heads, program.key if per_channel else 1]
    rate = torch.linspace(0.25, 1.75, program.heads, dtype=torch.float64)[:, None]  # mean one
    g = -0.02 * rate * torch.rand(shape, generator=draw, dtype=torch.float64)
    special = [name for name in program.gates if name != "mild"]
    if special == list(program.gates) and len(special) == 1:
        g = torch.full_like(g, _GATE[special[0]])  # at every token
    else:
        kind = torch.randint(8, shape, generator=draw)
        for number, name in enumerate(special):
            g = g.masked_fill(kind == number, _GATE[name])
    return g if per_channel else g.squeeze(-1)


def _states(program: Program, draw: torch.Generator) -> Tensor | None:
    if not program.state:
        return None
    shape = (program.layers, program.batch, program.heads, program.key, program.value)
    states = torch.randn(shape, generator=draw, dtype=torch.float64)
    return zeco_compile.mark_sequence(states, None)


class Trunk(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(Layer(program) for _ in range(program.layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, gates: Tensor | None, labels: Tensor, states: Tensor | None) -> Any:
        finals = []
        for number, layer in enumerate(self.layers):
            g = None if gates is None else gates[:, :, number]
            y, final = layer(x, g, None if states is None else states[number])
            x = x + y
            finals.append(final)
        y = self.head(x)
        kind = self.program.head
        if kind.startswith("loss"):
            shifted, targets = y[:, :-1], labels[:, 1:]
            y = F.cross_entropy(
                shifted.reshape(-1, VOCABULARY),
                targets.reshape(-1),
                ignore_index=IGNORED,
                reduction=kind.removeprefix("loss "),
            )
        elif kind == "mean":
            y = torch.tanh(y).mean(1)
        elif kind == "sum":
            y = torch.tanh(y).sum(1)
        return y if finals[0] is None else (y, finals)


class Layer(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        heads, key, value = program.heads, program.key, program.value
        self.sizes = [heads * key, heads * key, heads * value]
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Parameter(torch.rand(WIDTH))
        self.qkv = nn.Linear(WIDTH, sum(self.sizes))
        self.out = nn.Linear(heads * value, WIDTH, bias=False)
        if program.convolution:
            channels = sum(self.sizes)
            self.conv = nn.Conv1d(
                channels, channels, program.convolution, groups=channels, padding=program.convolution - 1
            )
        if program.family == CONSTANT:
            rates = {"mild": 0.01, "zero": 0.0, "-5": 5.0, "-20": 20.0, "-1e38": 1e38, "-inf": float("inf")}
            names = [program.gates[h % len(program.gates)] for h in range(heads)]
            self.slopes = nn.Parameter(torch.tensor([-rates[name] * (1 + h) for h, name in enumerate(names)]))
        if program.rotary:
            self.register_buffer("frequencies", 0.3 ** torch.arange(key // 2))

    def forward(self, x: Tensor, g: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        program = self.program
        B, T, _ = x.shape
        x = self.norm(x)
        if program.token_shift:
            previous = F.pad(x, (0, 0, 1, 0))[:, :-1]
            x = x + self.mix * (previous - x)
        qkv = self.qkv(x)
        if program.convolution:
            qkv = self.conv(qkv.transpose(1, 2))
            if program.convolution > 1:
                qkv = qkv[..., :T]
            qkv = F.silu(qkv.transpose(1, 2))
        q, k, v = qkv.split(self.sizes, -1)
        q, k = (each.view(B, T, program.heads, program.key) for each in (q, k))
        v = v.view(B, T, program.heads, program.value)
        if program.rotary:
            angle = torch.arange(T, dtype=x.dtype)[:, None] * self.frequencies
            q, k = rotated(q, angle), rotated(k, angle)
        if program.family == CONSTANT:
            g = self.slopes
        o, final = attend(program.spelling, program.family, q * program.key**-0.5, k, v, g, state)
        return self.out(o.flatten(2)), final


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


# ------------------------------------------------------------------------------------------------ the spellings


def attend(
    spelling: str, family: str, q: Tensor, k: Tensor, v: Tensor, g: Any, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """q, k [B, T, H, K], v [B, T, H, V]; g [B, T, H, K], [B, T, H], [H] or None, as the family says."""
    if spelling == "by name":
        if state is None:
            return zeco_compile.gated_linear_attention(q, k, v, g, scale=1.0), None
        return zeco_compile.gated_linear_attention(
            q, k, v, g, scale=1.0, initial_state=state, output_final_state=True
        )
    written = {
        "einsum, masked exponent": einsum_masked_exponent,
        "einsum, masked scores": einsum_masked_scores,
        "matmul, multiplied mask": matmul_multiplied_mask,
        "matmul, masked scores": matmul_masked_scores,
        "matmul, tril": matmul_tril,
        "heads first, masked exponent": heads_first_masked_exponent,
        "sum of products, where": sum_of_products_where,
        "loop, list and stack": loop_list,
        "loop, in place": loop_in_place,
    }[spelling]
    return written(family, q, k, v, g), None


def differences(family: str, q: Tensor, g: Any) -> Tensor | None:
    """The log decay between each two positions, [B, T, T, H, K or 1] (1, T, T, ... if constant)."""
    if family == NONE:
        return None
    if family == CONSTANT:
        n = torch.arange(q.shape[1])
        return ((n[:, None] - n[None])[..., None] * g)[None, ..., None]
    G = g.cumsum(1)
    pairs = G[:, :, None] - G[:, None]
    return pairs if family == CHANNEL else pairs[..., None]


def einsum_masked_exponent(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    T = q.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    pairs = differences(family, q, g)
    if pairs is None:
        scores = torch.einsum("bihk,bjhk->bijh", q, k).masked_fill(~causal[None, :, :, None], 0.0)
    elif family == CHANNEL:
        decay = pairs.masked_fill(~causal[None, :, :, None, None], float("-inf")).exp()
        scores = torch.einsum("bihk,bjhk,bijhk->bijh", q, k, decay)
    else:
        decay = pairs.squeeze(-1).masked_fill(~causal[None, :, :, None], float("-inf")).exp()
        scores = torch.einsum("bihk,bjhk->bijh", q, k) * decay
    return torch.einsum("bijh,bjhv->bihv", scores, v)


def einsum_masked_scores(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    T = q.shape[1]
    pairs = differences(family, q, g)
    if pairs is None:
        scores = torch.einsum("bihk,bjhk->bhij", q, k)
    elif family == CHANNEL:
        scores = torch.einsum("bihk,bjhk,bijhk->bhij", q, k, pairs.exp())
    else:
        scores = torch.einsum("bihk,bjhk->bhij", q, k) * pairs.exp().squeeze(-1).permute(0, 3, 1, 2)
    future = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
    return torch.einsum("bhij,bjhv->bihv", scores.masked_fill(future, 0.0), v)


def factored_scores(family: str, q: Tensor, k: Tensor, g: Any) -> Tensor:
    """[B, H, T, T], unmasked: the decay is carried by q and k, or multiplied as a matrix if constant."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if family == NONE:
        return q @ k.mT
    if family == CONSTANT:
        n = torch.arange(q.shape[2], dtype=q.dtype)
        return (q @ k.mT) * torch.exp((n[:, None] - n) * g[:, None, None])
    G = (g if family == CHANNEL else g.unsqueeze(-1)).transpose(1, 2).cumsum(2)
    return (q * G.exp()) @ (k * (-G).exp()).mT


def matmul_multiplied_mask(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    T = q.shape[1]
    mask = torch.tril(torch.ones(T, T, dtype=q.dtype))
    return ((factored_scores(family, q, k, g) * mask) @ v.transpose(1, 2)).transpose(1, 2)


def matmul_masked_scores(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    i = torch.arange(q.shape[1])
    scores = factored_scores(family, q, k, g).masked_fill(i[:, None] < i, 0.0)
    return torch.matmul(scores, v.transpose(1, 2)).transpose(1, 2)


def matmul_tril(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    return (factored_scores(family, q, k, g).tril() @ v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)


def heads_first_masked_exponent(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # [B, H, T, D]
    T = q.shape[2]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    scores = q @ k.transpose(-1, -2)
    if family == NONE:
        scores = scores.masked_fill(future, 0)
    elif family == CONSTANT:
        n = torch.arange(T)
        distance = n.unsqueeze(1) - n.unsqueeze(0)
        decay = (distance * g[:, None, None]).masked_fill(future, float("-inf"))
        scores = scores * decay.exp()
    else:
        G = g.transpose(1, 2).cumsum(-1)
        decay = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(future, float("-inf"))
        scores = scores * decay.exp()
    return (scores @ v).transpose(1, 2)


def sum_of_products_where(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    i = torch.arange(q.shape[1])
    causal = (i[:, None] >= i[None, :])[None, :, :, None]
    pairs = differences(family, q, g)
    products = q[:, :, None] * k[:, None]  # [B, T, T, H, K]
    if pairs is not None:
        products = products * torch.where(causal[..., None], pairs, torch.zeros_like(pairs)).exp()
    scores = products.sum(-1)
    scores = torch.where(causal, scores, torch.zeros_like(scores))
    return (scores[..., None] * v[:, None]).sum(2)


def decays(family: str, g: Any, length: int) -> list[Any]:
    """What the state [B, H, K, V] is multiplied by at each step; nothing without a decay."""
    if family == NONE:
        return [None] * length
    if family == CONSTANT:
        return [g.exp()[:, None, None]] * length
    steps = [g[:, t].exp() for t in range(length)]
    return [a.unsqueeze(-1) if family == CHANNEL else a[..., None, None] for a in steps]


def loop_list(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1])
    outs = []
    for t, decay in enumerate(decays(family, g, T)):
        if decay is not None:
            S = decay * S
        S = S + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outs, dim=1)


def loop_in_place(family: str, q: Tensor, k: Tensor, v: Tensor, g: Any) -> Tensor:
    B, T, H, K = q.shape
    out = torch.zeros_like(v)
    S = torch.zeros(B, H, K, v.shape[-1], dtype=q.dtype)
    for t, decay in enumerate(decays(family, g, T)):
        S = S.clone()  # autograd still needs the state that the last step read
        if decay is not None:
            S *= decay
        S += torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        out[:, t] = (q[:, t].unsqueeze(-1) * S).sum(-2)
    return out
