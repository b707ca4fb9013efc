"""`nn.MultiheadAttention` and the layers of `nn.Transformer`, taken apart into what they compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zeco_compile
from zeco_compile.passes.errors import UnsupportedOp
from zeco_compile.testing import assert_equivalent, assert_refused

WIDTH = 8


class Attention(nn.Module):
    """`call(attention, x, seen)`; `seen` [T, T] is true where a key is not to be seen."""

    def __init__(self, call: Callable[..., Tensor], batch_first: bool = True) -> None:
        super().__init__()
        self.call, self.attention = call, nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.call(self.attention, x, later)


def _padding(x: Tensor) -> Tensor:
    """True where a token is padding; never the first."""
    return (x.detach()[..., 0] > 0.5) & (torch.arange(x.shape[1]) > 0)


CALLS: dict[str, Callable[..., Tensor]] = {
    "mask": lambda m, x, later: m(x, x, x, attn_mask=later, need_weights=False)[0],
    "mask as numbers, with weights": lambda m, x, later: m(
        x, x, x, attn_mask=torch.zeros_like(later, dtype=x.dtype).masked_fill(later, -torch.inf)
    )[0],
    "the hint alone": lambda m, x, later: m(x, x, x, attn_mask=later, is_causal=True, need_weights=False)[0],
    "hint, mask and padding": lambda m, x, later: m(
        x, x, x, attn_mask=later, key_padding_mask=_padding(x), is_causal=True, need_weights=False
    )[0],
    "padding, with weights": lambda m, x, later: m(x, x, x, key_padding_mask=_padding(x))[0],
    "keys of another": lambda m, x, later: m(x, x.sin(), x.cos(), attn_mask=later, need_weights=False)[0],
}


def _inputs() -> Tensor:
    return torch.randn(2, 9, WIDTH)


@pytest.mark.parametrize("name", CALLS)
def test_equal(name: str) -> None:
    call = CALLS[name]
    assert_equivalent(lambda: Attention(call), _inputs, world_size=3)


def test_equal_with_the_sequence_first() -> None:
    def call(attention: nn.Module, x: Tensor, later: Tensor) -> Tensor:
        rows = x.transpose(0, 1)
        return attention(rows, rows, rows, attn_mask=later, need_weights=False)[0].transpose(0, 1)

    assert_equivalent(lambda: Attention(call, batch_first=False), _inputs, world_size=3)


def test_weights_of_all_pairs_are_refused() -> None:
    assert_refused(
        lambda: Attention(lambda m, x, later: m(x, x, x)[1]), _inputs, world_size=3, error=UnsupportedOp
    )


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layers(x, memory, tgt_mask=mask)


def _with_memory(rows: int, whole: bool) -> tuple[Tensor, Tensor]:
    memory = torch.randn(2, rows, WIDTH, dtype=torch.float64)
    if whole:
        zeco_compile.mark_sequence(memory, None)
    return torch.randn(2, 9, WIDTH, dtype=torch.float64), memory


@pytest.mark.parametrize(
    ("rows", "whole"),
    [(9, False), (5, True), (3, True)],
    ids=["sliced", "whole", "whole, as long as a slice"],
)
def test_memory_of_a_decoder(rows: int, whole: bool) -> None:
    assert_equivalent(Decoder, lambda: _with_memory(rows, whole), world_size=3)


def test_places_among_keys_that_are_whole_are_refused() -> None:
    """`is_causal` counts the queries of the sequence from the first."""

    def model(x: Tensor, memory: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, memory, memory, is_causal=True)

    assert_refused(
        lambda: model,
        lambda: _with_memory(5, True),
        world_size=3,
        error=UnsupportedOp,
        match="along the sequence",
    )


class Encoder(nn.Module):
    """In eval and without gradients, where PyTorch has an op for a whole layer."""

    def __init__(self, fast: bool) -> None:
        super().__init__()
        torch.backends.mha.set_fastpath_enabled(fast)  # on every rank, and left so
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)
        self.eval()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.layers(x, mask=later, src_key_padding_mask=_padding(x))


def test_the_fast_path_is_refused_with_what_to_do() -> None:
    try:  # the one that is fast comes last: so the ranks' processes are as they were
        assert_equivalent(lambda: Encoder(False), _inputs, world_size=3, backward=False)
        messages = assert_refused(lambda: Encoder(True), _inputs, world_size=3, error=UnsupportedOp)
        assert all("set_fastpath_enabled(False)" in message for message in messages)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
