"""What the kernels accept: the layout of q, k, v, g and the states, and the dtype they compute in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeco_compile.kernels.errors import InvalidShapes


@dataclass(frozen=True)
class Sizes:
    """Batch, tokens, heads, key channels, value channels, and channels of the gate (0: there is none).

    ``gate`` is ``key`` for a gate per channel and 1 for a gate per head and token; which of the two a
    single key channel has is of no consequence, the mathematics is the same.
    """

    batch: int
    tokens: int
    heads: int
    key: int
    value: int
    gate: int


def state_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where any of the tensors is float64, else float32: what states and sums are kept in."""
    if any(t is not None and t.dtype == torch.float64 for t in tensors):
        return torch.float64
    return torch.float32


def check_sizes(q: Tensor | None, k: Tensor | None, v: Tensor | None, g: Tensor | None) -> Sizes:
    """The sizes of q, k [B, T, H, K], v [B, T, H, V] and g (None, [B, T, H] or [B, T, H, K]).

    A kernel that does not read one of q, k, v passes None for it (but at least q or k); its size is then 0.

    Raises:
        InvalidShapes: a rank, size or dtype that does not fit, or no tokens at all.
    """
    named = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    for name, x in named.items():
        if x.dim() != 4:
            raise InvalidShapes(f"{name} has shape {list(x.shape)}; pass [batch, tokens, heads, channels].")
    for name, x in {**named, **({} if g is None else {"g": g})}.items():
        if not x.dtype.is_floating_point:
            raise InvalidShapes(f"{name} has dtype {x.dtype}; pass a floating-point tensor.")
    lead_name, lead = next(iter(named.items()))
    batch, tokens, heads = lead.shape[:3]
    for name, x in named.items():
        if x.shape[:3] != lead.shape[:3]:
            raise InvalidShapes(
                f"{name} has shape {list(x.shape)} and {lead_name} has {list(lead.shape)}; batch, tokens and "
                f"heads must be equal (repeat grouped heads before the call)."
            )
    if q is not None and k is not None and q.shape != k.shape:
        raise InvalidShapes(f"q has shape {list(q.shape)} and k has {list(k.shape)}; they must be equal.")
    if 0 in lead.shape[:3] or any(x.shape[3] == 0 for x in named.values()):
        raise InvalidShapes(f"{lead_name} has shape {list(lead.shape)}; every size must be at least 1.")
    keyed = k if k is not None else q
    key = 0 if keyed is None else keyed.shape[3]
    gate = 0
    if g is not None:
        if tuple(g.shape) not in ((batch, tokens, heads), (batch, tokens, heads, key)):
            raise InvalidShapes(
                f"g has shape {list(g.shape)}; pass [{batch}, {tokens}, {heads}] (one log gate per head and "
                f"token), [{batch}, {tokens}, {heads}, {key}] (one per channel), or None (no decay)."
            )
        gate = 1 if g.dim() == 3 else key
    return Sizes(batch, tokens, heads, key, 0 if v is None else v.shape[3], gate)


def check_state(name: str, state: Tensor, sizes: Sizes, value: int | None = None) -> None:
    """Raise InvalidShapes unless ``state`` is [B, H, K, V] and floating point."""
    wanted = (sizes.batch, sizes.heads, sizes.key, sizes.value if value is None else value)
    if tuple(state.shape) != wanted or not state.dtype.is_floating_point:
        raise InvalidShapes(
            f"{name} has shape {list(state.shape)} and dtype {state.dtype}; "
            f"pass a floating-point tensor of shape {list(wanted)} ([batch, heads, key, value])."
        )
