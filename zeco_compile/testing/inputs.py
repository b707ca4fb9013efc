"""From the full inputs of the unsharded run to one rank's slice of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from zeco_compile.marks import UNMARKED, mark_sequence, sequence_mark
from zeco_compile.testing.errors import HarnessError


@dataclass(frozen=True)
class Slice:
    """Where one rank's part of an input lies in the full one; ``dim`` None: every rank has it whole."""

    dim: int | None
    start: int = 0
    length: int = 0

    def of(self, full: Tensor) -> Tensor:
        return full if self.dim is None else full.narrow(self.dim, self.start, self.length)


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call: ``leaves`` in pytree order, and how to put them together again."""

    leaves: list[Any]
    names: list[str]
    spec: pytree.TreeSpec

    def tensors(self) -> Iterator[tuple[int, str, Tensor]]:
        """Every tensor once, with its place among the leaves, even where one is passed twice."""
        seen: set[int] = set()
        for index, (name, leaf) in enumerate(zip(self.names, self.leaves, strict=True)):
            if isinstance(leaf, Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield index, name, leaf

    def call(self, function: Callable[..., Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return function(*args, **kwargs)

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same call with every tensor changed; a tensor that is passed twice stays one tensor."""
        done: dict[int, Tensor] = {}
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                if id(leaf) not in done:
                    done[id(leaf)] = change(leaf)
                leaf = done[id(leaf)]
            leaves.append(leaf)
        return Inputs(leaves, self.names, self.spec)


def from_user(made: Any) -> Inputs:
    """What ``make_inputs`` returned: a tensor, a tuple of arguments, or ``(args, kwargs)``."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    if (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], tuple | list)
        and isinstance(made[1], dict)
    ):
        args, kwargs = tuple(made[0]), made[1]
    elif isinstance(made, tuple | list):
        args = tuple(made)
    else:
        args = (made,)
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    return Inputs([leaf for _, leaf in paths], [_argument_name(path) for path, _ in paths], spec)


def _argument_name(path: pytree.KeyPath) -> str:
    """``((args, kwargs) path)`` as a reader would write it: ``args[0]``, ``mask``, ``args[1]['ids']``."""
    in_kwargs = pytree.keystr(path[:1]) == "[1]"
    if in_kwargs:
        return pytree.keystr(path[1:2]).strip("[]'\"") + pytree.keystr(path[2:])
    return "args" + pytree.keystr(path[1:])


def carry_mark(source: Tensor, target: Tensor) -> Tensor:
    """``target``, marked as ``source`` is."""
    mark = sequence_mark(source)
    return target if mark is UNMARKED else mark_sequence(target, mark)


def slices(
    inputs: Inputs, seq_dim: int, rank: int, world_size: int, lengths: tuple[int, ...] | None
) -> list[Slice]:
    """Where this rank's part of every leaf lies, by the leaf's mark or else ``seq_dim``.

    A tensor without that dimension is left whole, as everything that is no tensor: what the backend says
    to it is part of what is tested. ``lengths`` replaces the equal split, for inputs whose length is
    their sum.
    """
    return [
        _slice(name, leaf, seq_dim, rank, world_size, lengths) if isinstance(leaf, Tensor) else Slice(None)
        for name, leaf in zip(inputs.names, inputs.leaves, strict=True)
    ]


def _slice(
    name: str, tensor: Tensor, seq_dim: int, rank: int, world_size: int, lengths: tuple[int, ...] | None
) -> Slice:
    mark = sequence_mark(tensor)
    dim = seq_dim if mark is UNMARKED else mark
    if dim is None or not -tensor.dim() <= dim < tensor.dim():
        return Slice(None)
    dim %= tensor.dim()
    size = tensor.shape[dim]
    if lengths is not None and size == sum(lengths):
        return Slice(dim, sum(lengths[:rank]), lengths[rank])
    if size % world_size:
        raise HarnessError(
            f"input {name} has {size} positions in dimension {dim}, which {world_size} ranks cannot share"
            " evenly; mark it with zeco_compile.mark_sequence(tensor, dim), with dim None if every rank needs"
            " all of it"
        )
    return Slice(dim, rank * (size // world_size), size // world_size)
