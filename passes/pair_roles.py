"""The two roles of an axis along the sequence where code computes with pairs of positions.

Rows stay this rank's, columns become those of the whole sequence.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.axes import Atom, Dim
from zeco_compile.passes.axis_rules.walk import visit
from zeco_compile.passes.schema import RESHAPES, operand, tensors
from zeco_compile.passes.tracking import Tracking

aten = torch.ops.aten

Role = Literal["row", "column"]
Roles = tuple[Role | None, ...]
"""For each dimension of a value: what its axis along the sequence is, None without one."""


class Unfit(Exception):
    """Something in the region needs other rows, or is not followed; the message says what."""


@dataclass(frozen=True)
class Part:
    """A value in certain roles; or `whole`, as the unsharded model has it, wherever its axes are."""

    node: fx.Node
    roles: Roles
    whole: bool = False

    @property
    def columns(self) -> list[int]:
        return [d for d, role in enumerate(self.roles) if role == "column"]


def roles_of_operands(analysis: Analysis, part: Part) -> dict[fx.Node, Roles]:
    """The roles in which the op needs its operands, from the axes of the op by itself. Raises Unfit."""
    node, place = part.node, None
    if node.target is operator.getitem:
        node, place = operand(node, 0), node.args[1]
    alone = Tracking(analysis.length, analysis.track.axes.facts)
    given: dict[fx.Node, list[list[Atom]]] = {}
    for source in tensors(node):
        dims, along = [], []
        for dim in analysis.track.dims(source):
            atoms, rows = _apart(analysis, dim)
            dims.append(atoms)
            along.append(rows)
        alone.out(source, tuple(dims))
        given[source] = along
    visit(alone, node)
    if node in alone.problems or node in alone.misaligned:
        raise Unfit(f"`{node}` ({node.target}) is not followed")
    role_of: dict[Atom, Role] = {}
    dims_made = alone.dims(node) if place is None else alone.dims_of_output(node, place)  # type: ignore[arg-type]
    for dim, role in zip(dims_made, part.roles, strict=True):
        rows = [atom for atom in alone.axes.flat(dim) if atom.sequence]
        if role is None or not rows:  # an axis that is made here
            if role == "row" and node.target not in (*RESHAPES, aten.expand.default):
                raise Unfit(f"`{node}` makes rows of its own")
            continue
        if len(rows) > 1 or role_of.setdefault(rows[0], role) != role:
            raise Unfit(f"`{node}` has one axis in two roles")
    for action in alone.acts_along_sequence(node):
        if any(role_of.get(atom) == "row" for atom in alone.axes.flat(action.dim)):
            raise Unfit(f"`{node}` ({node.target}) looks at other rows")
    out: dict[fx.Node, Roles] = {}
    for source, along in given.items():
        roles: list[Role | None] = []
        for rows in along:
            if len(rows) > 1:
                raise Unfit(f"`{source}` has two axes along the sequence in one dimension")
            roles.append(role_of.get(rows[0].root(), "column") if rows else None)
        out[source] = tuple(roles)
    return out


def _apart(analysis: Analysis, dim: Dim) -> tuple[Dim, list[Atom]]:
    """A dimension in atoms of its own, so that no two axes are one yet; and those along the sequence. Raises Unfit."""
    axes = analysis.track.axes
    rows = axes.flat((axes.sequence,))
    flat = axes.flat(dim)
    atoms: list[Atom] = []
    along: list[Atom] = []
    while flat:
        if flat[: len(rows)] == rows:
            atom = Atom(axes.length, "rows", sequence=True)
            along.append(atom)
            flat = flat[len(rows) :]
        elif flat[0].sequence:
            raise Unfit("some rows only")
        else:
            atom = Atom(flat[0].size)
            flat = flat[1:]
        atoms.append(atom)
    return tuple(atoms), along
