"""What follows of sizes from the guards of a trace."""

from __future__ import annotations

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod

from zeco_compile.passes import torch_private
from zeco_compile.passes.sizes import SizeFacts, at_hand, facts_of, same_size

s, t, b = (sympy.Symbol(name, positive=True, integer=True) for name in "stb")
PADDED = s + Mod(4 - Mod(s, 4), 4)


def test_a_padded_length_is_a_multiple_of_the_chunk():
    facts = SizeFacts([], {s: 6})
    chunks = facts.simplify(FloorDiv(PADDED, 4))
    assert same_size(4 * chunks, PADDED)
    assert facts.quotient(PADDED, chunks) == 4
    assert facts.quotient(s, 4) is None


def test_a_guard_says_that_there_is_no_padding():
    facts = SizeFacts([sympy.Eq(Mod(s, 4), 0)], {s: 8})
    assert facts.simplify(PADDED) == s
    assert facts.simplify(FloorDiv(s, 4)) == s / 4
    assert facts.quotient(s, s / 4) == 4
    assert facts.quotient(s, 8) is None


def test_what_holds_for_the_value_at_hand_only_is_not_concluded():
    facts = SizeFacts([], {s: 6, b: 6})
    assert facts.quotient(b, s) is None
    assert facts.simplify(FloorDiv(s, 3)) == FloorDiv(s, 3)
    assert facts.simplify(Mod(s, 2)) == Mod(s, 2)


def test_inputs_of_one_length_vary_together():
    facts = SizeFacts([sympy.Eq(s, t)], {s: 12, t: 12})
    assert not facts.is_bounded(s)
    assert facts.quotient(s, t) == 1


def test_a_loop_over_chunks_bounds_the_length():
    assert SizeFacts([sympy.Eq(FloorDiv(s, 3), 2)], {s: 6}).is_bounded(s)
    assert SizeFacts([sympy.Eq(FloorDiv(s, 256), 4), sympy.Eq(Mod(s, 256), 0)], {s: 1024}).is_bounded(s)
    assert not SizeFacts([sympy.Eq(Mod(s, 256), 0)], {s: 1024}).is_bounded(s)
    assert not SizeFacts([s > 5000], {s: 8192}).is_bounded(s)


def test_lengths_for_which_a_trace_holds():
    facts = SizeFacts([sympy.Eq(Mod(s, 12), 0)], {s: 24})
    assert next(facts.values_of(s, 7)) == 12
    assert next(facts.values_of(s, 300)) == 300
    assert facts.admits({s: 36})
    assert not facts.admits({s: 37})


def test_the_facts_of_a_trace():
    seen = []

    def backend(gm, example_inputs):
        mode, fakes = torch_private.fake_inputs(gm, example_inputs)
        tensor = next(f for f in fakes if isinstance(f, torch.Tensor))
        seen.append((facts_of(mode.shape_env), tensor.shape[1].node.expr))
        assert at_hand(tensor.numel()) == 48
        assert facts_of(mode.shape_env) is seen[0][0], "nothing new is known"
        return gm

    x = torch.randn(2, 8, 3)
    torch._dynamo.maybe_mark_dynamic(x, 1)
    torch._dynamo.reset()
    torch.compile(lambda x: x.view(2, x.shape[1] // 4, 4, 3) + 1, backend=backend)(x)
    facts, length = seen[0]
    assert facts.hints[length] == 8
    assert facts.admits({length: 12})
    assert not facts.admits({length: 10})
    assert facts.simplify(FloorDiv(length, 4)) == length / 4
