"""The attention matrix inside a chunk, for every kind of gate, and its gradients.

    A_ij = sum over channels of q_i k_j exp(sum of g_s over j < s <= i)      for i >= j, else 0

A decay is only ever made from gates that lie between j and i: every exponent is a direct sum of those gates,
not a difference of two running sums. So with log gates <= 0 no exponent is positive, a gate of -20 or -1e4
beside small ones costs no precision, a reset gives an exact 0, and no pair that the mask drops is ever
exponentiated.

For a gate per channel the pairs are split along a binary tree. Cut a block of 2h tokens in the middle: a
token i of its right half and a token j of its left half are apart by (the gates from the middle to i) plus
(the gates after j to the middle), so this quarter of the matrix is a product of q exp(..) and k exp(..), both
exponents <= 0. The two halves are blocks again, down to single tokens. The gradient of the gates runs back
down the same tree and sums the contributions of exactly those pairs that span a gate; the customary suffix
sum of q dq - k dk instead leaves the rounding error of all later pairs, which swamps dg where gates are
strong.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zeco_compile.kernels.chunks import decay_of, sum_from


class PairGradients(NamedTuple):
    """A [n, C, C] again, and the gradients of q, k [n, C, K] and g (None without one)."""

    pairs: Tensor
    dq: Tensor
    dk: Tensor
    dg: Tensor | None


def pairs(q: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """A [n, C, C], lower triangular, of q, k [n, C, K] and finite log gates g (None, [n, C, 1] or [n, C, K]).

    C is a power of two.
    """
    if g is None:
        return (q @ k.mT).tril_()
    if g.shape[2] == 1:
        return (q @ k.mT).mul_(_head_decay(g))
    out = _diagonal_only(q, k)
    for level in _levels(g):
        _quarter(out, level.half).copy_(_product(level.right(q) * level.since, level.left(k) * level.until))
    return out


def pairs_backward(dpairs: Tensor, q: Tensor, k: Tensor, g: Tensor | None) -> PairGradients:
    """A and the gradients of q, k, g from that of A; ``dpairs`` [n, C, C] is lower triangular."""
    if g is None:
        return PairGradients((q @ k.mT).tril_(), dpairs @ k, dpairs.mT @ q, None)
    if g.shape[2] == 1:
        return _head_backward(dpairs, q, k, g)
    return _channel_backward(dpairs, q, k, g)


def _head_decay(g: Tensor) -> Tensor:
    """exp(sum of g over j < s <= i) as [n, C, C], 0 above the diagonal, of g [n, C, 1]."""
    size = g.shape[1]
    exponents = g.expand(-1, size, size).tril(-1).cumsum(1)
    return decay_of(exponents).tril_()


def _head_backward(dpairs: Tensor, q: Tensor, k: Tensor, g: Tensor) -> PairGradients:
    decay = _head_decay(g)
    out = (q @ k.mT).mul_(decay)
    dproduct = dpairs * decay
    # A pair (i, j) spans the gates j < s <= i.
    spanned = sum_from(out * dpairs, 1).tril_(-1)
    return PairGradients(out, dproduct @ k, dproduct.mT @ q, spanned.sum(2, keepdim=True))


class _Level(NamedTuple):
    """Blocks of 2 * half tokens, and two decays [n, blocks, half, K]: ``since`` from the middle to each token
    of the right half, its own included; ``until`` from after each token of the left half to the middle."""

    half: int
    since: Tensor
    until: Tensor

    def left(self, x: Tensor) -> Tensor:
        return _halves(x, self.half)[:, :, 0]

    def right(self, x: Tensor) -> Tensor:
        return _halves(x, self.half)[:, :, 1]


def _halves(x: Tensor, half: int) -> Tensor:
    rows, size, channels = x.shape
    return x.view(rows, size // (2 * half), 2, half, channels)


def _levels(g: Tensor) -> list[_Level]:
    """The levels of the tree from single tokens upwards, for g [n, C, K]."""
    since = g.clone()  # per block: the sum from its first token to t, t included
    until = torch.zeros_like(g)  # per block: the sum of what comes after t
    levels = []
    half = 1
    while half < g.shape[1]:
        s, u = _halves(since, half), _halves(until, half)
        levels.append(_Level(half, decay_of(s[:, :, 1]), decay_of(u[:, :, 0])))
        u[:, :, 0] += s[:, :, 1, -1:]  # before the next line changes it: the right half's own total
        s[:, :, 1] += s[:, :, 0, -1:]
        half *= 2
    return levels


def _diagonal_only(q: Tensor, k: Tensor) -> Tensor:
    out = q.new_zeros((q.shape[0], q.shape[1], q.shape[1]))
    out.diagonal(dim1=1, dim2=2).copy_((q * k).sum(2))
    return out


def _quarter(matrix: Tensor, half: int) -> Tensor:
    """The view [n, blocks, half, half] of a [n, C, C] matrix: in each block, right half against left half."""
    rows, size, _ = matrix.shape
    blocks = matrix.view(rows, size // (2 * half), 2, half, size // (2 * half), 2, half)
    return blocks[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3).movedim(-1, 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right^T over the last two dimensions; single tokens without a matrix product apiece."""
    if left.shape[-2] == 1:
        return (left * right).sum(-1, keepdim=True)
    return left @ right.mT


def _channel_backward(dpairs: Tensor, q: Tensor, k: Tensor, g: Tensor) -> PairGradients:
    out = _diagonal_only(q, k)
    diagonal = dpairs.diagonal(dim1=1, dim2=2).unsqueeze(2)
    dq, dk = diagonal * k, diagonal * q
    # The gradients of `since` and `until` of _levels, walked back from the widest block to single tokens.
    dsince, duntil = torch.zeros_like(g), torch.zeros_like(g)
    for level in reversed(_levels(g)):
        s, u = _halves(dsince, level.half), _halves(duntil, level.half)
        left_total = s[:, :, 1].sum(2)
        right_total = u[:, :, 0].sum(2)
        s[:, :, 0, -1] += left_total
        s[:, :, 1, -1] += right_total
        q_right, k_left = level.right(q) * level.since, level.left(k) * level.until
        _quarter(out, level.half).copy_(_product(q_right, k_left))
        dquarter = _quarter(dpairs, level.half)
        dq_right, dk_left = dquarter @ k_left, dquarter.mT @ q_right
        s[:, :, 1].addcmul_(dq_right, q_right)
        u[:, :, 0].addcmul_(dk_left, k_left)
        level.right(dq).addcmul_(dq_right, level.since)
        level.left(dk).addcmul_(dk_left, level.until)
    return PairGradients(out, dq, dk, dsince)
