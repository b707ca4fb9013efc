"""Errors of the lowering: what went wrong between ranks, or in how an op was called.

All derive from :class:`zeco_compile.kernels.errors.ZecoError`. Every message says what was found and what
to do about it; where a rank is named, both its rank in the group and its rank in the world are given.
"""

from __future__ import annotations

from zeco_compile.kernels.errors import ZecoError


class GroupNotFound(ZecoError):
    """A process group that a compiled graph names does not exist (any more)."""


class CommunicatorUnavailable(ZecoError):
    """The communicator of a group could not be made (a rank is missing, or a backend is not built in)."""


class DecayNotPositive(ZecoError):
    """A decay that multiplies the state is zero or negative at some token: it has no logarithm."""

    def __init__(self, where: str) -> None:
        self.where = where
        super().__init__(
            f"a decay that multiplies the state is zero or negative (in this rank's slice).\n  where: {where}\n"
            "  why: the state is split over ranks through the logarithm of its decay.\n  what to do:\n"
            "    - compute the decay as torch.exp(log_decay) or torch.sigmoid(logits) inside of the compiled model\n"
            "    - keep it above zero: decay.clamp(min=1e-6)"
        )

    def __reduce__(self) -> tuple:
        return (DecayNotPositive, (self.where,))


class NeighbourLost(ZecoError):
    """A rank that this rank exchanges data with died, gave up, or stayed silent for the group's timeout.

    ``neighbour`` and ``neighbour_global`` are its rank in the group and in the world, None where the transfer
    involves every rank and the transport does not say which one failed. ``direction`` is "receiving from",
    "sending to" or "exchanging with"; ``operation`` says which transfer of ours it was.
    """

    def __init__(
        self,
        operation: str,
        *,
        rank: int,
        direction: str,
        neighbour: int | None,
        neighbour_global: int | None,
        cause: str,
    ) -> None:
        self.operation = operation
        self.rank = rank
        self.direction = direction
        self.neighbour = neighbour
        self.neighbour_global = neighbour_global
        self.cause = cause
        who = (
            f"group rank {neighbour} (global rank {neighbour_global})"
            if neighbour is not None
            else "the other ranks of the group (the transport does not say which one failed)"
        )
        super().__init__(
            f"Lost a neighbour in {operation}: group rank {rank} was {direction} {who}. Either that process "
            f"ended, or it gave up after losing a neighbour of its own, or it did not get here within the "
            f"group's timeout. Look at that rank's log first; this process group cannot be used any more, "
            f"restart the job (or raise the timeout of init_process_group if the rank was only slow). "
            f"The transport said: {cause}"
        )

    def __reduce__(self) -> tuple:
        return (_rebuild_neighbour_lost, (self.operation, self.rank, self.direction, self.neighbour,
                                          self.neighbour_global, self.cause))  # fmt: skip


def _rebuild_neighbour_lost(
    operation: str, rank: int, direction: str, neighbour: int | None, neighbour_global: int | None, cause: str
) -> NeighbourLost:
    return NeighbourLost(
        operation,
        rank=rank,
        direction=direction,
        neighbour=neighbour,
        neighbour_global=neighbour_global,
        cause=cause,
    )


class InvalidSchedule(ZecoError):
    """A schedule name or a number of pipeline blocks that does not exist or does not fit."""


class TransferNotFound(ZecoError):
    """``scan_wait`` was given a tensor that no ``scan_start`` returned, or that was waited for already."""


class RanksDisagree(ZecoError):
    """The ranks of a group decided differently about the same graph."""


class UnequalShards(ZecoError):
    """The ranks hold slices of the sequence that differ in length."""


class SecondDerivative(ZecoError):
    """The backward was asked for a graph of itself (``create_graph=True``), which it does not have."""


class InvalidLinkCosts(ZecoError):
    """What a message costs is not a time, or the file of measured costs cannot be read."""
