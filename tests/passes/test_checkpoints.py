"""Activation checkpointing inside of a model: the layers are recognised, and are computed again in the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.g = (nn.Linear(8, 8) for _ in range(4))
        self.conv = nn.Conv1d(8, 8, 3, groups=8, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        q, k, v = (f(y).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        g = F.logsigmoid(self.g(y)).unflatten(-1, (2, 4)).transpose(1, 2).cumsum(2)
        scores = ((q * g.exp()) @ (k * (-g).exp()).transpose(-1, -2)).tril()
        return x + (scores @ v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, run: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x.pow(2).mean()


def _plain(layer: Layer, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def _nested(layer: Layer, x: Tensor) -> Tensor:
    return checkpoint(
        lambda y, layer=layer: checkpoint(layer, y, use_reentrant=False).sin(), x, use_reentrant=False
    )


def _two_results(layer: Layer, x: Tensor) -> Tensor:
    y, gate = checkpoint(lambda z, layer=layer: (layer(z), layer.q(z)), x, use_reentrant=False)
    return y * gate.sigmoid()


def _policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    kept = op is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeping_products(layer: Layer, x: Tensor) -> Tensor:
    """The products of the attention are kept, and the projections are computed again."""
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("run", [_plain, _nested, _two_results, _keeping_products])
def test_checkpointed_layers_are_recognised(run):
    found = assert_equivalent(lambda: Model(run), lambda: torch.randn(2, 10, 8), world_size=2)
    assert [region["family"] for region in found.regions] == ["per channel"] * 2


def _scans(rank: int, run: Callable[[Layer, Tensor], Tensor]) -> tuple[list[str], list[str]]:
    from zeco_compile.lowering import op_log

    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(
        Model(run).double(), backend="zeco", fullgraph=True, options={"codegen": "aot_eager"}
    )
    with op_log.recording() as log:
        loss = compiled(torch.randn(2, 5, 8, dtype=torch.float64))
        forward = len(log)
        loss.backward()
    scans = [
        [name for name in part if name.startswith("scan_start")] for part in (log[:forward], log[forward:])
    ]
    return scans[0], sorted(scans[1])


def test_a_checkpointed_layer_scans_again_in_the_backward(ranks):
    for forward, backward in ranks(2).run(_scans, _plain):
        assert forward == ["scan_start"] * 2
        assert backward == ["scan_start"] * 2 + ["scan_start reverse"] * 2
    for forward, backward in ranks(2).run(_scans, lambda layer, x: layer(x)):
        assert forward == ["scan_start"] * 2
        assert backward == ["scan_start reverse"] * 2


def _keeping_projections(layer: Layer, x: Tensor) -> Tensor:
    projections = [torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, projections)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def test_what_the_policy_keeps_is_not_computed_again(ranks):
    """A region is what it stands for: with the products of the attention, the scan is kept."""
    for forward, backward in ranks(2).run(_scans, _keeping_products):
        assert forward == ["scan_start"] * 2
        assert backward == ["scan_start reverse"] * 2
    for forward, backward in ranks(2).run(_scans, _keeping_projections):
        assert forward == ["scan_start"] * 2
        assert backward == ["scan_start"] * 2 + ["scan_start reverse"] * 2


class _Contexts(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _own_contexts() -> object:
    return _Contexts(), _Contexts()


def _in_own_contexts(layer: Layer, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False, context_fn=_own_contexts)


def test_contexts_of_another_kind_are_refused_by_name():
    assert_refused(
        lambda: Model(_in_own_contexts),
        lambda: torch.randn(2, 10, 8),
        world_size=2,
        error=UnsupportedOp,
        match="tag_activation_checkpoint",
    )
