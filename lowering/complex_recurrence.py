"""The complex elementwise recurrence over the ranks of a group, as custom ops in the namespace ``zeco``.

``zeco::complex_recurrence`` is what a rewritten graph holds: h_t = a_t h_{t-1} + u_t in complex numbers, with its
gradient. Traced by AOTAutograd it becomes

    forward     recurrence_rank_state, scan_start, scan_wait, recurrence_states, (final_state)
    backward    (final_state_backward,) recurrence_rank_dstate, scan_start in reverse, scan_wait,
                recurrence_gradients

with the scans of ``attention.py``: a rank's transition is one complex number for each element, so it sends one
state, [1, 1, elements, 1] there. States and gradients keep the contract of ``attention.py``.

a [B, T, ...], of size one where it is the same all along; u [B, T, ...]; states [B, ...]; all in one complex dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_compile.kernels import complex_recurrence
from zeco_compile.kernels.errors import InvalidShapes
from zeco_compile.lowering import all_scan, op_log
from zeco_compile.lowering.attention import refuse_second_derivative  # attention.py defines the scans, too
from zeco_compile.lowering.groups import members
from zeco_compile.lowering.registry import LIBRARY, LOCAL_TAGS, define

# ----- what one rank does by itself


def _rank_state(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The state that the rank makes of zero [1, 1, E, 1] and the logarithm of its transition [1, 1, E]; -inf where that
    is zero."""
    op_log.record("recurrence_rank_state")
    product, state = complex_recurrence.rank_state(a.resolve_conj(), u.resolve_conj())
    return _flat(state), _flat(product).squeeze(-1).log()


def _rank_state_fake(a: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    elements = _elements(u)
    return u.new_empty((1, 1, elements, 1)), u.new_empty((1, 1, elements))


def _states(a: Tensor, u: Tensor, state_in: Tensor) -> Tensor:
    op_log.record("recurrence_states")
    a, u, state_in = a.resolve_conj(), u.resolve_conj(), state_in.resolve_conj()
    return complex_recurrence.states(a, u, state_in.reshape(_state_shape(u)))


def _states_fake(a: Tensor, u: Tensor, state_in: Tensor) -> Tensor:
    return u.new_empty(u.shape)


def _rank_dstate(a: Tensor, dh: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the incoming state, as far as it comes from the rank's own h, and the logarithm of the transition
    of gradients."""
    op_log.record("recurrence_rank_dstate")
    dstate = complex_recurrence.rank_dstate(a.resolve_conj(), dh.resolve_conj())
    return _flat(dstate), log_decay.conj_physical()


def _rank_dstate_fake(a: Tensor, dh: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    elements = _elements(dh)
    return dh.new_empty((1, 1, elements, 1)), dh.new_empty((1, 1, elements))


def _gradients(
    a: Tensor, h: Tensor, state_in: Tensor, dh: Tensor, dstate_out: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a, of u, and of the initial state, which enters at the first rank."""
    op_log.record("recurrence_gradients")
    a, h, state_in, dh, dstate_out = (x.resolve_conj() for x in (a, h, state_in, dh, dstate_out))
    shape = _state_shape(h)
    da, du, dstate = complex_recurrence.gradients(
        a, h, state_in.reshape(shape), dh, dstate_out.reshape(shape)
    )
    return da, du.contiguous(), dstate if members(group).rank == 0 else torch.zeros_like(dstate)


def _gradients_fake(
    a: Tensor, h: Tensor, state_in: Tensor, dh: Tensor, dstate_out: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), h.new_empty(h.shape), h.new_empty(_state_shape(h))


def _flat(state: Tensor) -> Tensor:
    return state.reshape(1, 1, -1, 1).contiguous()


def _state_shape(u: Tensor) -> list[int]:
    return [u.shape[0], *u.shape[2:]]


def _elements(u: Tensor) -> int:
    elements = 1
    for size in _state_shape(u):
        elements = elements * size
    return elements


# ----- all of it, with its gradient


class _ComplexRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        a: Tensor,
        u: Tensor,
        initial_state: Tensor | None,
        output_final_state: bool,
        schedule: str,
        blocks: int,
        group: str,
    ) -> tuple[Tensor, Tensor]:
        ops = torch.ops.zeco
        shape = _state_shape(u)
        state, log_decay = ops.recurrence_rank_state(a, u)
        entering = None if initial_state is None else initial_state.reshape(state.shape)
        if group:  # decided by the name, as in attention.py
            flying = ops.scan_start(state, log_decay, entering, False, schedule, blocks, group)
            state_in = ops.scan_wait(flying, state, log_decay, group)
        else:
            state_in = torch.zeros_like(state) if entering is None else entering
        h = ops.recurrence_states(a, u, state_in)
        if output_final_state:
            final_state = ops.final_state(state_in, state, log_decay, group).reshape(shape)
        else:
            final_state = u.new_empty((0,))
            ctx.mark_non_differentiable(final_state)
        ctx.save_for_backward(a, h, state_in, log_decay)
        ctx.arguments = initial_state is not None, output_final_state, schedule, blocks, group
        return h, final_state

    @staticmethod
    def backward(ctx, dh: Tensor, dfinal: Tensor):
        refuse_second_derivative("complex_recurrence")
        ops = torch.ops.zeco
        a, h, state_in, log_decay = ctx.saved_tensors
        with_initial, with_final, schedule, blocks, group = ctx.arguments
        leaving = None
        if with_final:
            leaving = ops.final_state_backward(dfinal.reshape(state_in.shape), group)
        if group:
            dstate, decay = ops.recurrence_rank_dstate(a, dh, log_decay)
            flying = ops.scan_start(dstate, decay, leaving, True, schedule, blocks, group)
            dstate_out = ops.scan_wait(flying, dstate, decay, group)
        else:
            dstate_out = torch.zeros_like(state_in) if leaving is None else leaving
        da, du, dinitial = ops.recurrence_gradients(a, h, state_in, dh, dstate_out, group)
        return da, du, dinitial if with_initial else None, None, None, None, None


def _complex_recurrence(
    a: Tensor,
    u: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    schedule: str,
    blocks: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """What ``zeco::complex_recurrence`` does, on this rank's slice of the sequence.

    Returns h [B, T, ...], and the state after the whole sequence [B, ...], equal on every rank (an empty tensor when
    not asked for). ``initial_state`` is the same on every rank. Differentiable once, in a, u and the initial state.

    Raises InvalidShapes, InvalidSchedule, GroupNotFound, NeighbourLost; SecondDerivative from the backward.
    """
    given = [a, u, *([] if initial_state is None else [initial_state])]
    if not u.is_complex() or any(x.dtype != u.dtype for x in given):
        raise InvalidShapes(f"a complex recurrence is in one complex dtype, not {[x.dtype for x in given]}.")
    fits = a.dim() == u.dim() and all(n in (1, m) for n, m in zip(a.shape, u.shape, strict=True))
    if u.dim() < 2 or not fits:
        raise InvalidShapes(f"decays of shape {list(a.shape)} do not fit what is written, {list(u.shape)}.")
    if initial_state is not None and list(initial_state.shape) != _state_shape(u):
        raise InvalidShapes(f"initial_state has shape {list(initial_state.shape)}, not {_state_shape(u)}.")
    arguments = (output_final_state, all_scan.check_schedule(schedule), blocks, group)
    h, final_state = _ComplexRecurrence.apply(a, u, initial_state, *arguments)
    return h, final_state


define(
    "recurrence_rank_state(Tensor a, Tensor u) -> (Tensor state, Tensor log_decay)",
    _rank_state,
    _rank_state_fake,
    LOCAL_TAGS,
)
define("recurrence_states(Tensor a, Tensor u, Tensor state_in) -> Tensor", _states, _states_fake, LOCAL_TAGS)
define(
    "recurrence_rank_dstate(Tensor a, Tensor dh, Tensor log_decay) -> (Tensor dstate, Tensor log_decay)",
    _rank_dstate,
    _rank_dstate_fake,
    LOCAL_TAGS,
)
define(
    "recurrence_gradients(Tensor a, Tensor h, Tensor state_in, Tensor dh, Tensor dstate_out, str group) "
    "-> (Tensor da, Tensor du, Tensor dinitial)",
    _gradients,
    _gradients_fake,
    LOCAL_TAGS,
)

LIBRARY.define(
    "complex_recurrence(Tensor a, Tensor u, Tensor? initial_state, bool output_final_state, str schedule, int blocks, "
    "str group) -> (Tensor h, Tensor final_state)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("complex_recurrence", _complex_recurrence, "CompositeImplicitAutograd")
