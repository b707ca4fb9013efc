"""Running maxima that decay: the stabiliser of a recurrence with exponential gates, for all positions at once.

Per element, with the rows of all ranks one after the other:

    m_t = max(m_{t-1} + g_t, k_t)

RWKV-4 and xLSTM carry it from step to step. Two rows combine to one of the same kind,

    (g, m) then (g', m')  =  (g + g', max(m + g', m')),

so that ``log2(T)`` passes over a rank's rows give what they come to; what a rank's rows come to as a whole is gathered,
and each rank carries on from those before it. No sum of g is ever subtracted, so that steps of -1e38 or -inf, which
forget everything, do no harm.

The gradient goes to the winner, and to both by halves where they are equal, as `torch.maximum` has it. With ``w_t`` the
share of what is carried, it is a recurrence from the last row to the first, and is carried on from rank to rank alike:

    d_t = dm_t + dbefore_{t+1} + w_{t+1} d_{t+1};   dg_t = w_t d_t,   dk_t = (the other share) d_t
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeco_compile.lowering import op_log
from zeco_compile.lowering.exchange import gather_sequence
from zeco_compile.lowering.groups import ONE_RANK, members

_TAGS = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("zeco::running_maximum", mutates_args=(), tags=_TAGS)
def running_maximum(
    g: Tensor, k: Tensor, initial: Tensor, group: str, world_size: int
) -> tuple[Tensor, Tensor]:
    """(m, m of the row before) of all ranks' rows, this rank's of them.

    ``g`` and ``k`` [T, *shape] of one floating dtype, ``initial`` [*shape]: the maximum before the first row of the
    first rank; on the others it is not read. Sends one row of g and of m to all ranks.
    """
    op_log.record("running_maximum")
    decays, own = _cumulated(g, k)
    carried = initial
    if group != ONE_RANK:
        decay_of, top_of = (gather_sequence(rows[-1:], 0, group, world_size, True) for rows in (decays, own))
        for rank in range(members(group).rank):
            carried = torch.maximum(carried + decay_of[rank], top_of[rank])
    m = torch.maximum(carried + decays, own)
    return m.contiguous(), torch.cat([carried.unsqueeze(0), m[:-1]]).contiguous()


@running_maximum.register_fake
def _(g: Tensor, k: Tensor, initial: Tensor, group: str, world_size: int) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), k.new_empty(k.shape)


@torch.library.custom_op("zeco::running_maximum_backward", mutates_args=(), tags=_TAGS)
def running_maximum_backward(
    dm: Tensor, dbefore: Tensor, g: Tensor, k: Tensor, before: Tensor, group: str, world_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients (dg, dk, dinitial) of `running_maximum`; that of ``initial`` is zero on all ranks but the first."""
    op_log.record("running_maximum_backward")
    carried, written = _shares(before + g, k)
    # Row t of these is of the step from row t + 1 to row t; what comes from the next rank is in the last one.
    shares = torch.cat([carried[1:], torch.ones_like(carried[:1])])
    given = dm + torch.cat([dbefore[1:], torch.zeros_like(dbefore[:1])])
    products, d = _decayed_sums(shares.flip(0), given.flip(0))
    products, d = products.flip(0), d.flip(0)
    rank = 0
    if group != ONE_RANK:
        rank = members(group).rank
        # What a rank's rows pass on to the rank before: a value of their own, and a share of what came to them.
        own = dbefore[:1] + carried[:1] * d[:1]
        through = carried[:1] * products[:1]
        own_of, through_of = (gather_sequence(x, 0, group, world_size, True) for x in (own, through))
        later = torch.zeros_like(own[0])
        for other in range(own_of.shape[0] - 1, rank, -1):
            later = own_of[other] + through_of[other] * later
        d = d + products * later
    first = dbefore[0] + carried[0] * d[0]
    first = first if rank == 0 else torch.zeros_like(first)
    return (carried * d).contiguous(), (written * d).contiguous(), first.contiguous()


@running_maximum_backward.register_fake
def _(
    dm: Tensor, dbefore: Tensor, g: Tensor, k: Tensor, before: Tensor, group: str, world_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    return k.new_empty(k.shape), k.new_empty(k.shape), k.new_empty(k.shape[1:])


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    g, k, _, ctx.group, ctx.world_size = inputs
    ctx.save_for_backward(g, k, output[1])


def _gradient(ctx: Any, dm: Tensor, dbefore: Tensor) -> tuple:
    g, k, before = ctx.saved_tensors
    found = running_maximum_backward(dm, dbefore, g, k, before, ctx.group, ctx.world_size)
    return (*found, None, None)


running_maximum.register_autograd(_gradient, setup_context=_context)


def _cumulated(g: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Each row combined with all those before it."""
    step = 1
    while step < k.shape[0]:
        k = torch.cat([k[:step], torch.maximum(k[:-step] + g[step:], k[step:])])
        g = torch.cat([g[:step], g[:-step] + g[step:]])
        step *= 2
    return g.clone(), k.clone()


def _decayed_sums(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Products of ``a`` up to each row, and x_t = a_t x_{t-1} + b_t from zero."""
    step = 1
    while step < b.shape[0]:
        b = torch.cat([b[:step], a[step:] * b[:-step] + b[step:]])
        a = torch.cat([a[:step], a[:-step] * a[step:]])
        step *= 2
    return a, b


def _shares(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """How much of the gradient of their maximum each of both gets, as `torch.maximum` has it."""
    half = torch.where(one == other, 0.5, 1.0).to(one.dtype)
    return half.masked_fill(one < other, 0), half.masked_fill(other < one, 0)
