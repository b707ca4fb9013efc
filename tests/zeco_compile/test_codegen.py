"""Code for forward and backward: numbers, the order as executed on real ranks, caches, buffers in flight.

The functions that run on ranks travel there by value and import what they need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zeco_compile.codegen import generate
from zeco_compile.settings import Settings
from zeco_compile.testing.pool import Pool, raise_failures, run_on_ranks

FORWARD = ["rank_state", "scan_start", "diagonal", "scan_wait", "combine"]
BACKWARD = ["rank_dstate", "scan_start reverse", "diagonal_backward", "scan_wait", "combine_backward"]
CODEGENS = ["aot_eager", "inductor"]


def _two_layers_on_a_rank(case: dict[str, Any]) -> dict[str, Any]:
    """Two layers (or as many as the case has) with an output gate, in eager and compiled; `case` says what to vary."""
    import contextlib
    import os

    import torch
    import torch.distributed as dist

    from zeco_compile import codegen  # the ops come with it
    from zeco_compile.lowering import op_log
    from zeco_compile.settings import Settings

    zeco = torch.ops.zeco
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    settings = Settings(
        codegen=case["codegen"],
        overlap=case.get("overlap", True),
        group=group,
        world_size=dist.get_world_size(),
        rank=rank,
    )

    def model(x, w):
        for layer in range(case.get("layers", 2)):
            if case.get("checkpoint"):
                x = torch.utils.checkpoint.checkpoint(one_layer, x, w[layer], use_reentrant=False)
            else:
                x = one_layer(x, w[layer])
        return x

    def one_layer(x, w):
        q, k, v, g, gate = (x @ w[part] for part in range(5))
        if case.get("halo"):
            q, k, v = (
                zeco.halo(each.flatten(2), 1, 2, 0, 0.0, group)[:, 2:].view(each.shape).sin()
                for each in (q, k, v)
            )
        o, _ = zeco.gated_linear_attention(
            q.sin(), k.sin(), v, -0.1 * g.sigmoid(), 0.5, None, False, "all_scan", 2, group
        )
        return x + (o * gate.sigmoid()).sin() @ w[5]

    def draw(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def step(function, length):
        x = draw(1, length, 2, 4, seed=length + rank)
        w = (0.5 * draw(2, 6, 4, 4, seed=1)).requires_grad_(case.get("train", True))
        if case.get("dynamic"):
            torch._dynamo.mark_dynamic(x, 1)
        with op_log.recording() as log, contextlib.ExitStack() as stack:
            if not case.get("train", True):
                stack.enter_context(torch.no_grad())
            out = function(x, w)
            forward = [name for name in log if not name.endswith("done")]
            grads = torch.autograd.grad(out.square().sum(), [w]) if case.get("train", True) else ()
        ran = [name for name in log if not name.endswith("done")]
        return (out.detach(), *grads), forward, ran[len(forward) :]

    compiles = []

    def backend(gm, example_inputs):
        compiles.append([str(node.target) for node in gm.graph.nodes])
        return codegen.generate(gm, example_inputs, settings)

    kept = {name: os.environ.get(name) for name in case.get("environment", {})}
    os.environ.update(case.get("environment", {}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        result: dict[str, Any] = {"differences": [], "values": []}
        for length in case.get("lengths", [9]):
            expected, _, _ = step(model, length)
            got, result["forward"], result["backward"] = step(compiled, length)
            result["values"].append(got)
            result["differences"] += [
                float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True)
            ]
        counters = torch._dynamo.utils.counters
        result["compiles"] = compiles
        result["source"] = codegen._source_hash()
        result["post_pass"] = torch._inductor.config.post_grad_custom_post_pass
        result["hits"] = {
            "graph": counters["inductor"]["fxgraph_cache_hit"],
            "autograd": counters["aot_autograd"]["autograd_cache_hit"],
            "bypass": counters["inductor"]["fxgraph_cache_bypass"]
            + counters["aot_autograd"]["autograd_cache_bypass"],
        }
    finally:
        torch._dynamo.reset()
        for name, value in kept.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return result


def _run(**case: Any) -> list[dict[str, Any]]:
    return run_on_ranks(_two_layers_on_a_rank, case, world_size=2, timeout=300)


# ----- what runs, and in which order


def test_training_runs_in_order_and_equals_eager():
    for result in _run(codegen="aot_eager"):
        assert max(result["differences"]) < 1e-12
        assert result["forward"] == FORWARD * 2
        assert result["backward"] == BACKWARD * 2
        assert result["post_pass"] is None


@pytest.mark.parametrize("codegen", CODEGENS)
def test_training_with_halos_and_a_symbolic_length_compiles_once(codegen):
    for result in _run(codegen=codegen, halo=True, dynamic=True, lengths=[9, 14]):
        assert max(result["differences"]) < 1e-12
        assert len(result["compiles"]) == 1
        assert result["forward"] == [*["halo"] * 3, *FORWARD] * 2
        assert result["backward"] == [*BACKWARD, *["halo_backward"] * 3] * 2


@pytest.mark.parametrize("codegen", CODEGENS)
def test_inference_runs_in_order_and_every_halo_before_the_start(codegen):
    for result in _run(codegen=codegen, halo=True, train=False, dynamic=True, lengths=[9, 14]):
        assert max(result["differences"]) < 1e-12
        assert [name for name in result["forward"] if name != "halo"] == FORWARD * 2
        assert result["forward"].count("halo") == 6
        for layer in (result["forward"][:8], result["forward"][8:]):
            assert "halo" not in layer[layer.index("scan_start") :]


@pytest.mark.parametrize("codegen", CODEGENS)
def test_recomputed_activations_scan_again_layer_by_layer(codegen):
    for result in _run(codegen=codegen, checkpoint=True):
        assert max(result["differences"]) < 1e-12
        assert result["forward"] == FORWARD * 2
        ran = [name for name in result["backward"] if name.startswith("scan_start")]
        assert ran == ["scan_start", "scan_start reverse"] * 2
        flying = 0
        for name in result["backward"]:
            flying += name.startswith("scan_start") - (name == "scan_wait")
            assert 0 <= flying <= 2
        backward = [name for name in result["backward"] if name in BACKWARD[2:] and name != "scan_wait"]
        assert backward == ["diagonal_backward", "combine_backward"] * 2


@pytest.mark.parametrize("codegen", CODEGENS)
def test_without_overlap_the_numbers_are_the_same(codegen):
    for result in _run(codegen=codegen, halo=True, overlap=False, layers=1):
        assert max(result["differences"]) < 1e-12
        assert result["forward"].count("scan_start") == 1


# ----- one rank, in this process


def _affine(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sin() + torch.nn.functional.softplus(x)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_a_graph_without_our_ops_and_an_input_that_changes(codegen):
    settings = Settings(codegen=codegen)
    torch._dynamo.reset()

    def function(x, seen):
        seen.add_(1)
        return _affine(x, x.mT @ x)

    compiled = torch.compile(function, backend=lambda gm, inputs: generate(gm, inputs, settings))
    for train in (False, True):
        x = torch.randn(5, 3, dtype=torch.float64, requires_grad=train)
        seen, expected_seen = torch.zeros(2), torch.zeros(2)
        got, expected = compiled(x, seen), function(x, expected_seen)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(seen, expected_seen)
        if train:
            (got_grad,) = torch.autograd.grad(got.sum(), x)
            (grad,) = torch.autograd.grad(expected.sum(), x)
            torch.testing.assert_close(got_grad, grad, rtol=1e-12, atol=1e-12)
    torch._dynamo.reset()


def test_dropout_draws_the_numbers_of_eager_without_code_generation():
    settings = Settings(codegen="aot_eager")
    torch._dynamo.reset()
    dropout = torch.nn.Dropout(0.5)

    def function(x):
        return dropout(x) + dropout(x.cos())

    compiled = torch.compile(function, backend=lambda gm, inputs: generate(gm, inputs, settings))
    x = torch.randn(50)
    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), expected)
    torch._dynamo.reset()


def test_a_pass_that_the_user_configured_runs_too():
    seen = []

    def users_pass(graph):
        seen.append([str(node.target) for node in graph.nodes])

    torch._dynamo.reset()
    with torch._inductor.config.patch(post_grad_custom_post_pass=users_pass):
        compiled = torch.compile(_affine, backend=lambda gm, inputs: generate(gm, inputs, Settings()))
        x, w = torch.randn(4, 3), torch.randn(3, 3)
        torch.testing.assert_close(compiled(x, w), _affine(x, w))
        assert torch._inductor.config.post_grad_custom_post_pass is users_pass
    assert len(seen) == 1
    torch._dynamo.reset()


# ----- caches


@pytest.fixture
def new_processes() -> Iterator[Pool]:
    pool = Pool(2, group_timeout=60.0)
    yield pool
    pool.close()


def test_other_processes_find_everything_in_the_caches(new_processes, tmp_path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": os.fspath(tmp_path)}
    case = {"codegen": "inductor", "layers": 1, "environment": environment}
    cold_results = _run(**case)
    outcomes = new_processes.run(_two_layers_on_a_rank, (case,), 300.0)
    raise_failures(outcomes)
    for cold, warm in zip(cold_results, (outcome.value for outcome in outcomes), strict=True):
        assert cold["source"] == warm["source"], "the package was edited while this test ran: run it again"
        assert cold["hits"] == {"graph": 0, "autograd": 0, "bypass": 0}
        assert warm["hits"] == {"graph": 2, "autograd": 1, "bypass": 0}
        for result in (cold, warm):
            assert max(result["differences"]) < 1e-12
            assert result["forward"] == FORWARD
            assert result["backward"] == BACKWARD
            assert result["post_pass"] is None
        for got, expected in zip(warm["values"][0], cold["values"][0], strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


# ----- buffers in flight


def _slow_scan_on_a_rank(codegen_name: str) -> dict[str, Any]:
    """Scans that take their time, between which values of the states' size are made; notes whether what a
    scan was given changed while it was in flight."""
    import time

    import torch
    import torch.distributed as dist

    from zeco_compile import codegen
    from zeco_compile.lowering import op_log
    from zeco_compile.lowering.communicator import Communicator
    from zeco_compile.settings import Settings

    zeco = torch.ops.zeco
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    settings = Settings(codegen=codegen_name, group=group, world_size=2, rank=rank)

    def function(q, k, v, other):
        state, log_decay = zeco.rank_state(k, v, None)
        state = state * 2 + 1
        flying = zeco.scan_start(state, log_decay, None, False, "all_scan", 1, group)
        o = zeco.diagonal(q, k, v, None, 1.0)
        # as large as a state, and made before the wait: the second start needs it and stands before the wait
        second = (other + o.sum()).cos()
        third = (second * o.mean()).sin() + 1
        flying_too = zeco.scan_start(third, log_decay, None, False, "all_scan", 1, group)
        out = zeco.combine(o, q, None, zeco.scan_wait(flying, state, log_decay, group), 1.0)
        return out, zeco.scan_wait(flying_too, third, log_decay, group) + out.sum()

    draw = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(1, 5, 3, 4, dtype=torch.float64, generator=draw) for _ in range(3))
    other = torch.randn(1, 3, 4, 4, dtype=torch.float64, generator=draw)
    expected = function(q, k, v, other)

    intact = []
    submit = Communicator.submit

    def slow_submit(self, label, work, *, reads, **options):
        given = [each.clone() for each in reads]

        def slow(link):
            time.sleep(0.3)
            same = all(torch.equal(a, b) for a, b in zip(given, reads, strict=True))
            result = work(link)
            intact.append(same and all(torch.equal(a, b) for a, b in zip(given, reads, strict=True)))
            return result

        return submit(self, label, slow, reads=reads, **options)

    torch._dynamo.reset()
    compiled = torch.compile(
        function, backend=lambda gm, inputs: codegen.generate(gm, inputs, settings), fullgraph=True
    )
    Communicator.submit = slow_submit
    try:
        with op_log.recording() as log:
            got = compiled(q, k, v, other)
    finally:
        Communicator.submit = submit
        torch._dynamo.reset()
    return {
        "intact": intact,
        "ran": [name for name in log if not name.endswith("done")],
        "differences": [float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)],
    }


@pytest.mark.parametrize("codegen", CODEGENS)
def test_what_a_scan_was_given_stays_until_its_wait(codegen):
    for result in run_on_ranks(_slow_scan_on_a_rank, codegen, world_size=2, timeout=300):
        assert result["ran"] == [
            *("rank_state", "scan_start", "diagonal", "scan_start", "scan_wait", "combine", "scan_wait")
        ]
        assert result["intact"] == [True, True]
        assert max(result["differences"]) < 1e-12
