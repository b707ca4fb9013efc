"""`torch.autograd.Function`: its backward is the user's own, so it is looked at, too.

The forward is in the shadow graph as any other code. The backward is not: what it computes of the gradient may look at
other positions though the forward does not (a reversed sum, a norm over all tokens), or treat the first one in a way
of its own. So forward and backward are traced once more, on real tensors, and their axes are followed. What is needed
is what the contract says of gradients: of a value along the sequence, each position has its own, computed from itself
alone; of a parameter, it is a sum over the positions, and nothing is done with the sum but what is linear. Where a
function is of values that do not run along the sequence, a parameter that is rounded or a pooled vector, every rank has
but a part of the gradient, so what its backward does with that has to be linear: it is tried.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from zeco_compile.passes import torch_private
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.axis_rules.walk import track_axes
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.passes.length import depends_on
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.modes import has_gradient
from zeco_compile.passes.region import CannotEvaluate, Sizes
from zeco_compile.passes.sizes import SizeFacts
from zeco_compile.passes.tracking import Tracking

aten = torch.ops.aten

_MOST_ELEMENTS = 1 << 24
_SIZED = frozenset({"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "unflatten", "size"})
_NUMBERS = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg})
_SUMS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mm.default,
        aten.bmm.default,
        aten.mv.default,
        aten.dot.default,
    }
)
_LINEAR = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.t.default,
        aten.transpose.int, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.expand.default,
        aten.clone.default, aten._to_copy.default, aten.neg.default, aten.detach.default, aten.alias.default,
    }
)  # fmt: skip
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})


def refuse_mixing_backwards(analysis: Analysis) -> None:
    """Raises UnsupportedOp for an `autograd.Function` whose backward is not known to keep to each position."""
    for node in analysis.gm.graph.nodes:
        if node.op == "call_function" and torch_private.is_autograd_function(node.target):
            try:
                why = _reason(analysis, node)
            except (CannotEvaluate, RuntimeError, ValueError, TypeError, IndexError) as error:
                why = f"its backward cannot be traced by itself: {error}"
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
    along = [analysis.track.sequence_dims(_made(analysis, node, a)) for a in tensors]
    if not tensors:
        return None
    if any(len(dims) > 1 for dims in along):
        return "a value for each pair of positions enters it"
    if _uses_length_as_value(analysis, node):
        return "it computes with the length of the slice, which would have to be that of the whole sequence"
    sizes = Sizes(analysis, _length(analysis))
    values = [
        _drawn(sizes.shape(_made(analysis, node, a)), _made(analysis, node, a).meta["val"]) for a in tensors
    ]
    places = {id(a): i for i, a in enumerate(tensors)}
    numbers = {id(a): _number(a, sizes) for a in arguments if id(a) not in places}
    bodies = [analysis.gm.get_submodule(str(a.target)) for a in node.args if _is_body(analysis, a)]  # type: ignore[union-attr]
    wanted = [i for i, value in enumerate(values) if has_gradient(value)]

    def forward(*given: torch.Tensor) -> list[torch.Tensor]:
        called = [given[places[id(a)]] if id(a) in places else numbers[id(a)] for a in arguments]
        made = node.target(*bodies, *called, **node.kwargs)  # type: ignore[operator]
        return [
            leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]

    def backward(*given: torch.Tensor) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(has_gradient(x)) for x in given[: len(values)]]
            results = forward(*leaves)
            ups = list(given[len(values) :])
            return list(torch.autograd.grad(results, [leaves[i] for i in wanted], ups, allow_unused=True))

    with torch.enable_grad():
        results = forward(*(v.clone().requires_grad_(has_gradient(v)) for v in values))
    if not results or not wanted:
        return None
    ups = [_drawn(result.shape, result) for result in results]
    if not any(along):
        return None if _is_linear(lambda given: backward(*values, *given), ups) else _NOT_LINEAR
    traced = make_fx(backward)(*values, *ups)
    # A gradient has the axes of what it is the gradient of.
    made_along = {
        tuple(sizes.shape(n)): analysis.track.sequence_dims(n) for n in analysis.shadow.tensors_made(node)
    }
    rows = [*along, *(made_along.get(tuple(up.shape), []) for up in ups)]
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    given = {n: (dims[0] if dims else None) for n, dims in zip(placeholders, rows, strict=True)}
    track = track_axes(traced.graph, given, sizes.length, SizeFacts())
    output = next(n for n in traced.graph.nodes if n.op == "output")
    return _judge(track, output, [along[i] for i in wanted])


_NOT_LINEAR = (
    "its backward does more with the gradient than what is linear, and of a value that does not run along the sequence "
    "every rank has but a part of that"
)


def _is_linear(
    backward: Callable[[list[torch.Tensor]], list[torch.Tensor | None]], ups: list[torch.Tensor]
) -> bool:
    """Whether the gradients of a sum are the sum of the gradients, for small and for large ones of either sign."""
    generator = torch.Generator().manual_seed(1)
    for scale in (1e-6, 1.0, 1e6):
        one, other = (
            [scale * torch.randn(up.shape, generator=generator, dtype=torch.float64) for up in ups]
            for _ in range(2)
        )
        parts = [
            backward([x.to(up.dtype) for x, up in zip(given, ups, strict=True)])
            for given in (one, other, [x + y for x, y in zip(one, other, strict=True)])
        ]
        for first, second, both in zip(*parts, strict=True):
            if first is None or second is None or both is None:
                if any(part is not None for part in (first, second, both)):
                    return False
                continue
            bound = 16 * torch.finfo(both.dtype).eps * max(both.numel(), 64)
            size = max(float(part.abs().max()) if part.numel() else 0.0 for part in (first, second, both))
            if not bool(((first + second - both).abs() <= bound * size).all()):
                return False
    return True


def _judge(track: Tracking, output: fx.Node, along: list[list[int]]) -> str | None:
    """Why the gradients that `output` returns are not as they have to be; None if they are."""
    sums: set[fx.Node] = set()
    for node in output.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        kinds = {action.kind for action in track.acts_along_sequence(node)}
        if node in track.problems or node in track.misaligned or len(track.sequence_dims(node)) > 1:
            return "its backward does what is not followed"
        if kinds:
            if not kinds <= {"reduce", "contract"} or node.target not in _SUMS or track.sequence_dims(node):
                return "its backward gives a position a gradient that depends on other positions"
            sums.add(node)
        elif any(source in sums for source in node.all_input_nodes):
            scaled = node.target in (aten.mul.Tensor, aten.div.Tensor) and len(node.all_input_nodes) == 1
            added = node.target is aten.add.Tensor and all(source in sums for source in node.all_input_nodes)
            if node.target not in _LINEAR and not scaled and not added:
                return "its backward does more with a sum over positions than what is linear"
            sums.add(node)
    for leaf, dims in zip(
        pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None), along, strict=True
    ):
        if not isinstance(leaf, fx.Node) or leaf.target in _ZEROS:
            continue
        if dims and track.sequence_dims(leaf) != dims:
            return "its backward gives a value along the sequence a gradient that does not run along it"
        if not dims and leaf not in sums:
            return "its backward gives a parameter a gradient that is no sum over positions"
    return None


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


def _drawn(shape: Any, like: torch.Tensor) -> torch.Tensor:
    if torch.Size(shape).numel() > _MOST_ELEMENTS:
        raise CannotEvaluate("it is too large")
    if not has_gradient(like):
        return torch.zeros(list(shape), dtype=like.dtype)
    return torch.rand(list(shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        like.dtype
    )


def _number(argument: Any, sizes: Sizes) -> Any:
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
