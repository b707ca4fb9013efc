"""The final state of gated linear attention alone, where nothing is read out of the states: no token's output is
computed, and none is differentiated.

``zeco::final_state_of`` is what a rewritten graph holds. It is traced by AOTAutograd into the parts of
``lowering/attention.py``: the rank's own state, the scan over the ranks, the last rank's state; in the backward that
state's gradient enters at the last rank and runs to the first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_compile.kernels.errors import InvalidShapes
from zeco_compile.kernels.shapes import check_sizes, check_state
from zeco_compile.lowering import all_scan
from zeco_compile.lowering.attention import refuse_second_derivative
from zeco_compile.lowering.registry import LIBRARY


class _FinalState(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        initial_state: Tensor | None,
        schedule: str,
        blocks: int,
        group: str,
    ) -> Tensor:
        ops = torch.ops.zeco
        state, log_decay = ops.rank_state(k, v, g)
        if group != "":  # by the name, as in attention.py
            flying = ops.scan_start(state, log_decay, initial_state, False, schedule, blocks, group)
            state_in = ops.scan_wait(flying, state, log_decay, group)
        elif initial_state is None:
            state_in = torch.zeros_like(state)
        else:
            state_in = initial_state.to(state.dtype)
        ctx.save_for_backward(k, v, g, state_in, log_decay)
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        ctx.arguments = schedule, blocks, group
        return ops.final_state(state_in, state, log_decay, group)

    @staticmethod
    def backward(ctx, dfinal: Tensor):
        refuse_second_derivative("final_state_of")
        ops = torch.ops.zeco
        k, v, g, state_in, log_decay = ctx.saved_tensors
        schedule, blocks, group = ctx.arguments
        dstate_out = ops.final_state_backward(dfinal, group)
        nothing = torch.zeros_like(state_in)  # what the rank's own outputs make of the state before it
        if group != "":
            flying = ops.scan_start(nothing, log_decay, dstate_out, True, schedule, blocks, group)
            dstate_out = ops.scan_wait(flying, nothing, log_decay, group)
        none = (
            torch.zeros_like(k),
            torch.zeros_like(v),
            v.new_empty((0,)) if g is None else torch.zeros_like(g),
        )
        dq, do = none[:2]
        _, dk, dv, dg = ops.combine_backward(dq, *none, dq, k, v, g, do, 1.0, state_in, dstate_out)
        dinitial = None
        if ctx.initial_dtype is not None and ctx.needs_input_grad[3]:
            dinitial = ops.initial_state_backward(dstate_out, nothing, log_decay, group).to(ctx.initial_dtype)
        return dk, dv, None if g is None else dg, dinitial, None, None, None


def _final_state_of(
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    schedule: str,
    blocks: int,
    group: str,
) -> Tensor:
    """The second result of ``zeco::gated_linear_attention`` with the same k [B, T, H, K], v [B, T, H, V], g (None, [H],
    [B, T, H] or [B, T, H, K]) and initial state [B, H, K, V]: [B, H, K, V], equal on every rank.

    Differentiable once. Raises what that does.
    """
    if g is not None and g.dim() == 1:
        if g.shape[0] != k.shape[2]:
            raise InvalidShapes(
                f"g has shape {list(g.shape)}; it has one value for each head, [{k.shape[2]}]."
            )
        g = g.expand(k.shape[0], k.shape[1], k.shape[2])
    sizes = check_sizes(None, k, v, g)
    if initial_state is not None:
        check_state("initial_state", initial_state, sizes)
    made: Tensor = _FinalState.apply(k, v, g, initial_state, all_scan.check_schedule(schedule), blocks, group)
    return made


LIBRARY.define(
    "final_state_of(Tensor k, Tensor v, Tensor? g, Tensor? initial_state, str schedule, int blocks, str group) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("final_state_of", _final_state_of, "CompositeImplicitAutograd")
