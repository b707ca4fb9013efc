"""What the scans of Hugging Face transformers' state space models mean, as the operator of this package.

Contract: as in fla_attention.py, for the functions of transformers 5.24's ``modeling_mamba2.py`` and
``modeling_mamba.py`` (other models carry copies of them). Layouts and dtypes are the library's. They compute in
float32 at least.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_compile.attention import gated_linear_attention


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """SSD: hidden_states [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, G, N]; the output [B, T, H, P] in float32,
    and with ``return_final_states`` the state [B, H, P, N]. ``chunk_size`` is about speed."""
    heads = hidden_states.shape[2]
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    x = hidden_states.float()
    keys, queries = (each.float().repeat_interleave(heads // each.shape[2], dim=2) for each in (B, C))
    start = None if initial_states is None else initial_states.float().transpose(-1, -2)
    o, state = gated_linear_attention(
        queries,
        keys,
        x * dt[..., None],
        A.float() * dt,
        scale=1.0,
        initial_state=start,
        output_final_state=True,
    )
    if D is not None:
        o = o + D[..., None] * x
    return (o, state.transpose(-1, -2)) if return_final_states else o


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Mamba-1: hidden_states, dt and z [B, D, T], A [D, N], B and C [B, N, T]; the output [B, D, T], and with
    ``return_last_state`` the state [B, D, N]. Each channel is a head of N keys and one value."""
    dtype = hidden_states.dtype
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    steps = dt.transpose(1, 2).float()
    shape = (*steps.shape, A.shape[1])
    keys, queries = (each.transpose(1, 2).float()[:, :, None].expand(shape) for each in (B, C))
    x = hidden_states.transpose(1, 2).float()
    o, state = gated_linear_attention(
        queries,
        keys,
        (x * steps)[..., None],
        A.float() * steps[..., None],
        scale=1.0,
        output_final_state=True,
    )
    out = o[..., 0].to(dtype).transpose(1, 2)
    if D is not None:
        out = out + hidden_states * D[None, :, None]
    if z is not None:
        out = out * F.silu(z)
    return (out, state[..., 0]) if return_last_state else out
