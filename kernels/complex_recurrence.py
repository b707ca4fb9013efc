"""The elementwise recurrence h_t = a_t h_{t-1} + u_t in complex numbers, on one device.

Nothing is divided by a decay and no logarithm of one is taken, so a may be anything: zero, on the unit circle, beyond
it. Chunks of `CHUNK` steps run beside each other: what each makes of zero, and its product of decays, first; the states
between the chunks are a recurrence as well; then each chunk from the state that it begins with. So the steps are
O(CHUNK log T). What is between chunks is complex128: where a is the same at every step, so is what rounding does to the
product of a chunk, and in complex64 it would turn the phase by as much in each of them.

a [B, T, ...], u [B, T, ...], states [B, ...], complex; where a has a size of one it is the same along that dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32


def states(a: Tensor, u: Tensor, state: Tensor) -> Tensor:
    """h [B, T, ...], from the state before the first step."""
    a, h = a.expand(u.shape), torch.empty_like(u, memory_format=torch.contiguous_format)
    count = u.shape[1] // CHUNK if u.shape[1] > CHUNK else 0
    end = count * CHUNK
    if count:
        a_in_chunks, u_in_chunks, h_in_chunks = (x[:, :end].unflatten(1, (count, CHUNK)) for x in (a, u, h))
        after = states(*_of_chunks(a_in_chunks, u_in_chunks), state.to(torch.complex128))
        each = torch.cat([state.unsqueeze(1), after[:, :-1].to(state.dtype)], 1)
        for t in range(CHUNK):
            each = torch.addcmul(u_in_chunks[:, :, t], a_in_chunks[:, :, t], each)
            h_in_chunks[:, :, t] = each
        state = after[:, -1].to(state.dtype)
    for t in range(end, u.shape[1]):
        state = torch.addcmul(u[:, t], a[:, t], state)
        h[:, t] = state
    return h


def rank_state(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(product of all decays, state after the last step from zero), [B, ...] each."""
    a, dtype = a.expand(u.shape), u.dtype
    while u.shape[1] > CHUNK:
        count = u.shape[1] // CHUNK
        end = count * CHUNK
        rest = a[:, end:], u[:, end:]
        a, u = _of_chunks(*(x[:, :end].unflatten(1, (count, CHUNK)) for x in (a, u)))
        a, u = torch.cat([a, rest[0]], 1), torch.cat([u, rest[1]], 1)
    a, u = _of_chunks(a.unsqueeze(1), u.unsqueeze(1))
    return a[:, 0].to(dtype), u[:, 0].to(dtype)


def rank_dstate(a: Tensor, dh: Tensor) -> Tensor:
    """The gradient of the state before the first step, [B, ...], where that after the last one has none."""
    decay = a.conj().flip(1)
    return rank_state(decay, decay * dh.flip(1))[1]


def gradients(
    a: Tensor, h: Tensor, state: Tensor, dh: Tensor, dstate_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(da, du, dstate) of h = states(a, u, state), where the state after the last step has the gradient dstate_out
    besides that of h[:, -1]."""
    decay = a.conj().flip(1)
    before = states(decay, decay * dh.flip(1), dstate_out).flip(1)  # of the state before each step
    du = dh + torch.cat([before[:, 1:], dstate_out.unsqueeze(1)], 1)
    da = du * torch.cat([state.unsqueeze(1), h[:, :-1]], 1).conj()
    return da.sum_to_size(a.shape).contiguous(), du, before[:, 0].contiguous()


def _of_chunks(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Of chunks [B, N, C, ...] the products of decays and the states from zero, [B, N, ...], in complex128."""
    product, state = a[:, :, 0].to(torch.complex128), u[:, :, 0]
    for t in range(1, u.shape[2]):
        state = torch.addcmul(u[:, :, t], a[:, :, t], state)
        product = product * a[:, :, t]
    return product, state.to(torch.complex128)
