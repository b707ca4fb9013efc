"""Gated linear attention over the ranks of a group, as custom ops in the namespace ``zeco``.

``zeco::gated_linear_attention`` is what a rewritten graph holds: one node, with its gradient. Traced by
AOTAutograd it becomes the ops below, apart from each other, so that a later pass can order them:

    forward     rank_state, scan_start, diagonal, scan_wait, combine, (final_state)
    backward    (final_state_backward,) rank_dstate, scan_start in reverse, diagonal_backward, scan_wait,
                combine_backward, (initial_state_backward)

or, where the Triton kernels run (``kernels/devices.py``), the six of ``fused_attention.py`` in their places.
Only what the scan needs stands before its start, and only what needs the scan after its wait: between the
two there is work to hide it behind. The incoming state is kept for the backward, so nothing is sent twice.

Gradients are the adjoint of the distributed program, for the sum over ranks of what the ranks differentiate:
the initial state (the same on every rank) enters at the first rank, which alone gets its gradient, the others
get zeros; the gradients of the final state (equal on every rank) are summed, and enter at the last rank.

``group`` is a process group's name; ``""`` is one rank: same numbers, no scan. Layouts,
gates and dtypes are those of ``kernels/chunked.py``. The ops take any strides and return fresh contiguous
tensors; their graphs do not depend on the rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from zeco_compile.kernels import chunked
from zeco_compile.kernels.devices import is_fused
from zeco_compile.kernels.errors import InvalidShapes
from zeco_compile.kernels.shapes import check_sizes, check_state, state_dtype
from zeco_compile.lowering import all_scan, fused_attention, in_flight, op_log, symmetric  # noqa: F401 (defines ops)
from zeco_compile.lowering.communicator import communicator_for
from zeco_compile.lowering.cost_model import worth_hiding
from zeco_compile.lowering.errors import SecondDerivative
from zeco_compile.lowering.groups import members
from zeco_compile.lowering.jobs import Job
from zeco_compile.lowering.registry import LIBRARY, LOCAL_TAGS, define

# Capture into a CUDA graph of what runs on a side stream, or looks up a job, is not proven: keep it out.
_SCAN_TAGS = (*LOCAL_TAGS, torch.Tag.cudagraph_unsafe)


class _Finished(Job[Tensor]):
    """The scan of one rank alone."""

    def __init__(self, result: Tensor) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> Tensor:
        return self._result


# ----- what one rank does by itself


def _rank_state(k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    op_log.record("rank_state")
    return chunked.rank_state(k, v, g)


def _rank_state_fake(k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, _, heads, key_dim = k.shape
    dtype = state_dtype(k, v, g)
    width = key_dim if g is not None and g.dim() == 4 else 1
    return (
        k.new_empty((batch, heads, key_dim, v.shape[3]), dtype=dtype),
        k.new_empty((batch, heads, width), dtype=dtype),
    )


def _diagonal(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float) -> Tensor:
    op_log.record("diagonal")
    return chunked.diagonal(q, k, v, g, scale)


def _diagonal_fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float) -> Tensor:
    return v.new_empty(v.shape, dtype=state_dtype(q, k, v, g))


def _combine(o: Tensor, q: Tensor, g: Tensor | None, state_in: Tensor, scale: float) -> Tensor:
    op_log.record("combine")
    return chunked.combine(o, q, g, state_in, scale, q.dtype)


def _combine_fake(o: Tensor, q: Tensor, g: Tensor | None, state_in: Tensor, scale: float) -> Tensor:
    return o.new_empty(o.shape, dtype=q.dtype)


def _rank_dstate(q: Tensor, g: Tensor | None, do: Tensor, scale: float) -> Tensor:
    op_log.record("rank_dstate")
    return chunked.rank_dstate(q, g, do, scale)


def _rank_dstate_fake(q: Tensor, g: Tensor | None, do: Tensor, scale: float) -> Tensor:
    batch, _, heads, key_dim = q.shape
    return q.new_empty((batch, heads, key_dim, do.shape[3]), dtype=state_dtype(q, g, do))


def _diagonal_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op_log.record("diagonal_backward")
    dq, dk, dv, dg = chunked.diagonal_backward(q, k, v, g, do, scale)
    return dq, dk, dv, _or_nothing(dg, dq)


def _diagonal_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = state_dtype(q, k, v, g, do)
    return (
        q.new_empty(q.shape, dtype=dtype),
        k.new_empty(k.shape, dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
        q.new_empty((0,) if g is None else g.shape, dtype=dtype),
    )


def _combine_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    state_in: Tensor | None,
    dstate_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    op_log.record("combine_backward")
    given = None if g is None else dg
    result = chunked.combine_backward(dq, dk, dv, given, q, k, v, g, do, scale, state_in, dstate_out)
    return result.dq, result.dk, result.dv, _or_nothing(result.dg, result.dq)


def _combine_backward_fake(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    state_in: Tensor | None,
    dstate_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        q.new_empty((0,)) if g is None else g.new_empty(g.shape),
    )


def _or_nothing(dg: Tensor | None, like: Tensor) -> Tensor:
    """An op cannot return None: no gate's gradient is an empty tensor."""
    return like.new_empty((0,)) if dg is None else dg


# ----- between the ranks


def _scan_start(
    state: Tensor,
    log_decay: Tensor,
    boundary: Tensor | None,
    reverse: bool,
    schedule: str,
    blocks: int,
    group: str,
) -> Tensor:
    label = "scan reverse" if reverse else "scan"
    op_log.record("scan_start reverse" if reverse else "scan_start")
    all_scan.check_schedule(schedule)
    # nobody reads it: on a GPU its zero would be a kernel for nothing, on the CPU the same inputs give the same
    token = state.new_zeros((1,)) if state.device.type == "cpu" else state.new_empty((1,))
    where = members(group)
    job: Job[Tensor]
    if where.world_size == 1:
        alone = torch.zeros_like(state) if boundary is None else boundary.to(state.dtype, copy=True)
        job = _Finished(alone.contiguous())
    else:
        communicator = communicator_for(group, state.device)
        mine = communicator.to_wire(state)
        decay = communicator.to_wire(log_decay)
        # only the rank where the scan begins reads the boundary
        first = where.world_size - 1 if reverse else 0
        entering = boundary if where.rank == first else None
        enters = None if entering is None else communicator.to_wire(entering.to(state.dtype))
        # between the GPUs of one host nothing is faster than a chain through the memory that they share
        fits = schedule in symmetric.SCHEDULES and not state.is_complex()
        shared = symmetric.scan_for(group, state.device) if fits else None
        if shared is not None:
            in_flight.put(token, shared.submit(label, mine, decay, enters, reverse=reverse))
            return token
        plan = communicator.plan(mine, decay, schedule, blocks)
        run, count = all_scan.algorithm(plan.schedule), plan.blocks
        job = communicator.submit(
            label,
            lambda link: run(link, mine, decay, enters, count),
            reverse=reverse,
            reads=[mine, decay, *([] if enters is None else [enters])],
        )
    in_flight.put(token, job)
    return token


def _scan_start_fake(
    state: Tensor,
    log_decay: Tensor,
    boundary: Tensor | None,
    reverse: bool,
    schedule: str,
    blocks: int,
    group: str,
) -> Tensor:
    return state.new_empty((1,))


def _scan_wait(token: Tensor, state: Tensor, log_decay: Tensor, group: str) -> Tensor:
    op_log.record("scan_wait")
    # state and log_decay are arguments so that a compiler keeps their memory until here
    return in_flight.take(token).wait().to(state.device)


def _scan_wait_fake(token: Tensor, state: Tensor, log_decay: Tensor, group: str) -> Tensor:
    return state.new_empty(state.shape)


def _final_state(state_in: Tensor, state: Tensor, log_decay: Tensor, group: str) -> Tensor:
    op_log.record("final_state")
    out = torch.addcmul(state, log_decay.exp().unsqueeze(-1), state_in).contiguous()
    where = members(group)
    if where.world_size == 1:
        return out
    communicator = communicator_for(group, state.device)
    mine = communicator.to_wire(out)
    last = where.world_size - 1
    return communicator.run("final state", lambda link: link.broadcast(mine, last)).to(state.device)


def _final_state_fake(state_in: Tensor, state: Tensor, log_decay: Tensor, group: str) -> Tensor:
    return state.new_empty(state.shape)


def _final_state_backward(dfinal: Tensor, group: str) -> Tensor:
    op_log.record("final_state_backward")
    total = dfinal.clone(memory_format=torch.contiguous_format)
    if members(group).world_size == 1:
        return total
    communicator = communicator_for(group, dfinal.device)
    mine = communicator.to_wire(total)
    return communicator.run("gradient of the final state", lambda link: link.all_reduce(mine)).to(
        dfinal.device
    )


def _final_state_backward_fake(dfinal: Tensor, group: str) -> Tensor:
    return dfinal.new_empty(dfinal.shape)


def _initial_state_backward(dstate_out: Tensor, dstate: Tensor, log_decay: Tensor, group: str) -> Tensor:
    op_log.record("initial_state_backward")
    if members(group).rank > 0:
        return torch.zeros_like(dstate, memory_format=torch.contiguous_format)
    decay = log_decay.exp().unsqueeze(-1).to(dstate.dtype)
    return torch.addcmul(dstate, decay, dstate_out.to(dstate.dtype)).contiguous()


def _initial_state_backward_fake(dstate_out: Tensor, dstate: Tensor, log_decay: Tensor, group: str) -> Tensor:
    return dstate.new_empty(dstate.shape)


# ----- all of it, with its gradient


def refuse_second_derivative(op: str) -> None:
    """Raises SecondDerivative in a backward that is to be differentiated itself."""
    if torch.is_grad_enabled():
        # once_differentiable would leave the path through the op's inputs out in silence
        raise SecondDerivative(
            f"zeco::{op} was differentiated with create_graph=True, and second "
            "derivatives through it are not implemented. Call backward() or torch.autograd.grad() "
            "without create_graph, or run this model without the zeco backend."
        )


class _GatedLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        scale: float,
        output_final_state: bool,
        schedule: str,
        blocks: int,
        group: str,
    ) -> tuple[Tensor, Tensor]:
        ops = torch.ops.zeco
        # Decided by the name, not by the size: graphs are cached, and a name's group may be larger next time.
        several = group != ""
        state = log_decay = state_in = None
        if several or output_final_state or initial_state is not None:
            state, log_decay = ops.rank_state(k, v, g)
        if several:
            flying = ops.scan_start(state, log_decay, initial_state, False, schedule, blocks, group)
            o = ops.diagonal(q, k, v, g, scale)
            state_in = ops.scan_wait(flying, state, log_decay, group)
        else:
            o = ops.diagonal(q, k, v, g, scale)
            if state is not None:
                state_in = torch.zeros_like(state) if initial_state is None else initial_state.to(state.dtype)
        o = o.to(q.dtype) if state_in is None else ops.combine(o, q, g, state_in, scale)
        if output_final_state:
            final_state = ops.final_state(state_in, state, log_decay, group)
        else:
            final_state = q.new_empty((0,))
            ctx.mark_non_differentiable(final_state)
        ctx.save_for_backward(q, k, v, g, state_in, log_decay)
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.arguments = scale, output_final_state, schedule, blocks, group
        return o, final_state

    @staticmethod
    def backward(ctx, do: Tensor, dfinal: Tensor):
        refuse_second_derivative("gated_linear_attention")
        ops = torch.ops.zeco
        q, k, v, g, state_in, log_decay = ctx.saved_tensors
        scale, output_final_state, schedule, blocks, group = ctx.arguments
        several = group != ""
        entering = ops.final_state_backward(dfinal, group) if output_final_state else None
        dstate_out = entering
        wants_initial = ctx.initial_dtype is not None and ctx.needs_input_grad[4]
        dstate = ops.rank_dstate(q, g, do, scale) if several or wants_initial else None
        if dstate is not None and several:
            # log_decay's dtype is the forward's state dtype, which k or v alone can have made wider
            decay = log_decay.to(dstate.dtype)
            flying = ops.scan_start(dstate, decay, entering, True, schedule, blocks, group)
            part = ops.diagonal_backward(q, k, v, g, do, scale)
            dstate_out = ops.scan_wait(flying, dstate, decay, group)
        else:
            part = ops.diagonal_backward(q, k, v, g, do, scale)
        dq, dk, dv, dg = ops.combine_backward(*part, q, k, v, g, do, scale, state_in, dstate_out)
        dinitial = None
        if dstate is not None and wants_initial:
            outgoing = torch.zeros_like(dstate) if dstate_out is None else dstate_out
            dinitial = ops.initial_state_backward(outgoing, dstate, log_decay, group).to(ctx.initial_dtype)
        return dq, dk, dv, None if g is None else dg, dinitial, None, None, None, None, None


def _beside(q: Tensor, g: Tensor | None, group: str) -> bool:
    """Whether the attention matrices inside of chunks are made beside the scan."""
    batch, tokens, heads, _ = q.shape
    per_channel = g is not None and g.dim() == 4
    return group != "" and worth_hiding(members(group).world_size, batch * tokens * heads, per_channel)


class _FusedGatedLinearAttention(torch.autograd.Function):
    """The same from the Triton kernels' ops. ``save``: a backward may follow."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        scale: float,
        output_final_state: bool,
        schedule: str,
        blocks: int,
        group: str,
        save: bool,
    ) -> tuple[Tensor, Tensor]:
        ops = torch.ops.zeco
        beside = _beside(q, g, group)
        several = group != ""
        whole = several or output_final_state or initial_state is not None
        state, log_decay, kept = ops.prepare(q, k, v, g, scale, whole)
        if several:
            flying = ops.scan_start(state, log_decay, initial_state, False, schedule, blocks, group)
            pairs = ops.chunk_pairs(q, k, v, g, scale, kept, beside)
            state_in = ops.scan_wait(flying, state, log_decay, group)
        else:
            pairs = ops.chunk_pairs(q, k, v, g, scale, kept, False)
            state_in = None if initial_state is None else initial_state.to(state.dtype)
        o, saved = ops.read_out(pairs, kept, q, k, v, g, state_in, scale, beside, save)
        if output_final_state:
            before = torch.zeros_like(state) if state_in is None else state_in
            final_state = ops.final_state(before, state, log_decay, group)
        else:
            final_state = q.new_empty((0,))
            ctx.mark_non_differentiable(final_state)
        ctx.save_for_backward(q, k, v, g, log_decay, pairs, saved, *kept)
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.arguments = scale, output_final_state, schedule, blocks, group, beside
        return o, final_state

    @staticmethod
    def backward(ctx, do: Tensor, dfinal: Tensor):
        refuse_second_derivative("gated_linear_attention")
        ops = torch.ops.zeco
        q, k, v, g, log_decay, pairs, saved, *kept = ctx.saved_tensors
        scale, output_final_state, schedule, blocks, group, beside = ctx.arguments
        dstate_out = ops.final_state_backward(dfinal, group) if output_final_state else None
        several = group != ""
        wants_initial = ctx.initial_dtype is not None and ctx.needs_input_grad[4]
        dstate, dkept = ops.prepare_backward(q, k, v, g, do, scale, kept, several or wants_initial)
        if several:
            flying = ops.scan_start(dstate, log_decay, dstate_out, True, schedule, blocks, group)
            dpairs = ops.chunk_pairs_backward(q, k, v, g, do, beside)
            dstate_out = ops.scan_wait(flying, dstate, log_decay, group)
        else:
            dpairs = ops.chunk_pairs_backward(q, k, v, g, do, False)
        dq, dk, dv, dg = ops.read_out_backward(
            pairs, dpairs, kept, saved, dkept, q, k, v, g, do, scale, dstate_out, beside
        )
        dinitial = None
        if wants_initial:
            outgoing = torch.zeros_like(dstate) if dstate_out is None else dstate_out
            dinitial = ops.initial_state_backward(outgoing, dstate, log_decay, group).to(ctx.initial_dtype)
        return dq, dk, dv, None if g is None else dg, dinitial, None, None, None, None, None, None


def _gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    schedule: str,
    blocks: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """What ``zeco::gated_linear_attention`` does, on this rank's slice of the sequence.

    q, k [B, T, H, K]; v [B, T, H, V]; g None, [H] (constant per head), [B, T, H] or [B, T, H, K]; initial
    state [B, H, K, V], the same on every rank. ``schedule`` is a name of ``all_scan.ALGORITHMS`` or "auto"; "auto",
    and ``blocks`` below 1, mean the fastest by ``cost_model.py``. Returns o [B, T, H, V] in q's dtype, and the state
    after the whole sequence [B, H, K, V] in the state dtype, equal on every rank (an empty tensor when not asked
    for).

    Differentiable once, in q, k, v, g and the initial state.

    Raises InvalidShapes, InvalidSchedule, GroupNotFound, NeighbourLost; SecondDerivative from the backward.
    """
    if g is not None and g.dim() == 1:
        if g.shape[0] != q.shape[2]:
            raise InvalidShapes(
                f"g has shape {list(g.shape)}; a gate that is constant in time has one value per head, "
                f"[{q.shape[2]}]."
            )
        g = g.expand(q.shape[0], q.shape[1], q.shape[2])
    sizes = check_sizes(q, k, v, g)
    if initial_state is not None:
        check_state("initial_state", initial_state, sizes)
    arguments = (scale, output_final_state, all_scan.check_schedule(schedule), blocks, group)
    if not is_fused(q, k, v, g):
        return _GatedLinearAttention.apply(q, k, v, g, initial_state, *arguments)
    if v.shape[3] == 1:
        # Triton 3.6 makes wrong code of tiles with a single column, where their stride happens to be that of the rows
        padded = None if initial_state is None else F.pad(initial_state, (0, 1))
        o, final_state = _gated_linear_attention(
            q, k, F.pad(v, (0, 1)), g, scale, padded, output_final_state, schedule, blocks, group
        )
        return o[..., :1], final_state[..., :1]
    inputs = (q, k, v, g, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _FusedGatedLinearAttention.apply(*inputs, *arguments, save)


_QKVG = "Tensor q, Tensor k, Tensor v, Tensor? g"
_GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dg"

define(
    "rank_state(Tensor k, Tensor v, Tensor? g) -> (Tensor state, Tensor log_decay)",
    _rank_state,
    _rank_state_fake,
    LOCAL_TAGS,
)
define(f"diagonal({_QKVG}, float scale) -> Tensor", _diagonal, _diagonal_fake, LOCAL_TAGS)
define(
    "combine(Tensor o, Tensor q, Tensor? g, Tensor state_in, float scale) -> Tensor",
    _combine,
    _combine_fake,
    LOCAL_TAGS,
)
define(
    "rank_dstate(Tensor q, Tensor? g, Tensor do, float scale) -> Tensor",
    _rank_dstate,
    _rank_dstate_fake,
    LOCAL_TAGS,
)
define(
    f"diagonal_backward({_QKVG}, Tensor do, float scale) -> ({_GRADIENTS})",
    _diagonal_backward,
    _diagonal_backward_fake,
    LOCAL_TAGS,
)
define(
    f"combine_backward({_GRADIENTS}, {_QKVG}, Tensor do, float scale, Tensor? state_in, Tensor? dstate_out) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _combine_backward,
    _combine_backward_fake,
    LOCAL_TAGS,
)
define(
    "scan_start(Tensor state, Tensor log_decay, Tensor? boundary, bool reverse, str schedule, int blocks, "
    "str group) -> Tensor in_flight",
    _scan_start,
    _scan_start_fake,
    _SCAN_TAGS,
)
define(
    "scan_wait(Tensor in_flight, Tensor state, Tensor log_decay, str group) -> Tensor state_in",
    _scan_wait,
    _scan_wait_fake,
    _SCAN_TAGS,
)
define(
    "final_state(Tensor state_in, Tensor state, Tensor log_decay, str group) -> Tensor",
    _final_state,
    _final_state_fake,
    _SCAN_TAGS,
)
define(
    "final_state_backward(Tensor dfinal, str group) -> Tensor",
    _final_state_backward,
    _final_state_backward_fake,
    _SCAN_TAGS,
)
define(
    "initial_state_backward(Tensor dstate_out, Tensor dstate, Tensor log_decay, str group) -> Tensor",
    _initial_state_backward,
    _initial_state_backward_fake,
    LOCAL_TAGS,
)

LIBRARY.define(
    f"gated_linear_attention({_QKVG}, float scale, Tensor? initial_state, bool output_final_state, "
    "str schedule, int blocks, str group) -> (Tensor o, Tensor final_state)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("gated_linear_attention", _gated_linear_attention, "CompositeImplicitAutograd")
