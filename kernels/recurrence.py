"""Gated linear attention step by step: the definition, and the truth that every kernel is tested against.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,        o_t = scale * S_t^T q_t

(Yang et al., Gated Linear Attention Transformers with Hardware-Efficient Training, equation 3; the query is
applied after the update, so a token sees itself.) Slow, in plain differentiable PyTorch, in any dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_compile.kernels.shapes import check_sizes, check_state, state_dtype


def recurrent_gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence, one token after the other; differentiable by autograd in every input.

    Args:
        q, k: [B, T, H, K], floating point.
        v: [B, T, H, V].
        g: log gate: None (no decay), [B, T, H] (one per head and token) or [B, T, H, K] (one per channel).
            exp(g_t) multiplies the state before token t is added. -inf resets the state.
        scale: multiplies o.
        initial_state: [B, H, K, V], the state before the first token; None is zero.
        output_final_state: also return the state after the last token.
        dtype: what to compute and answer in. None: compute in float64 where an input is float64, else in
            float32, and give o in q's dtype.

    Returns:
        o [B, T, H, V], and the final state [B, H, K, V] in the dtype computed in, or None.

    Raises:
        InvalidShapes: sizes or dtypes that do not fit each other.
    """
    sizes = check_sizes(q, k, v, g)
    compute = state_dtype(q, k, v, g, initial_state) if dtype is None else dtype
    out_dtype = q.dtype if dtype is None else dtype
    q, k, v = (x.to(compute) for x in (q, k, v))
    decay = None
    if g is not None:
        decay = (g if g.dim() == 4 else g.unsqueeze(-1)).to(compute).exp()
    if initial_state is None:
        state = q.new_zeros(sizes.batch, sizes.heads, sizes.key, sizes.value)
    else:
        check_state("initial_state", initial_state, sizes)
        state = initial_state.to(compute)
    outputs = []
    for t in range(sizes.tokens):
        if decay is not None:
            state = state * decay[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2) * scale)
    return torch.stack(outputs, dim=1).to(out_dtype), (state if output_final_state else None)
