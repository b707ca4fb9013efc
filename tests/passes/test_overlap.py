"""The order of start, work and wait in a graph: as promised, for any order that a graph comes in."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from zeco_compile.passes.errors import CompileError
from zeco_compile.passes.overlap import (
    OrderLost,
    OverlapPass,
    Transfer,
    communicates,
    find_transfers,
    order_transfers,
    pin_order,
)

zeco = torch.ops.zeco
GROUP = "a group"
WAIT = zeco.scan_wait.default


def _inputs(layers: int = 1) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 6, 2, 3)] * 3 * layers
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def _trace(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    traced: fx.GraphModule = make_fx(lambda *args: function(*args), tracing_mode="fake")(*inputs)
    return traced


def _layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: str = GROUP) -> torch.Tensor:
    state, log_decay = zeco.rank_state(k, v, None)
    flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, group)
    o = zeco.diagonal(q, k, v, None, 1.0)
    return zeco.combine(o, q, None, zeco.scan_wait(flying, state, log_decay, group), 1.0)


def _layer_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, group: str = GROUP):
    dstate = zeco.rank_dstate(q, None, do, 1.0)
    decay = dstate.new_zeros(1, 2, 1)
    flying = zeco.scan_start(dstate, decay, None, True, "all_scan", 1, group)
    part = zeco.diagonal_backward(q, k, v, None, do, 1.0)
    arriving = zeco.scan_wait(flying, dstate, decay, group)
    return zeco.combine_backward(*part, q, k, v, None, do, 1.0, None, arriving)[:3]


def _names(graph: fx.Graph) -> list[str]:
    """The ops in order, items left out."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    return [node.target._opname for node in calls if node.target is not operator.getitem]


def _find(graph: fx.Graph, name: str) -> fx.Node:
    (found,) = [node for node in graph.nodes if getattr(node.target, "_opname", "") == name]
    return found


def _move(graph: fx.Graph, name: str, before: str) -> None:
    _find(graph, before).prepend(_find(graph, name))


def _shuffle(graph: fx.Graph, seed: int) -> None:
    """A random order that the data allow."""
    choose = random.Random(seed)
    left = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    done = {node for node in graph.nodes if node.op == "placeholder"}
    (output,) = graph.find_nodes(op="output")
    while left:
        node = choose.choice([node for node in left if done.issuperset(node.all_input_nodes)])
        output.prepend(node)
        done.add(node)
        left.remove(node)


def _assert_promise(graph: fx.Graph, transfers: tuple[Transfer, ...]) -> None:
    order = list(graph.nodes)
    place = {node: index for index, node in enumerate(order)}
    for transfer in transfers:
        for work in transfer.work:
            assert place[transfer.start] < place[work] < place[transfer.wait]
        follows = next(node for node in order[place[transfer.wait] :] if node.target is not WAIT)
        assert follows in transfer.wait.users
    graph.lint()


# ----- the forward


def test_traced_forward_is_in_order_already():
    gm = _trace(_layer, *_inputs())
    (transfer,) = order_transfers(gm.graph)
    assert _names(gm.graph) == ["rank_state", "scan_start", "diagonal", "scan_wait", "combine"]
    assert [node.target for node in transfer.work] == [zeco.diagonal.default]


def test_wait_beside_the_start_moves_to_its_first_user():
    gm = _trace(_layer, *_inputs())
    _move(gm.graph, "scan_wait", before="diagonal")
    assert _names(gm.graph) == ["rank_state", "scan_start", "scan_wait", "diagonal", "combine"]
    order_transfers(gm.graph)
    assert _names(gm.graph) == ["rank_state", "scan_start", "diagonal", "scan_wait", "combine"]


def test_start_passes_work_and_whatever_else_it_does_not_need():
    def function(q, k, v):
        gate = torch.sigmoid(q)
        other = q.neg()
        o = zeco.diagonal(other, k, v, None, 1.0)
        state, log_decay = zeco.rank_state(k, v, None)
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)
        o = zeco.combine(o, other, None, zeco.scan_wait(flying, state, log_decay, GROUP), 1.0)
        return o * gate, gate.cos()

    gm = _trace(function, *_inputs())
    order_transfers(gm.graph)
    assert _names(gm.graph) == [
        *("rank_state", "scan_start", "sigmoid", "neg", "diagonal", "scan_wait", "combine", "mul", "cos")
    ]


def test_users_of_the_wait_that_stand_before_the_work_follow_it():
    def function(q, k, v):
        state, log_decay = zeco.rank_state(k, v, None)
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)
        state_in = zeco.scan_wait(flying, state, log_decay, GROUP)
        seen = state_in.cos()
        o = zeco.diagonal(q, k, v, None, 1.0)
        return zeco.combine(o, q, None, state_in, 1.0), seen

    gm = _trace(function, *_inputs())
    order_transfers(gm.graph)
    assert _names(gm.graph) == ["rank_state", "scan_start", "diagonal", "scan_wait", "cos", "combine"]


def test_two_layers_stay_two_layers():
    def function(q, k, v):
        return _layer(q, _layer(q, k, v), v)

    gm = _trace(function, *_inputs())
    transfers = order_transfers(gm.graph)
    assert len(transfers) == 2
    assert _names(gm.graph) == ["rank_state", "scan_start", "diagonal", "scan_wait", "combine"] * 2


def test_state_that_only_leaves_the_graph_is_waited_for_at_its_end():
    def function(q, k, v):
        state, log_decay = zeco.rank_state(k, v, None)
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)
        state_in = zeco.scan_wait(flying, state, log_decay, GROUP)
        return state_in, q.cos()

    gm = _trace(function, *_inputs())
    (transfer,) = order_transfers(gm.graph)
    assert transfer.work == ()
    assert _names(gm.graph) == ["rank_state", "scan_start", "cos", "scan_wait"]


def test_one_rank_has_nothing_to_order():
    def function(q, k, v):
        return zeco.diagonal(q, k, v, None, 1.0)

    gm = _trace(function, *_inputs())
    before = gm.code
    assert order_transfers(gm.graph) == ()
    pin_order(gm.graph, ())
    gm.recompile()
    assert gm.code == before


# ----- with other communications


def test_halo_that_the_work_needs_comes_before_the_start():
    def function(q, k, v):
        state, log_decay = zeco.rank_state(k, v, None)
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)
        longer = zeco.halo(q.neg(), 1, 1, 0, 0.0, GROUP)[:, 1:]
        o = zeco.diagonal(longer, k, v, None, 1.0)
        return zeco.combine(o, q, None, zeco.scan_wait(flying, state, log_decay, GROUP), 1.0)

    gm = _trace(function, *_inputs())
    order_transfers(gm.graph)
    names = _names(gm.graph)
    assert names.index("neg") < names.index("halo") < names.index("scan_start") < names.index("diagonal")


def test_independent_layers_have_two_exchanges_in_flight_at_most():
    def function(q, k, v):
        return [_layer(q + n, k + n, v + n) for n in range(4)]

    gm = _trace(function, *_inputs())
    order_transfers(gm.graph)
    talk = [name for name in _names(gm.graph) if name not in ("add", "rank_state")]
    assert talk == [
        *("scan_start", "diagonal"),
        *("scan_start", "scan_wait", "combine", "diagonal") * 3,
        *("scan_wait", "combine"),
    ]


def test_start_does_not_pass_an_exchange_that_it_does_not_need():
    def function(q, k, v):
        total = zeco.all_sum(q.cos(), GROUP)
        return total, _layer(q, k, v)

    gm = _trace(function, *_inputs())
    order_transfers(gm.graph)
    assert _names(gm.graph)[:4] == ["cos", "all_sum", "rank_state", "scan_start"]


def test_ops_without_a_group_do_not_communicate():
    gm = _trace(lambda x: zeco.halo(x, 1, 1, 0, 0.0, "") + zeco.all_sum(x, GROUP).sum(), _inputs()[0])
    assert not communicates(_find(gm.graph, "halo"))
    assert communicates(_find(gm.graph, "all_sum"))


# ----- the backward


def test_backward_puts_other_gradients_between_start_and_wait():
    def function(q, k, v, do, x, w):
        dw = x.mm(w)
        dq, dk, dv = _layer_backward(q, k, v, do)
        return dq, dk, dv, dw

    gm = _trace(function, *_inputs(), _inputs()[0], torch.ones(2, 2), torch.ones(2, 2))
    order_transfers(gm.graph)
    names = [name for name in _names(gm.graph) if name != "new_zeros"]
    assert names == [
        *("rank_dstate", "scan_start", "mm", "diagonal_backward", "scan_wait", "combine_backward")
    ]


def test_backward_of_two_layers():
    def function(q, k, v, do):
        dq, dk, dv = _layer_backward(q, k, v, do)
        return (*_layer_backward(q, k, v, dq), dk, dv)

    gm = _trace(function, *_inputs(), _inputs()[0])
    order_transfers(gm.graph)
    names = [name for name in _names(gm.graph) if name != "new_zeros"]
    one = ["rank_dstate", "scan_start", "diagonal_backward", "scan_wait", "combine_backward"]
    assert names == one * 2


# ----- any order


@pytest.fixture(scope="module")
def one_rank() -> Iterator[str]:
    """A process group of one, in which the ops that communicate run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def _everything(group: str) -> Callable[..., Any]:
    def function(q, k, v, do, x):
        o = _layer(q, zeco.halo(k, 1, 1, 0, 0.0, group)[:, 1:].contiguous(), v, group) * torch.sigmoid(q)
        o = _layer(o.cos(), zeco.halo(o, 1, 1, 0, 0.0, group)[:, 1:].contiguous(), v, group)
        other = _layer(v, q, k, group)
        noise = torch.rand_like(q) - torch.rand_like(q)
        dq, dk, dv = _layer_backward(q, k, v, do * noise, group)
        later = _layer_backward(dq, dk, dv, o + other, group)
        read = x.cos()
        x.copy_(o)
        return (*later, zeco.all_sum(dq.sum(), group), read, x.sin())

    return function


@pytest.mark.parametrize("seed", range(25))
def test_any_order_is_put_in_order_and_computes_the_same(seed, one_rank):
    inputs = [*_inputs(), _inputs()[0], torch.zeros(1, 6, 2, 3, dtype=torch.float64)]
    gm = _trace(_everything(one_rank), *inputs)
    torch.manual_seed(0)
    expected = gm(*(each.clone() for each in inputs))
    fixed = [node.name for node in gm.graph.nodes if "rand" in node.name or node.name.startswith("copy")]
    if seed:
        # what must not pass each other is not shuffled: random numbers, and the mutation with what reads it
        reads = [n for n in gm.graph.nodes if n.name in fixed or n.name in ("cos_1", "sin", "cos_2")]
        before = [node.name for node in reads]
        for attempt in range(200):
            _shuffle(gm.graph, 1000 * seed + attempt)
            if [node.name for node in gm.graph.nodes if node.name in before] == before:
                break
        else:
            pytest.fail("no shuffle kept the order of what has to keep it")
    transfers = order_transfers(gm.graph)
    assert len(transfers) == 5
    _assert_promise(gm.graph, transfers)
    assert [node.name for node in gm.graph.nodes if node.name in fixed] == fixed
    gm.recompile()
    torch.manual_seed(0)
    for got, want in zip(gm(*(each.clone() for each in inputs)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_order_depends_on_the_graph_alone(one_rank):
    inputs = [*_inputs(), _inputs()[0], torch.zeros(1, 6, 2, 3, dtype=torch.float64)]
    orders = []
    for _ in range(2):
        gm = _trace(_everything(one_rank), *inputs)
        _shuffle(gm.graph, 3)
        order_transfers(gm.graph)
        orders.append([node.name for node in gm.graph.nodes])
    assert orders[0] == orders[1]


# ----- refusals


def test_start_without_a_wait():
    def function(q, k, v):
        state, log_decay = zeco.rank_state(k, v, None)
        return zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)

    with pytest.raises(OrderLost, match=r"waited for 0 times and used by 1 nodes") as caught:
        order_transfers(_trace(function, *_inputs()).graph)
    assert isinstance(caught.value, CompileError)
    assert caught.value.node == "scan_start"
    assert '"overlap": False' in str(caught.value)


def test_start_that_is_waited_for_twice():
    def function(q, k, v):
        state, log_decay = zeco.rank_state(k, v, None)
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)
        return [zeco.scan_wait(flying, state, log_decay, GROUP) for _ in range(2)]

    with pytest.raises(OrderLost, match="waited for 2 times"):
        order_transfers(_trace(function, *_inputs()).graph)


def test_wait_without_a_start():
    def function(flying, state, log_decay):
        return zeco.scan_wait(flying, state, log_decay, GROUP)

    gm = _trace(function, torch.zeros(1), torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 1))
    with pytest.raises(OrderLost, match="does not start"):
        order_transfers(gm.graph)


def test_work_that_needs_its_own_exchange():
    def function(q, k, v):
        state, log_decay = zeco.rank_state(k, v, None)
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)
        state_in = zeco.scan_wait(flying, state, log_decay, GROUP)
        o = zeco.diagonal(q + state_in.sum(), k, v, None, 1.0)
        return zeco.combine(o, q, None, state_in, 1.0)

    with pytest.raises(OrderLost, match="cycle"):
        order_transfers(_trace(function, *_inputs()).graph)


def test_exchange_whose_work_was_cut_off():
    def function(q, k, v):
        state, log_decay = zeco.rank_state(k, v, None)
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, GROUP)
        o = zeco.diagonal(q, k, v, None, 1.0)
        return o, zeco.scan_wait(flying, state, log_decay, GROUP)

    with pytest.raises(OrderLost, match="zeco::diagonal is joined with no exchange"):
        order_transfers(_trace(function, *_inputs()).graph)


def test_a_failed_verification_is_a_refusal():
    gm = _trace(_layer, *_inputs())
    from zeco_compile.passes.overlap import _verify

    transfers = find_transfers(gm.graph)
    _verify(gm.graph, transfers)
    _move(gm.graph, "scan_wait", before="diagonal")
    with pytest.raises(OrderLost, match="diagonal does not stand between"):
        _verify(gm.graph, transfers)


# ----- pinned


def _pinned(graph: fx.Graph) -> dict[str, list[str]]:
    found = {}
    for node in graph.nodes:
        if str(node.target) == "control_deps":
            found[node.name] = [dependency.name for dependency in node.args[0]]
    return found


class _Unpinned(fx.Interpreter):
    """Runs what pinned nodes wrap, which torch 2.11 cannot do outside Inductor."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target) == "control_deps":
            return args[1](*args[2:])
        return super().call_function(target, args, kwargs)


def test_pins_of_a_layer():
    gm = _trace(_layer, *_inputs())
    OverlapPass(overlap=True, identity="")(gm.graph)
    assert _pinned(gm.graph) == {"diagonal": ["scan_start"], "scan_wait": ["scan_start", "diagonal"]}


def test_pin_of_an_op_with_several_results_is_its_first_item():
    gm = _trace(_layer_backward, *_inputs(), _inputs()[0])
    OverlapPass(overlap=True, identity="")(gm.graph)
    assert _pinned(gm.graph) == {
        "diagonal_backward": ["scan_start"],
        "scan_wait": ["scan_start", "getitem"],
    }


def test_wait_is_pinned_behind_the_matrix_products_before_it():
    def function(q, k, v, do, x, w):
        dw = x.mm(w).cos()
        return (*_layer_backward(q, k, v, do), dw)

    gm = _trace(function, *_inputs(), _inputs()[0], torch.ones(2, 2), torch.ones(2, 2))
    OverlapPass(overlap=True, identity="")(gm.graph)
    assert _pinned(gm.graph)["scan_wait"] == ["scan_start", "getitem", "mm"]


def test_without_overlap_communications_alone_are_pinned():
    def function(q, k, v):
        return _layer(q, zeco.halo(k, 1, 1, 0, 0.0, GROUP)[:, 1:], v), zeco.all_sum(q, GROUP)

    gm = _trace(function, *_inputs())
    OverlapPass(overlap=False, identity="")(gm.graph)
    assert _pinned(gm.graph) == {
        "scan_start": ["halo"],
        "scan_wait": ["scan_start"],
        "all_sum": ["scan_wait"],
    }


def test_pinned_graph_computes_the_same(one_rank):
    inputs = [*_inputs(), _inputs()[0], torch.zeros(1, 6, 2, 3, dtype=torch.float64)]
    gm = _trace(_everything(one_rank), *inputs)
    torch.manual_seed(0)
    expected = gm(*(each.clone() for each in inputs))
    OverlapPass(overlap=True, identity="")(gm.graph)
    torch.manual_seed(0)
    for got, want in zip(_Unpinned(gm).run(*(each.clone() for each in inputs)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_uuid_is_of_options_and_identity():
    first = OverlapPass(overlap=True, identity="a").uuid()
    assert first == OverlapPass(overlap=True, identity="a").uuid()
    assert first != OverlapPass(overlap=False, identity="a").uuid()
    assert first != OverlapPass(overlap=True, identity="b").uuid()
