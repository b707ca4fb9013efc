"""Gated linear attention to call by name, for models that want to say what they mean."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

import zeco_compile.lowering  # noqa: F401  (importing it registers the ops)


@overload
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[False] = False,
) -> Tensor: ...
@overload
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,  o_t = scale * S_t^T q_t (Yang et al., GLA, equation 3).

    Args:
        q, k: [B, T, H, K]. v: [B, T, H, V]. Floating point; T is the sequence.
        g: log gate: None (no decay), [H] (constant per head), [B, T, H] (per head and token) or [B, T, H, K]
            (per channel). At most 0 in ordinary models; -inf starts a new sequence.
        scale: multiplies o; None is K ** -0.5.
        initial_state: [B, H, K, V], the same on every rank. It enters before the first token of the sequence.
        output_final_state: also return the state after the last token, equal on every rank.

    Returns o [B, T, H, V] in q's dtype, or (o, final_state [B, H, K, V] in float32 or float64).

    In eager, and compiled for one rank, q, k, v and g are the whole sequence. Under
    ``torch.compile(backend="zeco")`` with several ranks they are this rank's slice, and the state travels. Any
    device; differentiable once. Raises `InvalidShapes` where sizes or dtypes do not fit each other.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    o, final_state = torch.ops.zeco.gated_linear_attention(
        q, k, v, g, scale, initial_state, output_final_state, "all_scan", 0, ""
    )
    return (o, final_state) if output_final_state else o
