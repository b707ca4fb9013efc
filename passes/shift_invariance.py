"""A necessary condition that costs two runs: what a recurrence does with tokens does not depend on where they stand.

A region that steps through a constant number of tokens is run further by carrying a state on, and which of its values
that state is has to be tried out (`region.carrying`). For most of them the second piece does not go on where the first
has ended. It would take hundreds of runs to find out for each that no roles fit.
"""

from __future__ import annotations

import torch
from torch import fx

from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.region import Region, Sizes, evaluate, row_dims

_CLEAR = 1e-6
"""A relative difference in float64 that is no rounding."""

_SMALL_ROW = 1e-4
"""A row that is smaller than so much of the largest may be the rounding of what is zero."""

_SEED = 31


def depends_on_place(region: Region, analysis: Analysis, sizes: Sizes) -> bool:
    """Whether tokens behind one more, of zeros, in front give another result: no linear recurrence does. From no state,
    a token that writes nothing leaves none, whatever its gate is.

    False where it cannot be told: rows that are no dimension, values that are not finite. Raises CannotEvaluate.
    """
    rows = {node: row_dims(analysis, node) for node in region.inputs}
    along = analysis.track.sequence_dims(region.output)
    if len(along) != 1 or any(dims is None or len(dims) > 1 for dims in rows.values()):
        return False
    generator = torch.Generator().manual_seed(_SEED)
    for sign in (1.0, -1.0):
        values: dict[fx.Node, torch.Tensor] = {}
        later: dict[fx.Node, torch.Tensor] = {}
        for node, dims in rows.items():
            value = torch.rand(sizes.shape(node), generator=generator, dtype=torch.float64) * 0.6 + 0.3
            values[node] = later[node] = value * (0.0 if node is region.initial_state else sign)
            if dims:
                rest = values[node].narrow(dims[0], 0, sizes.length - 1)
                later[node] = torch.cat([torch.zeros_like(rest.narrow(dims[0], 0, 1)), rest], dims[0])
        before, after = (
            evaluate(region, each, sizes).movedim(along[0], 0).reshape(sizes.length, -1)
            for each in (values, later)
        )
        if bool(torch.isfinite(before).all()) and bool(torch.isfinite(after).all()):
            sizes_of_rows = before[:-1].abs().amax(1)
            sizes_of_rows = sizes_of_rows.clamp(min=_SMALL_ROW * float(sizes_of_rows.max()))
            return bool(((after[1:] - before[:-1]).abs().amax(1) > _CLEAR * sizes_of_rows).any())
    return False
