"""`torch.autograd.Function`: its backward is the user's own, so it is asked what it does to positions.

The forward is in the shadow graph as any other code. The backward is not: what it computes of the gradient may look at
other positions though the forward does not (a reversed sum, a norm over all tokens). What is needed of it is what the
contract says of gradients: of a value along the sequence, each position has its own; of a parameter, the ranks' parts
add up. Both are tried on random values: the first and the second half of the positions get two values each, and in
the four combinations no half's gradients may depend on the other half, and the parameters' must be a sum over them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zeco_compile.passes import torch_private
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.length import depends_on
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.region import CannotEvaluate, Sizes

_MOST_ELEMENTS = 1 << 24
_SIZED = frozenset({"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "unflatten", "size"})
_NUMBERS = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg})


def refuse_mixing_backwards(analysis: Analysis) -> None:
    """Raises UnsupportedOp for an `autograd.Function` whose backward is not known to keep to each position."""
    for node in analysis.gm.graph.nodes:
        if node.op == "call_function" and torch_private.is_autograd_function(node.target):
            try:
                why = _reason(analysis, node)
            except (CannotEvaluate, RuntimeError, ValueError, TypeError, IndexError) as error:
                why = f"its backward cannot be tried by itself: {error}"
            if why is not None:
                raise UnsupportedOp(
                    "torch.autograd.Function",
                    location=user_location(node),
                    why=why,
                    hints=["write it without a backward of its own, where autograd's would do"],
                    node=str(node),
                )


def _reason(analysis: Analysis, node: fx.Node) -> str | None:
    arguments = [argument for argument in node.args if not _is_body(analysis, argument)]
    tensors = [a for a in arguments if isinstance(_made(analysis, node, a), fx.Node)]
    along = {a: analysis.track.sequence_dims(_made(analysis, node, a)) for a in tensors}
    if not any(along.values()):
        return None
    if any(len(dims) > 1 for dims in along.values()):
        return "a value for each pair of positions enters it"
    if _uses_length_as_value(analysis, node):
        return "it computes with the length of the slice, which would have to be that of the whole sequence"
    sizes = Sizes(analysis, _length(analysis))
    halves = (slice(0, sizes.length // 2), slice(sizes.length // 2, sizes.length))
    versions = [[_random(analysis, node, a, sizes, seed) for a in tensors] for seed in (1, 2)]
    runs: dict[tuple[int, int], list[torch.Tensor | None]] = {}
    for first in (0, 1):
        for second in (0, 1):
            values = {}
            for i, argument in enumerate(tensors):
                value = versions[0][i].clone()
                for rows, version in zip(halves, (first, second), strict=True):
                    for dim in along[argument]:
                        part = (slice(None),) * dim + (rows,)
                        value[part] = versions[version][i][part]
                values[argument] = value
            runs[first, second] = _gradients(
                analysis, node, arguments, values, sizes, (first, second), halves
            )
    return _compare(runs, [along[a] for a in tensors], halves)


def _compare(
    runs: Mapping[tuple[int, int], Sequence[torch.Tensor | None]],
    along: Sequence[Sequence[int]],
    halves: tuple[slice, slice],
) -> str | None:
    for i, dims in enumerate(along):
        found = {key: run[i] for key, run in runs.items()}
        if any(each is None for each in found.values()):
            continue
        values = {key: each.double() for key, each in found.items() if each is not None}
        size = max(float(each.abs().max()) for each in values.values())
        given = next(each for each in found.values() if each is not None)
        allowed = 64 * torch.finfo(given.dtype).eps * max(size, 1e-30)
        if dims:
            for half, rows in enumerate(halves):
                part = (slice(None),) * dims[0] + (rows,)
                for own in (0, 1):
                    pair = [values[(own, other) if half == 0 else (other, own)][part] for other in (0, 1)]
                    if not float((pair[0] - pair[1]).abs().max()) <= allowed:
                        return "its backward gives a position a gradient that depends on other positions"
        else:
            mixed = values[0, 0] - values[0, 1] - values[1, 0] + values[1, 1]
            if not float(mixed.abs().max()) <= allowed:
                return "its backward gives a parameter a gradient that is no sum over positions"
    return None


def _gradients(
    analysis: Analysis,
    node: fx.Node,
    arguments: Sequence[Any],
    values: Mapping[Any, torch.Tensor],
    sizes: Sizes,
    versions: tuple[int, int],
    halves: tuple[slice, slice],
) -> list[torch.Tensor | None]:
    """The gradients of the tensors among `arguments`, for gradients of the results that differ by half, too."""
    bodies = [analysis.gm.get_submodule(str(a.target)) for a in node.args if _is_body(analysis, a)]  # type: ignore[union-attr]
    leaves = {a: v.requires_grad_(v.is_floating_point()) for a, v in values.items()}
    given = [leaves[a] if a in leaves else _number(analysis, a, sizes) for a in arguments]
    with torch.enable_grad():
        made = node.target(*bodies, *given, **node.kwargs)  # type: ignore[operator]
    results = [r for r in pytree.tree_leaves(made) if isinstance(r, torch.Tensor) and r.requires_grad]
    nodes = analysis.shadow.tensors_made(node)
    shapes = {tuple(sizes.shape(n)): analysis.track.sequence_dims(n) for n in nodes}
    ups = []
    for i, result in enumerate(results):
        drawn = [_draw(result.shape, result, 10 * i + version + 100) for version in (0, 1)]
        up = drawn[0]
        for dim in shapes.get(tuple(result.shape), []):
            for rows, version in zip(halves, versions, strict=True):
                part = (slice(None),) * dim + (rows,)
                up[part] = drawn[version][part]
        ups.append(up)
    wanted = [v for v in leaves.values() if v.requires_grad]
    got = iter(torch.autograd.grad(results, wanted, ups, allow_unused=True) if results and wanted else ())
    return [next(got, None) if v.requires_grad else None for v in leaves.values()]


def _length(analysis: Analysis) -> int:
    if isinstance(analysis.length, int):
        return analysis.length
    return next(analysis.track.axes.facts.values_of(analysis.length, 4), analysis.real_length)


def _made(analysis: Analysis, node: fx.Node, argument: Any) -> Any:
    return analysis.shadow.reads.get((node, argument)) if isinstance(argument, fx.Node) else None


def _is_body(analysis: Analysis, argument: Any) -> bool:
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return False
    return isinstance(getattr(analysis.gm, str(argument.target), None), torch.nn.Module)


def _random(analysis: Analysis, node: fx.Node, argument: Any, sizes: Sizes, seed: int) -> torch.Tensor:
    made = _made(analysis, node, argument)
    shape, value = sizes.shape(made), made.meta["val"]
    if torch.Size(shape).numel() > _MOST_ELEMENTS:
        raise CannotEvaluate("it is too large")
    return _draw(shape, value, seed + 1000 * list(node.args).index(argument))


def _draw(shape: Sequence[int], like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not like.dtype.is_floating_point:
        return torch.randint(0, 2, list(shape), generator=generator).to(like.dtype)
    return torch.rand(list(shape), generator=generator, dtype=torch.float64).add(0.1).to(like.dtype)


def _number(analysis: Analysis, argument: Any, sizes: Sizes) -> Any:
    if not isinstance(argument, fx.Node):
        return argument
    value = argument.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return sizes.of_size(value.node.expr)
    if isinstance(value, int | float | bool) or value is None:
        return value
    raise CannotEvaluate(f"`{argument}` is no number")


def _uses_length_as_value(analysis: Analysis, node: fx.Node) -> bool:
    """A number that depends on the length enters the bodies and is used there for anything but sizes."""
    if isinstance(analysis.length, int):
        return False  # what the code computes with is compared with another trace (second_look.py)
    symbols = analysis.length.free_symbols
    if not any(depends_on(a, symbols) for a in node.all_input_nodes):
        return False
    for argument in node.args:
        if _is_body(analysis, argument):
            body = analysis.gm.get_submodule(str(argument.target))  # type: ignore[union-attr]
            assert isinstance(body, fx.GraphModule)
            numbers = [n for n in body.graph.nodes if isinstance(n.meta.get("example_value"), torch.SymInt)]
            for number in numbers:
                for user in number.users:
                    named = (
                        user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
                    )
                    if user.op != "output" and named not in _SIZED and user.target not in _NUMBERS:
                        return True
    return False
