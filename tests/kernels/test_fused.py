"""The Triton kernels, against autograd through the float64 recurrence: in the interpreter, or on a GPU where one is.

Memory that a kernel should have written and did not is NaN here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = ("zero", "zeros", "slow", "half", "five", "twenty", "mixed", "reset", "infinite", "gone", "positive")


@pytest.fixture(scope="module")
def fused() -> ModuleType:
    return importlib.import_module("zeco_compile.kernels.fused")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


def run(fused, p, everywhere):
    """[o, final state] and [dq, dk, dv, dg, dstate_in] of the kernels."""
    state, log_decay, kept = fused.prepare(p.q, p.k, p.v, p.g, p.scale, True)
    pairs = fused.chunk_pairs(p.q, p.k, p.v, p.g, p.scale, kept, everywhere)
    o, saved = fused.read_out(pairs, kept, p.q, p.k, p.v, p.g, p.state, p.scale, everywhere, True)
    alone, nothing = fused.read_out(pairs, kept, p.q, p.k, p.v, p.g, p.state, p.scale, everywhere, False)
    assert torch.allclose(o, alone, rtol=0, atol=0, equal_nan=True)
    assert nothing.numel() == 0
    dstate, dkept = fused.prepare_backward(p.q, p.k, p.v, p.g, p.do, p.scale, kept, True)
    dpairs = fused.chunk_pairs_backward(p.q, p.k, p.v, p.g, p.do, everywhere)
    gradients = fused.read_out_backward(
        pairs, dpairs, kept, saved, dkept, p.q, p.k, p.v, p.g, p.do, p.scale, p.dstate, everywhere
    )
    decay = log_decay.exp().unsqueeze(-1)
    final = state if p.state is None else decay * p.state + state
    return [o, final], [*gradients, dstate if p.dstate is None else decay * p.dstate + dstate]


def worst(fused, p, error, everywhere=False):
    outputs, gradients = run(fused, p, everywhere)
    names = ("o", "final", "dq", "dk", "dv", "dg", "dstate_in")
    truth = [x for part in p.truth() for x in part]
    pairs = zip(names, [*outputs, *gradients], truth, strict=True)
    return {name: error(x, y) for name, x, y in pairs if x is not None and y is not None}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", ["head", "channel"])
def test_every_gate(fused, make_problem, error, kind, gate):
    # a chunk, a chunk and a tail of two tokens; two segments; sizes that are no powers of two
    p = make_problem(1, 130, 2, 24, 20, kind, gate, dtype=torch.float32, device=DEVICE)
    errors = worst(fused, p, error, everywhere=gate in ("slow", "mixed"))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("base", "gate"), [*enumerate((-60.0, -35.0, -13.0, -5.5, -2.6, -1.3, -0.655))])
def test_blocks_are_as_long_as_the_gates_allow(fused, make_problem, error, base, gate):
    """Each length; a slow channel beside them, and resets between blocks, which are no matter."""
    p = make_problem(1, 130, 2, 40, 20, "channel", "slow", dtype=torch.float32, device=DEVICE)
    p.g[..., 32:] = gate
    p.g[..., 35] = -0.1
    p.g[:, 64, :, 37] = -1e4
    strong = fused.prepare(p.q, p.k, p.v, p.g, p.scale, True)[2][3]
    assert strong[:, :2].unique(dim=2).tolist() == [[[0, base + 1]] * 2] * 2  # two tiles of key channels
    for everywhere in (False, True):
        errors = worst(fused, p, error, everywhere)
        assert max(errors.values()) < 1e-5, errors


def test_gates_of_all_strengths_in_one_chunk(fused, make_problem, error):
    p = make_problem(1, 130, 2, 8, 20, "channel", "slow", dtype=torch.float32, device=DEVICE)
    p.g[..., 1:7] = p.g.new_tensor([-0.1, -0.655, -1.3, -5.5, -30.0, -90.0])
    p.g[:, ::7, :, 7] = -1e4
    errors = worst(fused, p, error)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [
        ((1, 1, 1, 1, 1), "channel"),
        ((1, 1, 1, 1, 1), "head"),
        ((2, 17, 3, 3, 5), "channel"),
        ((1, 70, 1, 48, 80), "channel"),
        ((1, 70, 1, 48, 80), "none"),
        ((1, 66, 1, 130, 40), "channel"),
        ((1, 66, 1, 130, 40), "head"),
        ((1, 20, 1, 16, 300), "channel"),
    ],
)
def test_sizes(fused, make_problem, error, sizes, kind):
    for gate, state in (("mixed", True), ("slow", False)):
        p = make_problem(*sizes, kind, gate, dtype=torch.float32, state=state, dstate=state, device=DEVICE)
        errors = worst(fused, p, error)
        assert max(errors.values()) < 1e-5, (gate, errors)


@pytest.mark.parametrize("kind", ["head", "channel"])
def test_strides(fused, make_problem, error, kind):
    """Heads before tokens, channels apart, an expanded gradient: read as they are."""
    p = make_problem(2, 66, 2, 8, 6, kind, "half", dtype=torch.float32, device=DEVICE)
    expected = run(fused, p, False)
    p.q = p.q.transpose(1, 2).contiguous().transpose(1, 2)
    p.k = p.k.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    p.v = torch.stack([p.v, torch.full_like(p.v, torch.nan)], -1)[..., 0]
    p.g = p.g.transpose(0, 1).contiguous().transpose(0, 1)
    for part, wanted in zip(run(fused, p, False), expected, strict=True):
        for x, y in zip(part, wanted, strict=True):
            assert torch.equal(x, y)
    p.do = p.do[:, :1, :, :1].expand_as(p.do)
    assert max(worst(fused, p, error).values()) < 1e-5


def test_nan_stays_nan(fused, make_problem):
    for kind in ("head", "channel"):
        p = make_problem(1, 70, 1, 4, 4, kind, dtype=torch.float32, device=DEVICE)
        p.g[0, 30] = torch.nan
        (o, final), _ = run(fused, p, False)
        assert o[0, 30:].isnan().all()
        assert final.isnan().all()


def test_the_kernels_take_what_they_can(monkeypatch):
    from zeco_compile.kernels import devices

    x = torch.ones(1, 2, 1, 4)
    assert not devices.is_fused(x, x, x, None)
    with torch._subclasses.FakeTensorMode():
        on_cuda = torch.empty(1, 2, 1, 4, device="cuda")
        monkeypatch.setattr(devices, "_has_matrix_units", lambda device: True)
        assert devices.is_fused(on_cuda, on_cuda, on_cuda, None)
        assert not devices.is_fused(on_cuda, on_cuda, on_cuda, on_cuda.double())
        wide = torch.empty(1, 2, 1, devices.MAX_KEY + 1, device="cuda")
        assert not devices.is_fused(wide, wide, on_cuda, None)
