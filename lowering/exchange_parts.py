"""What the exchanges along the sequence share: their errors, their checks, and sums that do not depend on the order."""

from __future__ import annotations

import torch
from torch import Tensor

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.lowering.communicator import Communicator, Link
from zeco_compile.lowering.groups import members

# A captured CUDA graph would replay the transfers without the other ranks knowing.
TAGS = (torch.Tag.cudagraph_unsafe,)


class InvalidExchange(ZecoError):
    """An exchange along the sequence was asked for with arguments that have no meaning."""


class IndivisibleSequence(InvalidExchange):
    """A full sequence cannot be cut into equal slices, one for each rank."""


def swap(
    communicator: Communicator,
    label: str,
    sends: list[tuple[int, Tensor]],
    receives: list[tuple[int, Tensor]],
) -> None:
    """Sends and receives at once, until both are through."""

    def work(link: Link) -> None:
        link.post(sends, receives).wait()
        link.flush()

    communicator.run(label, work)


def ordered_sum(parts: dict[int, Tensor]) -> Tensor:
    """The sum in the order of the ranks, so that it does not depend on who adds up; in the parts' dtype."""
    total = accumulator(parts[0])
    for rank in range(1, len(parts)):
        total.add_(parts[rank])
    return total.to(parts[0].dtype)


def accumulator(x: Tensor) -> Tensor:
    """A fresh contiguous copy to add to, in float32 for the halves and int64 for the small integers.

    (gloo cannot reduce int16 either; the sum of small integers wraps as they do.)
    """
    dtype = _WIDER.get(x.dtype, x.dtype)
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int64,
    torch.uint8: torch.int64,
    torch.int16: torch.int64,
}


def fresh_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def fresh_like(x: Tensor, dim: int | None = None, size: int = 0) -> Tensor:
    """Contiguous and uninitialised, like ``x`` but for ``size`` in ``dim``."""
    shape = list(x.shape)
    if dim is not None:
        shape[dim] = size
    return x.new_empty(shape)


def checked_dimension(op: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise InvalidExchange(
            f"{op} got dimension {dim} of a tensor with {x.dim()} dimensions (shape {tuple(x.shape)}). "
            "Give the dimension in which the tensor runs along the sequence."
        )
    return dim % x.dim()


def check_dimension(x: Tensor, dim: int) -> None:
    """Raises `InvalidExchange` if ``x`` is no tensor with that dimension."""
    if not isinstance(x, Tensor):
        raise InvalidExchange(f"sequences are tensors, and this is a {type(x).__name__}.")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise InvalidExchange(f"a dimension is an int, and this is {dim!r} (a {type(dim).__name__}).")
    checked_dimension("the sequence's exchange", x, dim)


def check_divisible(x: Tensor, dim: int, world_size: int) -> None:
    """Raises `IndivisibleSequence` if ``x`` cannot be cut into equal slices, and as `check_dimension`."""
    check_dimension(x, dim)
    slice_length(x, dim, world_size)


def check_summable(op: str, x: Tensor) -> None:
    if x.dtype == torch.bool:
        raise InvalidExchange(
            f"zeco::{op} got a tensor of torch.bool. Convert it to an integer dtype to count, or use all_max "
            'for "any".'
        )


def checked_rank(op: str, owner: int, group: str) -> int:
    world_size = members(group).world_size
    if not 0 <= owner < world_size:
        raise InvalidExchange(f"zeco::{op} got owner {owner} in a group of {world_size} ranks.")
    return owner


def checked_world_size(op: str, group: str, claimed: int) -> int:
    """The number of ranks; what a graph claims is checked against the group when the op runs."""
    actual = members(group).world_size
    if claimed not in (0, actual):
        raise InvalidExchange(
            f"zeco::{op} stands in a graph that was compiled for {claimed} ranks, and its group has "
            f"{actual}. Compile again (`torch._dynamo.reset()`) after the process group changed."
        )
    return actual


def traced_world_size(op: str, group: str, claimed: int) -> int:
    """The number of ranks in a trace: what the graph claims. `explain` traces for ranks that are not there."""
    return claimed or checked_world_size(op, group, claimed)


def slice_length(x: Tensor, dim: int, world_size: int) -> int:
    if x.shape[dim] % world_size != 0:
        raise IndivisibleSequence(
            f"a sequence of {x.shape[dim]} (dimension {dim} of shape {tuple(x.shape)}) cannot be cut into "
            f"{world_size} slices of equal length. Pad it to a multiple of {world_size}, or use "
            "another number of ranks."
        )
    return x.shape[dim] // world_size
