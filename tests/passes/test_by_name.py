"""The operator called by name gets its group where its time axis is the sequence, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeco_compile
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused


class Attention(nn.Module):
    """``gated_linear_attention`` of a projection [2, T, 4, 8], used in the way that `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        y = self.inner(x).unflatten(-1, (4, 8))
        g = -0.05 * y * y
        attend = zeco_compile.gated_linear_attention
        if self.kind == "states":
            assert state is not None
            initial = state.transpose(-1, -2)  # used by nothing else
            return attend(y.tan(), y, y.sin(), g, initial_state=initial, output_final_state=True)
        if self.kind == "constant gate":
            return attend(y, y, y, torch.tensor([-0.02, -0.1, -0.3, 0.0], dtype=y.dtype))
        if self.kind == "final state alone":
            return attend(y.tan(), y, y.sin(), g, output_final_state=True)[1]
        if self.kind == "unused":
            attend(y.tan(), y, y.sin(), g)
            return y.cos()
        if self.kind == "heads":
            z = y.flatten(0, 1).unsqueeze(2)  # every position attends over its own heads
            return attend(z, z, z).view_as(y)
        assert self.kind == "part"
        z = y[:, 1:]
        return attend(z, z, z).sum(1)


def whole(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """The first along the sequence, the others whole on every rank."""
    first, *others = (torch.randn(shape) for shape in shapes)
    for each in others:
        zeco_compile.mark_sequence(each, None)
    return first, *others


@pytest.mark.parametrize(
    ("kind", "inputs", "dims", "regions"),
    [
        ("states", ((2, 14, 32), (2, 4, 8, 8)), (1, None), ["per channel"]),
        ("constant gate", ((2, 14, 32),), (1,), ["constant per head"]),
        ("final state alone", ((2, 14, 32),), (None,), ["per channel"]),
        ("unused", ((2, 14, 32),), (1,), []),
        ("heads", ((2, 14, 32),), (1,), []),
    ],
)
def test_wired_where_time_is_the_sequence(
    kind: str, inputs: tuple[tuple[int, ...], ...], dims: tuple[int | None, ...], regions: list[str]
) -> None:
    found = assert_equivalent(lambda: Attention(kind), lambda: whole(*inputs), world_size=2, output_dims=dims)
    assert [(region["how"], region["family"]) for region in found.regions] == [
        ("by name", each) for each in regions
    ]


def test_part_of_the_sequence_is_refused() -> None:
    messages = assert_refused(
        lambda: Attention("part"),
        lambda: whole((2, 14, 32)),
        world_size=2,
        error=UnsupportedOp,
        match="all of it",
    )
    assert "attend(z, z, z).sum(1)" in messages[0]


def test_state_that_runs_along_the_sequence_is_refused() -> None:
    """Not marked, dimension 1 of [B, H, K, V] is taken for the sequence; here it even has its length."""

    class Heads(nn.Module):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            state = torch.cat([state, state], dim=1) if torch.compiler.is_compiling() else state
            return zeco_compile.gated_linear_attention(x, x, x, initial_state=state)

    assert_refused(
        Heads,
        lambda: (torch.randn(2, 4, 4, 3), torch.randn(2, 4, 3, 3)),
        world_size=2,
        error=UnsupportedOp,
        match=r"runs along the sequence|cannot be computed",
    )
