"""Gated linear attention over the ranks: against the float64 recurrence, every gradient on every rank."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeco_compile.kernels.errors import InvalidShapes
from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.lowering import attention, in_flight, op_log, volume
from zeco_compile.lowering.errors import GroupNotFound, InvalidSchedule, SecondDerivative

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}
DEFAULT: dict[str, Any] = {
    "gate": "channel",
    "dtype": torch.float64,
    "schedule": "auto",
    "blocks": 0,
    "length": 7,
    "sizes": (2, 3, 6, 5),
    "initial": True,
    "final": True,
    "how": "eager",
    "members": None,
}


def zeco():
    """torch.ops.zeco. Functions that go to another process by value cannot say ``torch.ops`` themselves."""
    import torch as imported

    return imported.ops.zeco


def _inputs(case: dict[str, Any], world_size: int) -> dict[str, torch.Tensor]:
    """The whole sequence, in numbers that the dtype can hold."""
    draw = torch.Generator().manual_seed(0)
    batch, heads, key_dim, value_dim = case["sizes"]
    length = case["length"] * world_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    full = {
        "q": normal(batch, length, heads, key_dim),
        "k": normal(batch, length, heads, key_dim),
        "v": normal(batch, length, heads, value_dim),
        "do": normal(batch, length, heads, value_dim),
        "dfinal": normal(batch, heads, key_dim, value_dim),
        "initial_state": normal(batch, heads, key_dim, value_dim),
    }
    # decays that differ by head and are slow: fast ones would hide a broken state
    per_head = torch.linspace(0.1, 3.0, heads, dtype=torch.float64)
    gate = case["gate"]
    if gate == "constant":
        full["g"] = -0.03 * per_head
    elif gate == "head":
        full["g"] = -0.05 * torch.rand(batch, length, heads, generator=draw).double() * per_head
    elif gate != "none":
        noise = torch.rand(batch, length, heads, key_dim, generator=draw).double()
        full["g"] = -0.05 * noise * per_head.unsqueeze(-1)
        if gate == "resets":
            full["g"][:, length // 2] = float("-inf")
            full["g"][:, -1, 0] = -1e38
            full["g"][:, 1, 1] = -20.0
            full["g"][:, 0, 2] = 0.0
    if not case["initial"]:
        del full["initial_state"]
    return {name: value.to(case["dtype"]).double() for name, value in full.items()}


def _leaves(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ("q", "k", "v", "g", "initial_state")
    return {name: tensors[name].clone().requires_grad_() for name in names if name in tensors}


def _reference(case: dict[str, Any], full: dict[str, torch.Tensor], world_size: int) -> dict[str, Any]:
    leaves = _leaves(full)
    g = leaves.get("g")
    if g is not None and g.dim() == 1:
        g = g.expand(leaves["q"].shape[:3])
    o, final = recurrent_gated_linear_attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        g,
        scale=0.3,
        initial_state=leaves.get("initial_state"),
        output_final_state=True,
    )
    objective = (o * full["do"]).sum()
    if case["final"]:
        # each rank differentiates its own copy of the final state, and those gradients add up
        objective = objective + world_size * (final * full["dfinal"]).sum()
    objective.backward()
    return {"o": o.detach(), "final": final.detach(), **{f"d{n}": leaf.grad for n, leaf in leaves.items()}}


def _run(case: dict[str, Any], group: str, mine: dict[str, torch.Tensor]) -> dict[str, Any]:
    leaves = _leaves(mine)

    def layer(q, k, v, g, initial_state):
        return zeco().gated_linear_attention(
            q, k, v, g, 0.3, initial_state, case["final"], case["schedule"], case["blocks"], group
        )

    if case["how"] != "eager":
        layer = torch.compile(layer, backend=case["how"], fullgraph=True, dynamic=True)
    o, final = layer(leaves["q"], leaves["k"], leaves["v"], leaves.get("g"), leaves.get("initial_state"))
    assert o.dtype == case["dtype"]
    assert o.is_contiguous()
    objective = (o * mine["do"]).sum()
    if case["final"]:
        assert final.dtype == (torch.float64 if case["dtype"] == torch.float64 else torch.float32)
        objective = objective + (final * mine["dfinal"]).sum()
    else:
        assert final.numel() == 0
    objective.backward()
    return {"o": o.detach(), "final": final.detach(), **{f"d{n}": leaf.grad for n, leaf in leaves.items()}}


def _errors(rank: int, changes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For each case, this rank's largest error in each output and gradient, relative to its largest entry."""
    out = []
    for change in changes:
        case = {**DEFAULT, **change}
        torch.compiler.reset()
        members = case["members"] or list(range(dist.get_world_size()))
        world = dist.group.WORLD if case["members"] is None else dist.new_group(members)
        if rank not in members:
            out.append({})
            continue
        group = world.group_name  # type: ignore[union-attr]
        place, size = members.index(rank), len(members)
        full = _inputs(case, size)
        expected = _reference(case, full, size)
        rows = slice(place * case["length"], (place + 1) * case["length"])
        along = {"q", "k", "v", "do", "o", "dq", "dk", "dv"}
        along |= {"g", "dg"} if case["gate"] != "constant" else set()
        mine = {
            n: (value[:, rows] if n in along else value).to(case["dtype"]).contiguous()
            for n, value in full.items()
        }
        got = _run(case, group, mine)
        if case["gate"] == "constant":
            # the ranks hold the gate together, and the parts of its gradient add up
            total = got["dg"].double()
            dist.all_reduce(total, group=world)
            got["dg"] = total
        if not case["final"]:
            del got["final"]
        if "dinitial_state" in expected and place > 0:
            expected["dinitial_state"] = torch.zeros_like(expected["dinitial_state"])
        errors = {}
        for name, value in got.items():
            want = expected[name][:, rows] if name in along else expected[name]
            scale = max(1.0, float(expected[name].abs().max()))
            difference = float((value.double() - want).abs().max()) / scale
            errors[name] = difference if difference == difference else float("inf")
        errors["in flight"] = float(in_flight.pending())
        out.append(errors)
    return out


def _check(pool: Any, cases: list[dict[str, Any]]) -> None:
    for rank, per_case in enumerate(pool.run(_errors, cases)):
        for case, errors in zip(cases, per_case, strict=True):
            limit = LIMITS[case.get("dtype", torch.float64)]
            for name, error in errors.items():
                assert error <= limit, f"rank {rank}, {case}: {name} is {error:.1e} off ({errors})"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_gradient_on_every_rank(ranks, world_size):
    cases: list[dict[str, Any]] = [
        {"gate": gate, "schedule": schedule, "blocks": blocks}
        for gate in ("none", "constant", "head", "channel", "resets")
        for schedule, blocks in (
            ("auto", 0),
            ("all_scan", 3),
            ("lasp1", 0),
            ("lasp2", 0),
            ("all_scan_tree", 0),
        )
    ]
    cases += [{"length": length} for length in (1, 2, 65, 130)]
    cases += [{"sizes": sizes} for sizes in ((1, 1, 1, 1), (1, 2, 8, 16), (3, 1, 48, 80))]
    cases += [{"initial": initial, "final": final} for initial in (False, True) for final in (False, True)]
    cases += [
        {"dtype": dtype, "gate": gate}
        for dtype in (torch.float32, torch.bfloat16)
        for gate in ("none", "constant", "head", "channel")
    ]
    _check(ranks(world_size), cases)


@pytest.mark.parametrize("how", ["aot_eager", "inductor"])
def test_compiled(ranks, how):
    cases = [
        {"how": how},
        {"how": how, "gate": "constant", "schedule": "lasp2", "dtype": torch.float32},
        {"how": how, "gate": "none", "initial": False, "final": False, "blocks": 2},
    ]
    _check(ranks(2), cases)


def test_sub_group_of_the_world(ranks):
    _check(ranks(4), [{"members": [1, 3]}, {"members": [0, 2, 3], "blocks": 2}, {"members": None}])


def test_case_1_forward_right_and_gradients_wrong(ranks):
    """A long sequence with slow decays that differ by head, where a forgotten boundary term shows in dg."""
    _check(ranks(2), [{"length": 1024, "sizes": (1, 4, 32, 32), "dtype": torch.float32, "gate": "head"}])


def _order(rank: int, how: str, shared: bool = False) -> tuple[list[str], list[str], float]:
    """Names of the ops of two layers as executed, and the sum they gave; the layers may share k, v, g."""
    torch.compiler.reset()
    torch.manual_seed(rank)
    world = dist.group.WORLD
    assert world is not None
    group = world.group_name
    attend = zeco().gated_linear_attention

    def two_layers(q, k, v, g):
        for _ in range(2):
            o, _ = attend(q, k, v, g, 1.0, None, False, "auto", 0, group)
            q = torch.tanh(o)
            if not shared:
                k = torch.tanh(k)
        return q.sum()

    run = two_layers if how == "eager" else torch.compile(two_layers, backend=how, fullgraph=True)
    leaves = [torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3)]
    g = -torch.rand(1, 8, 2, 4)
    run(*leaves, g).backward()
    with op_log.recording() as forward:
        total = run(*leaves, g)
    with op_log.recording() as backward:
        total.backward()
    forward, backward = ([name for name in log if "done" not in name] for log in (forward, backward))
    return forward, backward, float(total)


FORWARD = ["rank_state", "scan_start", "diagonal", "scan_wait", "combine"]
BACKWARD = ["rank_dstate", "scan_start reverse", "diagonal_backward", "scan_wait", "combine_backward"]


def test_order_as_executed(ranks):
    for forward, backward, _ in ranks(2).run(_order, "eager"):
        assert forward == FORWARD * 2
        assert backward == BACKWARD * 2


def test_ops_as_executed_when_compiled(ranks):
    """The compiler may move the ops of the backward (a pass puts them back); none is lost or doubled."""
    for forward, backward, _ in ranks(2).run(_order, "aot_eager"):
        assert sorted(forward) == sorted(FORWARD * 2)
        assert sorted(backward) == sorted(BACKWARD * 2)


def test_layers_that_share_a_scan(ranks):
    """Two layers with the same k, v and g: the compiler may merge their scans, and then merges the waits."""
    eager, compiled = (ranks(2).run(_order, how, True) for how in ("eager", "aot_eager"))
    for (_, _, expected), (forward, _, got) in zip(eager, compiled, strict=True):
        assert forward.count("scan_start") == forward.count("scan_wait")
        assert abs(got - expected) < 1e-5


def _volume(rank: int, schedule: str) -> tuple[dict[str, int], int]:
    world = dist.group.WORLD
    assert world is not None
    q, k, v, g = (torch.randn(2, 9, 3, 4, requires_grad=True) for _ in range(4))
    volume.reset()
    o, _ = zeco().gated_linear_attention(q, k, v, g, 1.0, None, False, schedule, 2, world.group_name)
    o.sum().backward()
    return volume.sent(), 2 * 3 * 4 * 4 * 4


def test_the_chain_sends_one_state_a_direction(ranks):
    for schedule in ("all_scan", "lasp1"):
        sent = ranks(3).run(_volume, schedule)
        for rank, (bytes_sent, state) in enumerate(sent):
            assert bytes_sent.get("scan", 0) == (state if rank < 2 else 0)
            assert bytes_sent.get("scan reverse", 0) == (state if rank > 0 else 0)


def _exception_in_between(rank: int) -> tuple[int, float]:
    world = dist.group.WORLD
    assert world is not None
    group = world.group_name
    original = attention.chunked.diagonal

    def broken(*args):
        raise KeyError("between start and wait")

    inputs = [torch.ones(1, 3, 1, 2) for _ in range(3)]
    attention.chunked.diagonal = broken
    try:
        zeco().gated_linear_attention(*inputs, None, 1.0, None, False, "auto", 0, group)
    except KeyError:
        pass
    finally:
        attention.chunked.diagonal = original
    gc.collect()
    left = in_flight.pending()
    o, _ = zeco().gated_linear_attention(*inputs, None, 1.0, None, False, "auto", 0, group)
    # every token adds 1 to each of q.k's two terms: o_t = 2 (t + 1)
    return left, float((o[0, :, 0, 0] - torch.arange(1.0, 4.0) * 2 - 6 * rank).abs().max())


def test_an_exception_between_start_and_wait(ranks):
    assert ranks(3).run(_exception_in_between) == [(0, 0.0)] * 3


def test_strided_and_expanded_inputs():
    draw = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = normal(2, 3, 6, 5).transpose(1, 2), normal(2, 5, 3, 6).permute(0, 3, 2, 1)
    v, g = normal(1, 6, 3, 4).expand(2, 6, 3, 4), -normal(2, 1, 3, 1).abs().expand(2, 6, 3, 5)
    state = normal(2, 3, 4, 5).transpose(2, 3)
    got = torch.ops.zeco.gated_linear_attention(q, k, v, g, 0.5, state, True, "auto", 0, "")
    want = recurrent_gated_linear_attention(
        q, k, v, g, scale=0.5, initial_state=state, output_final_state=True
    )
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_rank_does_not_scan():
    inputs = [torch.randn(1, 5, 2, 3, requires_grad=True) for _ in range(3)]
    with op_log.recording() as log:
        o, final = torch.ops.zeco.gated_linear_attention(*inputs, None, 1.0, None, False, "auto", 0, "")
        o.sum().backward()
    assert final.numel() == 0
    assert not final.requires_grad
    assert log == ["diagonal", "diagonal_backward", "combine_backward"]


def test_second_derivatives_are_refused():
    q, k, v = (torch.randn(1, 3, 1, 2, requires_grad=True) for _ in range(3))
    o, _ = torch.ops.zeco.gated_linear_attention(q, k, v, None, 1.0, None, False, "auto", 0, "")
    with pytest.raises(SecondDerivative, match="without create_graph"):
        torch.autograd.grad(o.sum(), q, create_graph=True)


def test_bad_input():
    q, k, v = (torch.randn(1, 3, 2, 4) for _ in range(3))
    attend = torch.ops.zeco.gated_linear_attention
    with pytest.raises(InvalidSchedule, match="'quick'"):
        attend(q, k, v, None, 1.0, None, False, "quick", 0, "")
    with pytest.raises(InvalidShapes):
        attend(q, k[:, :2], v, None, 1.0, None, False, "auto", 0, "")
    with pytest.raises(InvalidShapes, match="one value per head"):
        attend(q, k, v, torch.zeros(3), 1.0, None, False, "auto", 0, "")
    with pytest.raises(InvalidShapes, match="initial_state"):
        attend(q, k, v, None, 1.0, torch.zeros(1, 2, 4, 3), False, "auto", 0, "")
    with pytest.raises(GroupNotFound, match="'gone'"):
        attend(q, k, v, None, 1.0, None, False, "auto", 0, "gone")


def test_nan_in_gives_nan_out():
    q, k, v = (torch.randn(1, 3, 1, 2) for _ in range(3))
    k[0, 1] = float("nan")
    o, _ = torch.ops.zeco.gated_linear_attention(q, k, v, None, 1.0, None, False, "auto", 0, "")
    assert o[0, 0].isfinite().all()
    assert o[0, 1:].isnan().all()


def test_one_node_for_dynamo_and_separate_ops_for_aot():
    from torch._dynamo.backends.common import aot_autograd

    seen: dict[str, list[str]] = {}

    def names(gm):
        return [str(n.target) for n in gm.graph.nodes if n.op == "call_function" and "zeco" in str(n.target)]

    def keep(key):
        def compiler(gm, inputs):
            seen[key] = [name.removeprefix("zeco.").removesuffix(".default") for name in names(gm)]
            return gm

        return compiler

    inner = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))

    def backend(gm, inputs):
        seen["dynamo"] = names(gm)
        return inner(gm, inputs)

    world_of_one = "" if not dist.is_initialized() else dist.group.WORLD.group_name  # type: ignore

    def layer(q, k, v, g, state):
        return torch.ops.zeco.gated_linear_attention(q, k, v, g, 1.0, state, True, "auto", 0, world_of_one)

    torch.compiler.reset()
    inputs = [torch.randn(1, 5, 2, 3, requires_grad=True) for _ in range(4)]
    state = torch.randn(1, 2, 3, 3, requires_grad=True)
    o, final = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)(*inputs, state)
    (o.sum() + final.sum()).backward()
    assert seen["dynamo"] == ["zeco.gated_linear_attention"]
    assert seen["forward"] == ["rank_state", "diagonal", "combine", "final_state"]
    assert sorted(seen["backward"]) == [
        "combine_backward",
        "diagonal_backward",
        "final_state_backward",
        "initial_state_backward",
        "rank_dstate",
    ]


# ----- torch.library.opcheck, for every op


def _op_samples(group: str, dtype: torch.dtype) -> list[tuple[str, tuple]]:
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    states = torch.float64 if dtype == torch.float64 else torch.float32
    samples: list[tuple[str, tuple]] = []
    for gate in (None, -normal(2, 5, 3).abs(), -normal(2, 5, 3, 4).abs()):
        # q and v strided, as projections are
        q, k = normal(2, 3, 5, 4).transpose(1, 2), normal(2, 5, 3, 4)
        v, do = normal(2, 5, 2, 3, 6).select(2, 1), normal(2, 5, 3, 6)
        state, log_decay = zeco().rank_state(k, v, gate)
        part = zeco().diagonal_backward(q, k, v, gate, do, 0.5)
        samples += [
            ("rank_state", (k, v, gate)),
            ("diagonal", (q, k, v, gate, 0.5)),
            ("combine", (normal(2, 5, 3, 6).to(states), q, gate, state, 0.5)),
            ("rank_dstate", (q, gate, do, 0.5)),
            ("diagonal_backward", (q, k, v, gate, do, 0.5)),
            ("combine_backward", (*part, q, k, v, gate, do, 0.5, state, state.clone())),
            ("combine_backward", (*part, q, k, v, gate, do, 0.5, None, None)),
            ("scan_start", (state, log_decay, None, False, "all_scan", 2, group)),
            ("scan_start", (state, log_decay, state.clone(), True, "lasp2", 0, group)),
            ("final_state", (state.clone(), state, log_decay, group)),
            ("final_state_backward", (state, group)),
            ("initial_state_backward", (state.clone(), state, log_decay, group)),
        ]
        leaves = [x.detach().clone().requires_grad_() if x is not None else None for x in (q, k, v, gate)]
        initial = state.detach().clone().requires_grad_()
        samples.append(("gated_linear_attention", (*leaves, 0.5, initial, True, "all_scan", 2, group)))
        samples.append(("gated_linear_attention", (*leaves, 0.5, None, False, "all_scan_tree", 0, group)))
    return samples


def _opcheck(rank: int, dtype: torch.dtype) -> int:
    world = dist.group.WORLD
    group = "" if not dist.is_initialized() else world.group_name  # type: ignore[union-attr]
    samples = _op_samples(group, dtype)
    for name, args in samples:
        torch.library.opcheck(getattr(zeco(), name).default, args)
    return len(samples)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_opcheck_alone(dtype):
    assert _opcheck(0, dtype) == 42


def test_opcheck_on_ranks(ranks):
    assert ranks(2).run(_opcheck, torch.float64) == [42, 42]


def _start_and_wait(state: torch.Tensor, log_decay: torch.Tensor) -> torch.Tensor:
    token = zeco().scan_start(state, log_decay, state, False, "all_scan", 0, "")
    return zeco().scan_wait(token, state, log_decay, "")


def test_scan_wait_fake_and_meaning():
    """opcheck runs an op several times on the same inputs, and a wait may run only once: so checked apart."""
    state, log_decay = torch.randn(2, 3, 5, 4).transpose(2, 3), torch.zeros(2, 3, 4)
    eager = _start_and_wait(state, log_decay)
    assert torch.equal(eager, state)
    assert eager.is_contiguous()
    for how in ("aot_eager", "inductor"):
        compiled = torch.compile(_start_and_wait, backend=how, fullgraph=True, dynamic=True)
        out = compiled(state, log_decay)
        assert torch.equal(out, eager)
        assert out.stride() == eager.stride()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = _start_and_wait(mode.from_tensor(state), mode.from_tensor(log_decay))
    assert fake.shape == eager.shape
    assert fake.stride() == eager.stride()
    assert fake.dtype == eager.dtype
    tags = torch.ops.zeco.scan_wait.default.tags
    assert torch.Tag.cudagraph_unsafe in tags
