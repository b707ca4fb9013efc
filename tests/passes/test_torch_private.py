"""Every piece of private PyTorch API that the passes use still is where it was and does what it did."""

import math
import operator

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis, ShortenTraceback, UncapturedHigherOrderOpError
from torch._higher_order_ops.scan import scan

from zeco_compile.passes import torch_private
from zeco_compile.passes.torch_private import LoudBackendError, is_dynamo_restart


def test_loud_backend_error_is_of_the_types_that_dynamo_lets_through():
    error = LoudBackendError("text")
    assert isinstance(error, ShortenTraceback), "Dynamo would wrap our errors in BackendCompilerFailed"
    assert isinstance(error, UncapturedHigherOrderOpError), "suppress_errors would swallow our errors"
    assert error.remove_dynamo_frames() is error


def test_loud_backend_error_passes_through_a_compiled_call_with_its_cause():
    def backend(gm, example_inputs):
        raise LoudBackendError("text") from KeyError("cause")

    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(LoudBackendError) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    assert str(caught.value) == "text"
    assert isinstance(caught.value.__cause__, KeyError)
    torch._dynamo.reset()


def test_requests_to_trace_again_are_told_from_failures():
    assert is_dynamo_restart(torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason="x"))
    assert is_dynamo_restart(RestartAnalysis(restart_reason="x"))
    assert not is_dynamo_restart(LoudBackendError("text"))
    assert not is_dynamo_restart(KeyError("x"))


def test_guards_and_symbols_of_a_symbolic_size():
    """What a trace assumed of a length is found, with the symbol that its size has."""
    seen = []

    def backend(gm, example_inputs):
        mode, fakes = torch_private.fake_inputs(gm, example_inputs)
        size = next(f.shape[1] for f in fakes if isinstance(f, torch.Tensor))
        seen.append((torch_private.symbols_of_size(size), torch_private.shape_guards(mode)))
        return gm.forward

    def branches(x):
        return x + 1 if x.shape[1] > 8 else x * 2

    torch._dynamo.reset()
    x = torch.randn(2, 5)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    torch.compile(branches, backend=backend, fullgraph=True)(x)
    ((symbols, guards),) = seen
    assert len(symbols) == 1
    ((condition, source),) = guards
    assert condition.free_symbols == symbols
    assert bool(condition.subs(dict.fromkeys(symbols, 5)))
    assert "if x.shape[1] > 8" in source
    assert torch_private.symbols_of_size(5) == set()


@pytest.fixture
def traced():
    """Compiles a function with a backend that looks at its graph and runs it as it is; what it saw, per graph."""

    def run(function, *args, look, **options):
        seen = []

        def backend(gm, example_inputs):
            seen.append(look(gm, example_inputs))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(function, backend=backend, **options)(*args)
        torch._dynamo.reset()
        return seen

    return run


def placeholders(gm):
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def test_fake_inputs_are_in_the_mode_of_the_trace_and_keep_shapes_and_symbols(traced):
    def look(gm, example_inputs):
        mode, fakes = torch_private.fake_inputs(gm, example_inputs)
        context = torch._guards.TracingContext.get()
        assert mode is context.fake_mode
        tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
        assert len(fakes) == len(placeholders(gm))
        assert all(torch_private.FakeTensor is type(fake) and fake.fake_mode is mode for fake in tensors)
        return [tuple(fake.shape) for fake in tensors]

    x = torch.randn(2, 5)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    ((shape,),) = traced(lambda x: x * x.shape[1], x, look=look)
    assert shape[0] == 2
    assert isinstance(shape[1], torch.SymInt), "the symbol of the length would be lost"
    (shapes,) = traced(lambda x, y: x + y, torch.ones(3, 1), torch.ones(4), look=look)
    assert shapes == [(3, 1), (4,)]


def test_fake_inputs_outside_of_a_compilation_are_an_error():
    with pytest.raises(RuntimeError, match=r"called by torch\.compile"):
        torch_private.fake_inputs(torch.fx.symbolic_trace(lambda x: x.sin()), [torch.ones(1)])


def test_checks_with_side_effects_can_be_traced():
    """`torch.linalg.inv` checks for errors by an op that AOTAutograd keeps in order with tokens."""
    with torch._subclasses.FakeTensorMode() as mode, torch.no_grad():
        gm = torch_private.trace_functional(torch.linalg.inv, [mode.from_tensor(torch.eye(3))])
    checks = [node for node in gm.graph.nodes if torch_private.checks_only(node)]
    assert len(checks) <= 1  # none where the check is not traced at all
    assert any(node.target is torch.ops.aten.linalg_inv_ex.default for node in gm.graph.nodes)


def test_trace_functional_gives_values_of_in_place_code_as_they_were_read():
    """Two reads of a tensor that is written in between are two nodes; writes are gone from the graph."""
    nodes = []

    def function(x):
        assert torch_private.tracing_graph() is not None
        y = x * 2
        nodes.append(torch_private.traced_node(y))
        y.add_(1)
        nodes.append(torch_private.traced_node(y))
        nodes.append(torch_private.traced_node(7))
        return (y, torch.nn.functional.linear(y, y))

    with torch._subclasses.FakeTensorMode() as mode:
        gm = torch_private.trace_functional(function, [mode.from_tensor(torch.randn(3, 3))])
    ops = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert not [op for op in ops if op._schema.is_mutable], "in-place writes were not functionalised"
    assert torch.ops.aten.linear.default not in ops, "composite ops were not taken apart"
    first, second, number = nodes
    assert first.target is torch.ops.aten.mul.Tensor
    assert second.target is torch.ops.aten.add.Tensor
    assert second.args[0] is first
    assert number == 7
    assert {first, second} <= set(gm.graph.nodes)


def test_numbers_have_nodes_only_where_they_are_read():
    """A long chain of numbers too, which nobody asks for before its end."""
    traced, made = [], []

    def longer(x):
        number = x.shape[0]
        for _ in range(2000):
            number = number + 1
            torch_private.traced_node(number)
        return x.new_zeros(number)

    def flat(x):
        y = x.flatten() + 1
        made.extend(torch_private.tracing_graph().nodes)
        return y

    def backend(gm, example_inputs):
        mode, fakes = torch_private.fake_inputs(gm, example_inputs)
        x = next(fake for fake in fakes if isinstance(fake, torch.Tensor))
        with mode, torch.no_grad():
            traced.append(torch_private.trace_functional(longer, [x]))
            torch_private.trace_functional(flat, [x])
        return gm

    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x.flatten(), backend=backend)(x)
    assert sum(node.target is operator.add for node in traced[0].graph.nodes) == 2000
    sizes = [node.target for node in made if node.target in (operator.add, operator.mul)]
    assert sizes == [operator.mul]  # what the view gets, and not how much memory it takes


def test_outside_of_a_trace_there_is_no_graph_and_values_are_themselves():
    x = torch.ones(1)
    assert torch_private.tracing_graph() is None
    assert torch_private.traced_node(x) is x


class Owner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3))
        self.plain = torch.ones(3)

    def forward(self, x, nested):
        return x * self.weight + self.mask + self.plain + nested["inner"][0] + closed_over


closed_over = torch.ones(3)


def test_sources_tell_arguments_from_what_a_module_or_the_globals_hold(traced):
    def look(gm, example_inputs):
        return {torch_private.source_name(p): torch_private.is_argument(p) for p in placeholders(gm)}

    (found,) = traced(Owner(), torch.ones(3), {"inner": [torch.ones(3)]}, look=look)
    arguments = {name for name, is_argument in found.items() if is_argument}
    assert arguments == {"L['x']", "L['nested']['inner'][0]"}
    owned = sorted(found.keys() - arguments)
    assert len(owned) == 4
    assert any("closed_over" in name for name in owned)
    assert {"weight", "mask", "plain"} == {
        part for part in ("weight", "mask", "plain") for name in owned if part in name
    }


def test_source_of_a_placeholder_that_dynamo_did_not_make_is_unknown():
    (x,) = placeholders(torch.fx.symbolic_trace(lambda x: x.sin()))
    assert torch_private.source_name(x) == ""
    assert torch_private.is_argument(x)


def test_a_backend_can_ask_for_a_symbolic_trace(traced):
    """The first trace has a number for the length, the second, after the restart, a symbol."""

    def look(gm, example_inputs):
        (x,) = (value for value in example_inputs if isinstance(value, torch.Tensor))
        if torch_private.mark_weakly_dynamic(x, 1):
            calls.append("static")
            torch_private.restart_trace("once more")
        calls.append("symbolic")
        assert not torch_private.mark_weakly_dynamic(x, 1), "asked twice, it would restart for ever"
        return [node.meta["example_value"] for node in placeholders(gm)]

    calls = []
    ((*_, x),) = traced(lambda x: x / x.shape[1], torch.randn(2, 5), look=look)
    assert calls == ["static", "symbolic"]
    assert isinstance(x.shape[1], torch.SymInt)


def test_a_backend_can_ask_for_a_constant_again():
    torch._dynamo.reset()
    lengths = []

    def backend(gm, example_inputs):
        (x,) = (value for value in example_inputs if isinstance(value, torch.Tensor))
        (*_, node) = placeholders(gm)
        lengths.append(node.meta["example_value"].shape[1])
        if torch_private.mark_weakly_dynamic(x, 1):
            torch_private.restart_trace("a symbol")
        if len(lengths) == 2:
            torch_private.mark_constant(x, 1)
            torch_private.restart_trace("a constant")
        return gm.forward

    torch.compile(lambda x: x / x.shape[1], backend=backend)(torch.randn(2, 5))
    assert lengths[0] == lengths[2] == 5
    assert isinstance(lengths[1], torch.SymInt)
    torch._dynamo.reset()


def test_a_size_is_marked_constant_once():
    x = torch.randn(2, 5)
    assert torch_private.mark_constant(x, 1)
    assert not torch_private.mark_constant(x, 1), "asked twice, a trace would restart for ever"


def test_a_backend_can_ask_for_constant_floats():
    torch._dynamo.reset()
    seen = []

    def backend(gm, example_inputs):
        floats = torch_private.symbolic_floats(gm)
        seen.append(len(floats))
        for symbol in floats:
            torch_private.mark_constant_float(symbol)
        if floats:
            torch_private.restart_trace("constant floats")
        return gm.forward

    scaled = torch.compile(lambda x, a: x * a + (1 - a), backend=backend, dynamic=True)
    x = torch.randn(2, 5)
    for a in (0.5, 0.25):
        assert torch.allclose(scaled(x, a), x * a + (1 - a))
    assert seen[0] == 1
    assert seen[-1] == 0
    torch._dynamo.reset()


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_what_dynamo_makes_of_checkpoints_and_functions():
    """Each is one node; its bodies are attributes of the graph."""
    torch._dynamo.reset()
    seen = []

    def backend(gm, example_inputs):
        for node in gm.graph.nodes:
            if torch_private.is_checkpoint(node.target):
                body = gm.get_submodule(node.args[0].target)
                seen.append(("checkpoint", torch_private.is_selective_checkpoint(body)))
            if torch_private.is_autograd_function(node.target):
                bodies = [a for a in node.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"]
                seen.append(("function", len(bodies)))
        return gm.forward

    def function(x):
        return _Doubled.apply(torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False))

    torch.compile(function, backend=backend)(torch.randn(2, 5, requires_grad=True))
    assert sorted(seen) == [("checkpoint", False), ("function", 2)]
    assert torch_private.new_checkpoint() < torch_private.new_checkpoint()
    torch._dynamo.reset()


def test_the_policy_of_a_selective_checkpoint_is_asked_for_each_op():
    torch._dynamo.reset()
    seen = []

    def backend(gm, example_inputs):
        (node,) = (n for n in gm.graph.nodes if torch_private.is_checkpoint(n.target))
        body = gm.get_submodule(node.args[0].target)
        assert torch_private.is_selective_checkpoint(body)
        fakes = [each.meta["example_value"] for each in node.args[1:]]
        answers = torch_private.checkpoint_policies(body, fakes)
        seen.extend((n.target, answer) for n, found in answers.items() for answer in found)
        return gm.forward

    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])

    def function(x):
        return torch.utils.checkpoint.checkpoint(
            lambda y: torch.cos(torch.sin(y)), x, use_reentrant=False, context_fn=contexts
        )

    torch.compile(function, backend=backend)(torch.randn(2, 5, requires_grad=True))
    policy = torch.utils.checkpoint.CheckpointPolicy
    assert seen == [(torch.sin, policy.MUST_SAVE), (torch.cos, policy.PREFER_RECOMPUTE)]
    torch._dynamo.reset()


def test_a_scan_is_one_node_whose_body_can_be_computed_for_all_steps():
    """The body takes carries, slices of what is scanned, and what is shared; and it knows the user's lines."""
    torch._dynamo.reset()
    seen = []

    def backend(gm, example_inputs):
        (node,) = (n for n in gm.graph.nodes if torch_private.is_scan(n.target))
        body, initial, scanned, shared = node.args
        seen.append((len(initial), len(scanned), len(shared)))
        fakes = torch_private.fake_inputs(gm, example_inputs)
        with fakes[0], torch.no_grad():
            each = [torch.empty(5, 2), torch.empty(5, 2), torch.empty(2)]
            traced = torch_private.trace_batched(gm.get_submodule(body.target), each, [0, 0, None])
        seen.append([n for n in traced.graph.nodes if n.target is torch.ops.aten.mul.Tensor])
        return gm.forward

    def step(h, x):
        h = h * weight + x
        return h.clone(), h

    weight = torch.randn(2)
    torch.compile(lambda x: scan(step, x.new_zeros(2), x), backend=backend)(torch.randn(5, 2))
    counts, (product,) = seen
    assert counts == (1, 1, 1)
    assert product.meta["val"].shape == (5, 2)
    assert "h = h * weight + x" in product.meta["stack_trace"]
    torch._dynamo.reset()


def test_a_restart_is_possible_behind_a_branch_that_a_symbol_goes_another_way():
    """The second trace need not pass the places of the first, which Dynamo would take for a bug of its own."""
    torch._dynamo.reset()

    def backend(gm, example_inputs):
        (x,) = (value for value in example_inputs if isinstance(value, torch.Tensor))
        if torch_private.mark_weakly_dynamic(x, 1):
            torch_private.restart_trace("once more")
        return gm.forward

    def function(x):
        y = torch.arange(x.shape[1])
        return x * (y + math.floor(math.sqrt(x.shape[1])))

    x = torch.randn(2, 5)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))
    torch._dynamo.reset()


def breaks(x):
    y = x + 1
    torch._dynamo.graph_break()  # here
    return y * 2


def test_graph_break_has_a_reason_and_a_stack_that_ends_in_the_users_line(traced):
    found = traced(breaks, torch.ones(2), look=lambda gm, _: torch_private.graph_break(gm))
    assert len(found) == 2, "the graph before the break and the one behind it"
    reason, stack = found[0]
    assert "graph_break" in reason
    assert "# here" in stack
    assert found[1] is None
    assert traced(torch.sin, torch.ones(2), look=lambda gm, _: torch_private.graph_break(gm)) == [None]


def test_a_graph_behind_a_break_is_known_as_one(traced):
    found = traced(breaks, torch.ones(2), look=lambda gm, _: torch_private.is_behind_graph_break())
    assert found == [False, True]


def test_compilations_left_are_counted_down_to_the_limit():
    """Zero at the last one: behind it Dynamo runs the frame in eager without a word."""
    left = []

    def backend(gm, example_inputs):
        left.append(torch_private.compiles_left())
        return gm.forward

    torch._dynamo.reset()
    assert torch_private.compiles_left() is None
    with torch._dynamo.config.patch(recompile_limit=3):
        compiled = torch.compile(lambda x, mood: x * len(mood), backend=backend)
        for mood in ("x", "xx", "xxx", "xxxx", "xxxxx"):
            compiled(torch.ones(2), mood)
    torch._dynamo.reset()
    assert left == [2, 1, 0]


def test_views_share_their_memory():
    seen = {}

    def function(x):
        y = x * 2
        seen["y"], seen["view"] = torch_private.memory_of(y), torch_private.memory_of(y.view(-1))
        seen["after a write"] = torch_private.memory_of(y.add_(1))
        seen["other"] = torch_private.memory_of(x * 2)
        return y

    mode = torch._subclasses.FakeTensorMode()
    with mode:
        torch_private.trace_functional(function, [torch.empty(2, 3)])
    assert len(seen["y"]) == 1
    assert seen["y"] == seen["view"] == seen["after a write"]
    assert seen["y"] != seen["other"]
