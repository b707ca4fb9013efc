"""What flash-linear-attention's operators mean, as the operator of this package.

Contract: each function here computes what the library function of that name in ``fla.ops`` computes on one device
(fla-core 0.6.0; formulas from its ``naive.py`` files and kernels), for the arguments that it takes; what it does
not take is refused before it is called (zeco_compile/substitutes.py). Layouts are fla's: q, k [B, T, H, K],
v [B, T, H, V], states [B, H, K, V], or [B, H, V, K] with ``state_v_first``. Outputs have fla's dtypes, with one
exception: float64 inputs, which fla's kernels hardly take, keep float64 states.

Dynamo traces these functions in place of the library's, so they are plain PyTorch, without closures.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_compile.attention import gated_linear_attention

Result = tuple[Tensor, Any]


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
) -> Result:
    """Gate per channel, g [B, T, H, K]. Returns o in v's dtype, and the final state or None."""
    o, final_state = _attention(q, k, v, g, scale, initial_state, output_final_state, state_v_first)
    return o.to(v.dtype), final_state


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
) -> Result:
    """As `chunk_gla`, without a gate where ``gk`` is None. ``transpose_state_layout`` is fla's old name of
    ``state_v_first``."""
    v_first = bool(state_v_first or transpose_state_layout)
    return _attention(q, k, v, gk, scale, initial_state, output_final_state, v_first)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
) -> Result:
    """Gate per head and token, g [B, T, H], or constant per head, g_gamma [H], or none.

    g_gamma gets no gradient: fla treats it as a constant.
    """
    gate = g if g_gamma is None else g_gamma.detach()
    v_first = bool(state_v_first or transpose_state_layout)
    return _attention(q, k, v, gate, scale, initial_state, output_final_state, v_first)


def parallel_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None
) -> Result:
    """As `simple_gla`. Returns (o, None): the attention scores are not made."""
    return _attention(q, k, v, g, scale, None, False, False)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool | None = None,
) -> Result:
    """The decay of head h is 1 - 2 ** (-5 - h), its logarithm taken in float32 as fla does
    (Sun et al., Retentive Network, equation 8)."""
    exponent = -5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device)
    v_first = bool(state_v_first or transpose_state_layout)
    g = (1 - 2.0**exponent).log()
    return _attention(q, k, v, g, scale, initial_state, output_final_state, v_first)


def lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> Result:
    """The log decay of head h of H is -8 h / H (1 - layer_idx / num_layers), in float32 as fla computes it."""
    heads = q.shape[2]
    slope = -(8 / heads * (1 - layer_idx / num_layers))
    g = slope * torch.arange(heads, dtype=torch.float, device=q.device)
    return _attention(q, k, v, g, scale, initial_state, output_final_state, False)


def linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalize: bool,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> Result:
    """No gate. With ``normalize`` o_t is divided by scale * q_t^T sum_{s<=t} k_s + 1e-10.

    That denominator is the output of the same attention for values of 1, so it is computed as one more channel
    of v. The states are then pairs (kv [B, H, K, V], z [B, 1, H, K]), z the sum of the keys.
    """
    if not normalize:
        return _attention(q, k, v, None, scale, initial_state, output_final_state, False)
    kv, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    state = None
    if kv is not None or z is not None:
        batch, _, heads, channels = k.shape
        kv = k.new_zeros(batch, heads, channels, v.shape[3], dtype=_wide(k)) if kv is None else kv
        ones = kv.new_zeros(batch, heads, channels, 1) if z is None else z.permute(0, 2, 3, 1).to(kv.dtype)
        state = torch.cat([kv, ones], dim=-1)
    values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    o, final = _attention(q, k, values, None, scale, state, output_final_state, False)
    out = o[..., :-1] / (o[..., -1:] + 1e-10)
    if output_final_state:
        return out, (final[..., :-1], final[..., -1:].permute(0, 3, 1, 2).to(k.dtype))
    # fla returns z whether asked or not; by itself it needs no scan, and costs nothing where it is not used
    keys = k.sum(1, keepdim=True)
    return out, (None, keys if z is None else keys + z)


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> Result:
    """o_t = scale r_t (S_{t-1} + u k_t v_t), S_t = exp(w_t) S_{t-1} + k_t v_t (Peng et al., Eagle and Finch, equation
    18); log decays w [B, T, H, K], u [H, K]. Returns (o in r's dtype, None).

    What the operator reads before a token instead of after it is what it reads after the token before: keys, values
    and decays are those of the row before, none for the first.
    """
    keys, values, decays = (F.pad(x[:, :-1], (0, 0, 0, 0, 1, 0)) for x in (k, v, w))
    before, _ = _attention(r, keys, values, decays, scale, initial_state, False, False)
    scale = r.shape[-1] ** -0.5 if scale is None else scale
    wide = _wide(r)
    own = (r.to(wide) * u.to(wide) * k.to(wide)).sum(-1, keepdim=True) * scale
    return (before.to(wide) + own * v.to(wide)).to(r.dtype), None


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
) -> Result:
    if initial_state is not None and state_v_first:
        initial_state = initial_state.transpose(-1, -2)
    if not output_final_state:
        return gated_linear_attention(q, k, v, g, scale=scale, initial_state=initial_state), None
    o, final_state = gated_linear_attention(
        q, k, v, g, scale=scale, initial_state=initial_state, output_final_state=True
    )
    return o, final_state.transpose(-1, -2).contiguous() if state_v_first else final_state


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
