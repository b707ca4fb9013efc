"""The length as a number: what the user's code computes from `x.shape[1]` must mean the whole sequence.

In sizes (a view, a factory, the end of a slice) the slice's length is right. In values (`x.sum(1) / T`,
`torch.full((), T)`, `scores / T ** 0.5`) it is not. Dynamo is asked to trace the length as a symbol
(`request_symbolic_length`), and then every value that a symbolic number enters is given the same expression of the
global length (`globalise_length`); when all that is done the code is made for one length (`fix_length`). Where the
user's code fixes the length to a constant (a loop over it), the constants are all that is seen; what depends on the
length is found by a trace at another one (second_look.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from zeco_compile.passes import torch_private
from zeco_compile.passes.analysis import Analysis
from zeco_compile.passes.errors import LengthInValue
from zeco_compile.passes.inputs import GraphInput
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.plans import settled
from zeco_compile.passes.report import Decision, op_name
from zeco_compile.passes.sizes import facts_of

VALUES = frozenset(
    {
        "other",
        "value",
        "alpha",
        "beta",
        "exponent",
        "fill_value",
        "scale",
        "min",
        "max",
        "s",
        "weight",
        "lambd",
        "ignore_index",
    }
)
SIZES = frozenset(
    {
        "size", "shape", "start", "end", "length", "step", "split_size", "split_sizes", "repeats", "sections",
        "pad", "normalized_shape", "index", "dim", "N", "C", "HxW", "n", "m", "left", "right", "diagonal", "sizes",
    }
)  # fmt: skip


# What bounds a range is a value, but for the end of one that begins at 0, which is its size.
_aten = torch.ops.aten
_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
BOUNDS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(_RANGES[1:], ("start",)),
    **dict.fromkeys((_aten.linspace.default, _aten.logspace.default), ("start", "end")),
}


_ASKED = "_zeco_symbolic_dim"
"""Attribute of a tensor whose length is a symbol because it was asked for here, and not by the user."""


def request_symbolic_length(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], example_inputs: Sequence[Any]
) -> None:
    """Asks Dynamo for a trace with a symbolic length, once per input tensor, by raising its restart.

    A length of one cannot be a symbol, and a code that fixes the length will get a constant again.
    """
    _, fakes = torch_private.fake_inputs(gm, example_inputs)
    asked = False
    for each in inputs:
        if each.along is None or torch_private.all_sizes_vary():
            continue
        tensor, size = example_inputs[each.index], fakes[each.index].shape[each.along]
        if isinstance(size, int) and size > 1 and torch_private.mark_weakly_dynamic(tensor, each.along):
            setattr(tensor, _ASKED, each.along)
            asked = True
    if asked:
        torch_private.restart_trace("zeco: trace the sequence length as a symbol")


def fix_length(
    gm: fx.GraphModule,
    inputs: Sequence[GraphInput],
    example_inputs: Sequence[Any],
    all_agree: Callable[[bool], bool],
) -> tuple[fx.GraphModule, list[int], list[Any]]:
    """The rewritten graph with a constant length again, where that was a symbol for our sake alone: as `torch.compile`
    has it, the code is for one length, and for all of them once a second one has come or if the user asks for it.
    With a symbol it takes twice the time to compile. Returns the graph, which inputs are left, and those.

    ``all_agree`` says whether every rank could: else one would compile again when another need not.
    """
    along = [(each.index, each.along) for each in inputs if each.along is not None]
    asked = [(index, dim) for index, dim in along if getattr(example_inputs[index], _ASKED, None) == dim]
    for index, _ in asked:
        delattr(example_inputs[index], _ASKED)  # of what is compiled next nobody has asked it yet
    # one length may be marked and another be equal to it
    marked = any(torch_private.may_vary(example_inputs[index], dim) for index, dim in along)
    varies = marked or torch_private.all_sizes_vary()
    alone = bool(asked) and not varies
    if all_agree(alone and torch_private.is_all_symbolic(gm, example_inputs, asked)):
        return torch_private.with_constant_sizes(gm, example_inputs)
    return gm, list(range(len(example_inputs))), list(example_inputs)


def request_constant_length(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], example_inputs: Sequence[Any]
) -> None:
    """Asks Dynamo for a trace with a constant length, by raising its restart, where the one with a symbol holds for a
    narrow range of lengths only. A loop over `T // 64` chunks leaves such a symbol, which is of no use. Where the
    length is a constant, so are the other sizes."""
    mode, fakes = torch_private.fake_inputs(gm, example_inputs)
    along = [(each.index, each.along) for each in inputs if each.along is not None]
    symbols = {s for index, dim in along for s in torch_private.symbols_of_size(fakes[index].shape[dim])}
    facts = facts_of(mode.shape_env)
    if any(facts.is_bounded(symbol) for symbol in symbols & facts.hints.keys()):
        for index, dim in along:
            torch_private.mark_constant(example_inputs[index], dim)
        torch_private.restart_trace("zeco: trace the sequence length as a constant")
    lengths = [fakes[index].shape[dim] for index, dim in along]
    if not symbols and any(isinstance(length, int) and length > 1 for length in lengths):
        # such a trace is compared with one at another length, number by number, and that has no other symbols
        request_constant_sizes(gm, inputs, example_inputs)


def request_constant_sizes(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], example_inputs: Sequence[Any]
) -> None:
    """Asks Dynamo for a trace in which Python floats and all sizes but the length are constants, by raising its
    restart, but for sizes that the user has marked. For what cannot be compiled with them: of a batch that varies, too,
    and is folded with the sequence, it cannot be said which rows are whose."""
    _, fakes = torch_private.fake_inputs(gm, example_inputs)
    floats = torch_private.symbolic_floats(gm)
    for symbol in floats:
        torch_private.mark_constant_float(symbol)
    asked = bool(floats)
    for each in inputs:
        tensor, fake = example_inputs[each.index], fakes[each.index]
        if not isinstance(fake, torch.Tensor):
            continue
        # where all sizes vary, one that is a constant may have had the length's symbol, and have made it one as well
        varies = torch_private.all_sizes_vary() and each.kind == "argument"
        for dim, size in enumerate(fake.shape):
            wanted = (varies or isinstance(size, torch.SymInt)) and dim != each.along
            if wanted and not torch_private.may_vary(tensor, dim):
                asked = torch_private.mark_constant(tensor, dim) or asked
    if asked:
        torch_private.restart_trace("zeco: trace all sizes but the sequence length as constants")


def globalise_length(analysis: Analysis, world_size: int, decisions: list[Decision]) -> int:
    """Gives values that depend on the length the global one. Returns how many nodes changed.

    Raises LengthInValue where it cannot tell whether a number is a size or a value.
    """
    if isinstance(analysis.length, int):
        return 0
    symbols = sympy.sympify(analysis.length).free_symbols
    changed = 0
    made: dict[fx.Node, fx.Node] = {}
    for user_node in list(analysis.gm.graph.nodes):
        if settled(user_node) or user_node.op not in ("call_function", "call_method", "output"):
            continue
        numbers = [n for n in user_node.all_input_nodes if depends_on(n, symbols)]
        if not numbers or _is_number(user_node) or _numbers_positions(analysis, user_node):
            continue
        # a number that the model returns is a value
        uses = {"value"} if user_node.op == "output" else uses_of_length(analysis, user_node)
        if not uses or uses <= SIZES:
            continue
        if not uses <= VALUES:
            raise LengthInValue(
                ", ".join(str(n.meta["example_value"]) for n in numbers),
                location=user_location(user_node),
                why=f"`{op_name(user_node)}` uses it both as a size and as a value, or in a way that is not known "
                f"({', '.join(sorted(uses))}).",
            )
        for number in numbers:
            user_node.replace_input_with(number, global_number(number, symbols, world_size, made))
        decisions.append(
            Decision(
                str(user_node),
                op_name(user_node),
                "global length",
                user_location(user_node),
                f"the length in a value is {world_size} times the slice's",
            )
        )
        changed += 1
    return changed


def _numbers_positions(analysis: Analysis, user_node: fx.Node) -> bool:
    """A range with a number for each position, wherever it begins: its rule sees to that (sharding_rules.py)."""
    ranges = [n for n in analysis.shadow.groups.get(user_node, []) if n.target in _RANGES]
    axes, dims = analysis.track.axes, analysis.track.dims
    return user_node.target is torch.arange and any(axes.is_whole_sequence(dims(n)[0]) for n in ranges)


def depends_on(node: fx.Node, symbols: set[Any]) -> bool:
    """The node is a number computed from the length."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return False
    return bool(value.node.expr.free_symbols & symbols)


def _is_number(node: fx.Node) -> bool:
    return isinstance(
        node.meta.get("example_value"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def uses_of_length(analysis: Analysis, user_node: fx.Node) -> set[str]:
    """The names of the arguments of ATen ops in which numbers that depend on the length arrive."""
    names: set[str] = set()
    symbols = sympy.sympify(analysis.length).free_symbols
    for node in analysis.shadow.groups.get(user_node, []):
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        given = [*zip(schema.arguments, node.args, strict=False)]
        given += [(p, node.kwargs[p.name]) for p in schema.arguments if p.name in node.kwargs]
        bounds = BOUNDS.get(node.target, ())
        for parameter, value in given:
            leaves = value if isinstance(value, list | tuple) else [value]
            for leaf in leaves:
                made = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
                # as it was traced: what is simple for the lengths at hand need not be for the whole one
                if isinstance(made, torch.SymInt | torch.SymFloat) and made.node.expr.free_symbols & symbols:
                    names.add("value" if parameter.name in bounds else parameter.name)
    return names


def global_number(node: fx.Node, symbols: set[Any], world_size: int, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """The same number computed from the global length."""
    if node in made:
        return made[node]
    if (
        node.op == "call_function"
        and node.all_input_nodes
        and all(_is_number(n) for n in node.all_input_nodes)
    ):
        mapping = {
            n: global_number(n, symbols, world_size, made)
            for n in node.all_input_nodes
            if depends_on(n, symbols)
        }
        with node.graph.inserting_after(_latest([node, *mapping.values()])):
            new = node.graph.call_function(
                node.target,  # type: ignore[arg-type]
                fx.map_arg(node.args, lambda n: mapping.get(n, n)),
                fx.map_arg(node.kwargs, lambda n: mapping.get(n, n)),
            )
    else:  # the length itself or a multiple of it, as an input or read off a tensor
        constant = affine_constant(node.meta["example_value"], symbols)
        if constant is None:
            raise LengthInValue(
                str(node.meta["example_value"].node.expr),
                location=user_location(node),
                why="it is computed from the length in a way that is not followed.",
            )
        place = node if node.op != "placeholder" else _last_placeholder(node.graph)
        with node.graph.inserting_after(place):
            new = node.graph.call_function(operator.mul, (node, world_size))
        if constant:  # `x[:, 1:].numel()`: of n + c that of the whole sequence is W n + c
            new.meta["zeco_settled"] = True
            with node.graph.inserting_after(new):
                new = node.graph.call_function(operator.sub, (new, (world_size - 1) * constant))
    new.meta["zeco_settled"] = True
    made[node] = new
    return new


def affine_constant(value: Any, symbols: set[Any]) -> int | None:
    """c, if a symbolic number is a multiple of the length's symbol, plus c; None if it is anything else."""
    expression = value.node.expr
    if len(symbols) != 1 or not expression.is_polynomial(*symbols):
        return None
    polynomial = sympy.Poly(expression, *symbols)
    constant = polynomial.coeff_monomial(1)
    return int(constant) if polynomial.degree() == 1 and constant.is_Integer else None


def _latest(nodes: Sequence[fx.Node]) -> fx.Node:
    order = {n: i for i, n in enumerate(nodes[0].graph.nodes)}
    return max(nodes, key=lambda n: order[n])


def _last_placeholder(graph: fx.Graph) -> fx.Node:
    return [n for n in graph.nodes if n.op == "placeholder"][-1]


ARITHMETIC = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
        operator.iadd, operator.isub, operator.imul, operator.itruediv,
        torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.full_like, torch.clamp,
        "add", "sub", "mul", "div", "pow", "clamp", "add_", "sub_", "mul_", "div_",
    }
)  # fmt: skip
