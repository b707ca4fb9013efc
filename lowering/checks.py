"""Checks of values while a program runs: what one rank finds ends it on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeco_compile.lowering import op_log
from zeco_compile.lowering.communicator import communicator_for
from zeco_compile.lowering.errors import DecayNotPositive, NeighbourLost
from zeco_compile.lowering.groups import ONE_RANK


def short_message(where: str) -> str:
    """What an assertion on the device can say: PyTorch takes fewer than 255 characters; a path keeps its end."""
    text = "zeco_compile: a decay that multiplies the state is zero or negative, at "
    return text + where[-(250 - len(text)) :]


@torch.library.custom_op("zeco::log_decay", mutates_args=())
def log_decay(decay: Tensor, where: str, group: str) -> Tensor:
    """The logarithm of a decay that multiplies the state; any shape, floating-point. NaN stays NaN.

    Raises `DecayNotPositive` where it is zero or negative somewhere, naming the user's line ``where``, and lets go
    of the group's connections, so that the other ranks, which wait for this one, raise `NeighbourLost` at once. On
    CUDA, where looking at a value would hold up the program, the device stops it.
    """
    op_log.record("log_decay")
    wrong = (decay <= 0).any()
    if decay.is_cuda:
        torch._assert_async(~wrong, short_message(where))
    elif bool(wrong):
        error = DecayNotPositive(where)
        if group != ONE_RANK:
            communicator = communicator_for(group, decay.device)
            communicator.fail(
                NeighbourLost(
                    "a program that this rank has left",
                    rank=communicator.rank,
                    direction="exchanging with",
                    neighbour=None,
                    neighbour_global=None,
                    cause=str(error),
                )
            )
        raise error
    return decay.log()


@log_decay.register_fake
def _(decay: Tensor, where: str, group: str) -> Tensor:
    return decay.log()


def _save(ctx: Any, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (decay,) = ctx.saved_tensors
    return grad / decay, None, None


log_decay.register_autograd(_backward, setup_context=_save)
