"""The ops of the Triton kernels, on the CPU through Triton's interpreter: their gradients, fakes and order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zeco_compile.kernels.recurrence import recurrent_gated_linear_attention
from zeco_compile.lowering import attention, op_log

pytest.importorskip("triton")

FORWARD = ["rank_state", "scan_start", "diagonal", "scan_wait", "combine"]
BACKWARD = ["rank_dstate", "scan_start reverse", "diagonal_backward", "scan_wait", "combine_backward"]


def always(*inputs: object) -> bool:
    return True


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "is_fused", always)
    torch._dynamo.reset()


def draw(kind, length, initial, seed=0, value=5):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(1, length, 2, 6), normal(1, length, 2, 6), normal(1, length, 2, value)
    shape = {"channel": (1, length, 2, 6), "head": (1, length, 2)}.get(kind)
    g = None if shape is None else -torch.rand(*shape, generator=generator, dtype=torch.float64)
    state = normal(1, 2, 6, value) if initial else None
    return q, k, v, g, state, normal(1, length, 2, value), normal(1, 2, 6, value)


def leaves_of(inputs, dtype):
    return [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in inputs]


def gradients(o, final, do, dfinal, leaves):
    objective = (o * do.to(o.dtype)).sum()
    if final is not None:
        objective = objective + (final * dfinal.to(final.dtype)).sum()
    return torch.autograd.grad(objective, [x for x in leaves if x is not None])


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("kind", ["channel", "head", "none"])
@pytest.mark.parametrize("compiled", [False, True])
def test_one_rank(on_the_cpu, kind, initial, final, compiled):
    check_one_rank(draw(kind, 70, initial), final, compiled)


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("kind", ["channel", "head"])
def test_one_value_channel(on_the_cpu, kind, state):
    """Which runs as two; o, the final state and their gradients have one."""
    check_one_rank(draw(kind, 70, state, value=1), state, compiled=state)


def check_one_rank(drawn, final, compiled):
    *inputs, do, dfinal = drawn
    exact = leaves_of(inputs, torch.float64)
    *qkvg, state = exact
    o, after = recurrent_gated_linear_attention(
        *qkvg, scale=0.3, initial_state=state, output_final_state=True
    )
    wanted = [o, *gradients(o, after if final else None, do, dfinal, exact)]

    def op(q, k, v, g, state):
        return torch.ops.zeco.gated_linear_attention(q, k, v, g, 0.3, state, final, "auto", 0, "")

    leaves = leaves_of(inputs, torch.float32)
    run = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else op
    o, after = run(*leaves)
    got = [o, *gradients(o, after if final else None, do, dfinal, leaves)]
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() < 1e-5 * y.abs().max()


@pytest.mark.parametrize("kind", ["channel", "head"])
def test_fakes(on_the_cpu, kind):
    """Shapes, dtypes and strides as the fakes say, and nothing written that is not declared."""
    q, k, v, g, _, do, _ = (None if x is None else x.float() for x in draw(kind, 70, False))
    ops = torch.ops.zeco
    tests = ("test_schema", "test_faketensor")
    _, _, kept = ops.prepare(q, k, v, g, 0.3, True)
    pairs = ops.chunk_pairs(q, k, v, g, 0.3, kept, True)
    _, saved = ops.read_out(pairs, kept, q, k, v, g, None, 0.3, True, True)
    _, dkept = ops.prepare_backward(q, k, v, g, do, 0.3, kept, True)
    dpairs = ops.chunk_pairs_backward(q, k, v, g, do, True)
    backward = (pairs, dpairs, kept, saved, dkept, q, k, v, g, do, 0.3, None, True)
    for op, args in (
        (ops.prepare, (q, k, v, g, 0.3, True)),
        (ops.prepare, (q, k, v, g, 0.3, False)),
        (ops.chunk_pairs, (q, k, v, g, 0.3, kept, True)),
        (ops.chunk_pairs, (q, k, v, g, 0.3, kept, False)),
        (ops.read_out, (pairs, kept, q, k, v, g, None, 0.3, True, False)),
        (ops.prepare_backward, (q, k, v, g, do, 0.3, kept, True)),
        (ops.prepare_backward, (q, k, v, g, do, 0.3, kept, False)),
        (ops.chunk_pairs_backward, (q, k, v, g, do, True)),
        (ops.read_out_backward, backward),
    ):
        torch.library.opcheck(op.default, args, test_utils=tests)


def _on_ranks(rank, kind, inputs):
    from zeco_compile.lowering import attention as ops

    before, ops.is_fused = ops.is_fused, always
    try:
        return _own_part(rank, inputs)
    finally:
        ops.is_fused = before  # these processes go on with other tests


def _own_part(rank, inputs):
    import torch as imported

    q, k, v, g, state, do, dfinal = inputs
    size = dist.get_world_size()

    def mine(x):
        return x.chunk(size, 1)[rank].float().requires_grad_()

    leaves = [mine(q), mine(k), mine(v), mine(g), state.float().requires_grad_()]
    group = dist.group.WORLD.group_name
    with op_log.recording() as forward:
        o, final = imported.ops.zeco.gated_linear_attention(
            *leaves[:4], 0.3, leaves[4], True, "auto", 0, group
        )
    # every rank sees the final state: each takes its share of the gradient
    objective = (o * do.chunk(size, 1)[rank].float()).sum() + (final * dfinal.float()).sum() / size
    with op_log.recording() as backward:
        objective.backward()
    logs = [[name for name in log if "done" not in name] for log in (forward, backward)]
    return o.detach(), [x.grad for x in leaves], logs


@pytest.mark.parametrize("kind", ["channel", "head"])
def test_two_ranks(ranks, kind):
    *inputs, do, dfinal = draw(kind, 140, True)
    exact = leaves_of(inputs, torch.float64)
    *qkvg, state = exact
    o, after = recurrent_gated_linear_attention(
        *qkvg, scale=0.3, initial_state=state, output_final_state=True
    )
    wanted = gradients(o, after, do, dfinal, exact)
    results = ranks(2).run(_on_ranks, kind, (*inputs, do, dfinal))
    for rank, (got, grads, (forward, backward)) in enumerate(results):
        assert forward == [*FORWARD, "final_state"]
        assert backward == ["final_state_backward", *BACKWARD, "initial_state_backward"]
        mine = [o, *wanted[:4]]
        for x, y in zip([got, *grads[:4]], mine, strict=True):
            part = y.chunk(2, 1)[rank]
            assert (x - part).abs().max() < 1e-5 * y.abs().max()
    dstate = results[0][1][4]
    assert (dstate - wanted[4]).abs().max() < 1e-5 * wanted[4].abs().max()
    assert not results[1][1][4].any()
