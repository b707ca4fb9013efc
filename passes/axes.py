"""Axes: which dimension of every value is which, tracked by identity and never by size.

A dimension is a tuple of atoms, outermost first: `[B, T, H*K]` flattened to `[B*T, H, K]` has the dimensions
`(b, t), (h,), (k,)`. A dimension of size one that was made for broadcasting has no atoms, `()`. Ops that combine
values elementwise make their atoms one (union-find); a view takes dimensions apart and puts them together. So two
sizes that happen to be equal stay two axes, and one axis stays itself through every transpose and reshape.

There is one sequence, hence one atom `sequence`. What a slice or a padding leaves of it is a window: the rows
`-left .. L + right - 1` of a rank's slice, an atom of its own that knows these two numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy

from zeco_compile.passes.sizes import Size, SizeFacts, same_size


class Atom:
    """One axis. `origins` says where it was made: "input", "parameter", "factory", "position", "slice", ..."""

    __slots__ = ("_parent", "_parts", "origins", "sequence", "size", "window")

    def __init__(self, size: Size, origin: str = "", *, sequence: bool = False) -> None:
        self.size = size
        self.sequence = sequence
        self.window: tuple[Size, Size] | None = (0, 0) if sequence else None
        self.origins: set[Any] = {origin} if origin else set()
        self._parent: Atom | None = None
        self._parts: tuple[Atom, ...] | None = None

    def root(self) -> Atom:
        atom = self
        while atom._parent is not None:
            atom = atom._parent
        return atom

    def __repr__(self) -> str:
        kind = "seq" if self.sequence else "axis"
        return f"{kind}{id(self) % 9973}:{self.size}" + (
            f"{self.window}" if self.window not in (None, (0, 0)) else ""
        )


Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


class AxesConflict(Exception):
    """Two axes that must be one cannot be: sizes that do not factor alike."""


class Axes:
    """The union-find over atoms of one graph, with its sequence atom."""

    def __init__(self, length: Size, facts: SizeFacts | None = None) -> None:
        self.length = length
        self.facts = SizeFacts() if facts is None else facts
        self.sequence = Atom(length, "sequence", sequence=True)
        self._windows: dict[tuple[Any, Any], Atom] = {}

    def fresh(self, size: Size, origin: str = "") -> Dim:
        """A new axis; none for a size of one."""
        return () if same_size(size, 1) else (Atom(size, origin),)

    def is_length(self, size: Size) -> bool:
        return same_size(size, self.length)

    def window(self, left: Size, right: Size) -> Dim:
        """The axis of rows -left .. L+right-1 of the slice.

        With as many rows as the slice it is the sequence itself: `x` shifted by one is a value of each position,
        whose op looked at the neighbour's.
        """
        left, right = self.facts.simplify(left), self.facts.simplify(right)
        if same_size(self.facts.simplify(left + right), 0):
            return (self.sequence,)
        size = self.facts.simplify(sympy.sympify(self.length) + left + right)
        if (left, right) not in self._windows:
            atom = Atom(size, "window", sequence=True)
            atom.window = (left, right)
            self._windows[left, right] = atom
        return (self._windows[left, right],)

    def rows_in_chunks(self, size: Size) -> Dim | None:
        """What so many rows make, put together from pieces: the sequence, or that padded behind to whole chunks."""
        if self.is_length(size):
            return (self.sequence,)
        padded = [atom for (left, _), atom in self._windows.items() if left == 0 and atom.root()._parts]
        return next(((atom,) for atom in padded if same_size(atom.size, size)), None)

    def flat(self, dim: Iterable[Atom]) -> Dim:
        """The dimension in root atoms, taken apart as far as any use of them has."""
        out: list[Atom] = []
        for atom in dim:
            root = atom.root()
            if root._parts is not None:
                out.extend(self.flat(root._parts))
            else:
                out.append(root)
        return tuple(out)

    def is_sequence(self, dim: Iterable[Atom]) -> bool:
        return any(atom.sequence for atom in self.flat(dim))

    def is_whole_sequence(self, dim: Iterable[Atom]) -> bool:
        """The dimension is the slice's rows, all of them and nothing else."""
        flat = self.flat(dim)
        return bool(flat) and flat == self.flat((self.sequence,))

    def window_of(self, dim: Iterable[Atom]) -> tuple[Size, Size] | None:
        """Which rows of the sequence the dimension is, all of them and nothing else, also where they have been taken
        apart into chunks: those of `window(left, right)`; (0, 0) for the sequence; None if it is none of these."""
        flat = self.flat(dim)
        known = (self.sequence, *self._windows.values())
        return next((atom.window for atom in known if flat == self.flat((atom,))), None) if flat else None

    def size(self, dim: Iterable[Atom]) -> Size:
        product: Any = 1
        for atom in self.flat(dim):
            product = product * atom.size
        return product

    def unify(self, a: Dim, b: Dim) -> bool:
        """Makes two dimensions one. False if they are windows of the sequence that begin at different rows, which
        stay two. Raises AxesConflict where their atoms cannot be matched."""
        aligned = True
        left, right = list(self.flat(a)), list(self.flat(b))
        while left and right:
            x, y = left[0].root(), right[0].root()
            if x is y:
                left.pop(0), right.pop(0)
            elif same_size(x.size, y.size):
                if x.window != y.window and x.window is not None and y.window is not None:
                    aligned = False
                else:
                    self._union(x, y)
                left.pop(0), right.pop(0)
            elif (ratio := self.facts.quotient(x.size, y.size)) is not None:
                left[:1] = self._split(x, y.size, ratio)
            elif (ratio := self.facts.quotient(y.size, x.size)) is not None:
                right[:1] = self._split(y, x.size, ratio)
            else:
                raise AxesConflict(f"{x} against {y}")
        for rest in (*left, *right):
            if not same_size(rest.size, 1):
                raise AxesConflict(f"{a} against {b}")
        return aligned

    def regroup(self, dims: Sequence[Dim], sizes: Sequence[Size]) -> list[Dim] | None:
        """The dimensions of a view of `dims` with these sizes; None where it cuts across axes."""
        pending = [atom for dim in dims for atom in self.flat(dim)]
        if any(same_size(size, 0) for size in sizes):
            return self._regroup_nothing(pending, sizes)
        out: list[Dim] = []
        for size in sizes:
            taken: list[Atom] = []
            if pending and same_size(pending[0].size, 1) and same_size(size, 1):
                # One token per rank: the axis is there though its size is one.
                if self._belongs_here(pending, dims, sizes, len(out)):
                    taken.append(pending.pop(0))
                out.append(tuple(taken))
                continue
            product: Any = 1
            while not same_size(product, size):
                need = self.facts.quotient(size, product)
                if need == 1:
                    break  # one size, written in two ways
                if not pending:
                    return None
                atom = pending.pop(0)
                if same_size(atom.size, 1):
                    taken.append(atom)
                    continue
                if need is not None and self.facts.quotient(need, atom.size) is not None:
                    taken.append(atom)
                    product = product * atom.size
                elif need is not None and (ratio := self.facts.quotient(atom.size, need)) is not None:
                    outer, inner = self._split(atom, need, ratio)
                    taken.append(outer)
                    pending.insert(0, inner)
                    product = product * need
                else:
                    return None
            # A trailing axis of size one belongs to what it stood beside: [B, 1, D] -> [B*1, D].
            while pending and same_size(pending[0].size, 1) and len(out) + 1 < len(sizes) and taken:
                following = sizes[len(out) + 1]
                if same_size(following, 1):
                    break
                taken.append(pending.pop(0))
            out.append(tuple(taken))
        leftover = [atom for atom in pending if not same_size(atom.size, 1)]
        if leftover:
            return None
        if pending and out:
            out[-1] = (*out[-1], *pending)
        return out

    def _belongs_here(
        self, pending: Sequence[Atom], dims: Sequence[Dim], sizes: Sequence[Size], at: int
    ) -> bool:
        """The next axis, of size one, is dimension `at` of a view, and none of the dimensions of size one behind it:
        it was dimension `at` before, or is needed to fill what is left of them."""
        before = [self.size(dim) for dim in dims[: at + 1]]
        alike = len(before) == at + 1 and all(
            same_size(a, b) for a, b in zip(before, sizes[: at + 1], strict=True)
        )
        if alike and self.flat(dims[at]) == (pending[0],):
            return True
        return _leading_ones(sizes[at:]) <= _leading_ones([atom.size for atom in pending])

    def _regroup_nothing(self, atoms: list[Atom], sizes: Sequence[Size]) -> list[Dim] | None:
        """A view of a value without elements, `x[:, :-1]` of one token: the empty axis may be any size there."""
        empty = [atom for atom in atoms if same_size(atom.size, 0)]
        if len(empty) != 1 or sum(same_size(size, 0) for size in sizes) != 1:
            return None
        others: Any = 1
        for size in sizes:
            others = others if same_size(size, 0) else others * size
        stand_in = 1_000_003  # a prime, so that no other axis is taken for a part of it
        total: Any = stand_in
        for atom in atoms:
            total = total if atom is empty[0] else total * atom.size
        joined = self.facts.quotient(total, others)
        if joined is None:
            return None
        empty[0].size = stand_in
        try:
            return self.regroup([tuple(atoms)], [joined if same_size(size, 0) else size for size in sizes])
        finally:
            empty[0].size = 0

    def _union(self, x: Atom, y: Atom) -> None:
        keep, drop = (x, y) if x.sequence or not y.sequence else (y, x)
        drop._parent = keep
        keep.origins |= drop.origins

    def _split(self, atom: Atom, size: Size, ratio: Size) -> tuple[Atom, Atom]:
        """Takes `atom` apart into an outer and an inner one, `size` being the outer's."""
        outer, inner = Atom(size, "split"), Atom(ratio, "split")
        for part in (outer, inner):
            part.sequence = atom.sequence
            part.origins |= atom.origins
        atom._parts = (outer, inner)
        return outer, inner


def _leading_ones(sizes: Sequence[Size]) -> int:
    return next((i for i, size in enumerate(sizes) if not same_size(size, 1)), len(sizes))
