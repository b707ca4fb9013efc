"""Sizes: ints, or expressions of the symbols that a trace has for them, and what is known of those symbols.

A trace holds for the values of its symbols that satisfy its guards. What follows from that is not looked for by
algebra but tried: an expression is a whole number, or a constant, if it is one at all of a dozen values for which the
guards hold. So the rows of a sequence padded to whole chunks, `s + (4 - s % 4) % 4`, divide by four, and `s` itself
does where the trace took the way without padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from zeco_compile.passes import torch_private

Size = Any
"""An int or a sympy expression of the graph's symbols."""

_NEAR, _FAR = 8, 3
"""Values of a symbol that are tried: the first ones, and some large ones."""
_FEWEST = 4
"""With fewer values than this for which the guards hold nothing is concluded from them."""
_TRIES = 64


class SizeFacts:
    """What is known of the symbols of one trace: its guards, and the values at hand."""

    def __init__(self, guards: Sequence[Any] = (), hints: Mapping[Any, int] | None = None) -> None:
        self.guards = tuple(guards)
        self.hints = dict(hints or {})
        self._known: dict[Any, Size] = {}
        self._admitted: dict[frozenset[tuple[Any, int]], bool] = {}
        self._strictest = list(self.guards)

    def admits(self, values: Mapping[Any, int]) -> bool:
        """The guards hold for these values of symbols, and for the values at hand of all others."""
        key = frozenset(values.items())
        if key not in self._admitted:
            self._admitted[key] = self._holds(
                {s: sympy.Integer(v) for s, v in (self.hints | dict(values)).items()}
            )
        return self._admitted[key]

    def _holds(self, numbers: Mapping[Any, Any]) -> bool:
        for index, guard in enumerate(self._strictest):
            if guard.xreplace(numbers) == sympy.false:
                # the guard that has refused one value is likely to refuse the next
                self._strictest.insert(0, self._strictest.pop(index))
                return False
        return True

    def values_of(self, symbol: Any, start: int = 2) -> Iterator[int]:
        """Values from `start` on, of this symbol and of those that are as large now, for which the guards hold. Beyond
        the first ones only those are tried that leave the rest that the value at hand leaves, by every number that
        the guards divide by."""
        alike = [other for other, hint in self.hints.items() if hint == self.hints[symbol]]
        near = start + _TRIES
        first = near + (self.hints[symbol] - near) % self._step
        far = range(first, first + _TRIES * self._step, self._step)
        return (value for value in (*range(start, near), *far) if self.admits(dict.fromkeys(alike, value)))

    @cached_property
    def _step(self) -> int:
        divisors = {
            int(part.args[1])
            for guard in self.guards
            for part in guard.atoms(FloorDiv, Mod, PythonMod)
            if part.args[1].is_Integer and part.args[1] > 0
        }
        return reduce(sympy.lcm, sorted(divisors), 1)

    @cached_property
    def _others(self) -> dict[Any, list[int]]:
        """For each symbol, values other than the one at hand for which the guards hold: below, next and far above."""
        out = {}
        for symbol, hint in self.hints.items():
            starts = (
                (2, _NEAR),
                (hint + 1, _FAR),
                *((k * hint, 1) for k in (2, 3, 8, 64)),
                (1000 + hint, _FAR),
            )
            found = [
                v for start, count in starts for v in itertools.islice(self.values_of(symbol, start), count)
            ]
            out[symbol] = [value for value in dict.fromkeys(found) if value != hint]
        return out

    def is_bounded(self, symbol: Any) -> bool:
        """The guards leave few values, or none much above the one at hand: the code has counted something that depends
        on it, as a loop over chunks does."""
        others = self._others[symbol]
        return len(others) < _FEWEST or max(others) < 2 * self.hints[symbol]

    @cached_property
    def samples(self) -> list[dict[Any, Any]]:
        """Values of all symbols for which the guards hold. Those that are equal now vary together, for the inputs have
        one length; and each by itself, if it may."""
        out = [self.hints]
        for symbol, values in self._others.items():
            alike = [other for other, hint in self.hints.items() if hint == self.hints[symbol]]
            out += [self.hints | dict.fromkeys(alike, value) for value in values]
            if len(alike) > 1:
                alone = (self.hints | {symbol: value} for value in values[:_FEWEST])
                out += [each for each in alone if self.admits(each)]
        return [{s: sympy.Integer(v) for s, v in each.items()} for each in out]

    def _tried(self, expression: Any) -> list[Any]:
        """The expression's values; none where its symbols are not known, or take too few values."""
        symbols = expression.free_symbols
        if not symbols or not symbols <= set(self.hints):
            return []
        varied = [s for s in self.samples if any(s[symbol] != self.hints[symbol] for symbol in symbols)]
        if len(varied) < _FEWEST:
            return []
        return [expression.xreplace(sample) for sample in varied]

    def simplify(self, size: Size) -> Size:
        """The same size without divisions that leave no rest, and without what is a constant."""
        if isinstance(size, int):
            return size
        if size not in self._known:
            plain = size.replace(lambda e: isinstance(e, FloorDiv | Mod | PythonMod), self._plain)
            value = sympy.expand(plain)
            self._known[size] = int(value) if value.is_Integer else value
        return self._known[size]

    def _plain(self, part: Any) -> Any:
        values = self._tried(part)
        if values and all(value == values[0] for value in values):
            return values[0]
        if isinstance(part, FloorDiv):
            exact = self.quotient(*part.args)
            if exact is not None:
                return sympy.sympify(exact)
        return part

    def quotient(self, a: Size, b: Size) -> Size | None:
        """a / b if that is a whole number whatever the symbols are, else None."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b if b and a % b == 0 else None
        ratio = sympy.sympify(a) / sympy.sympify(b)
        if not ratio.has(sympy.Float):
            ratio = sympy.cancel(ratio)
        # of a size that is rounded, as that of `arange(0.5, T)`, sympy looks for common divisors of fractions for ever
        if ratio.is_Integer:
            return int(ratio)
        if ratio.is_Rational:
            return None
        numerator, denominator = ratio.as_numer_denom()
        polynomial = denominator == 1 and numerator.is_polynomial()
        if polynomial and all(c.is_Integer for c in sympy.Poly(ratio).coeffs()):
            return ratio
        values = self._tried(ratio)
        if not values or not all(value.is_Integer for value in values):
            return None
        return int(values[0]) if len(set(values)) == 1 else ratio


_facts: WeakKeyDictionary[Any, tuple[tuple[int, ...], SizeFacts]] = WeakKeyDictionary()


def facts_of(shape_env: Any) -> SizeFacts:
    """What is known by now of a trace's symbols; of none without a trace (None)."""
    if shape_env is None:
        return SizeFacts()
    state = torch_private.shape_state(shape_env)
    known = _facts.get(shape_env)
    if known is None or known[0] != state:
        guards, hints = torch_private.shape_facts(shape_env)
        known = _facts[shape_env] = (state, SizeFacts(guards, hints))
    return known[1]


def size_of(value: Any) -> Size:
    """An int or SymInt as int or sympy expression."""
    if isinstance(value, torch.SymInt):
        return facts_of(value.node.shape_env).simplify(value.node.expr)
    return int(value)


def at_hand(value: Any) -> int:
    """An int or SymInt as it is for the inputs at hand. To ask a SymInt itself would bind the trace to the answer."""
    size = size_of(value)
    if isinstance(size, int):
        return size
    hints = facts_of(value.node.shape_env).hints
    return int(size.xreplace({symbol: sympy.Integer(hint) for symbol, hint in hints.items()}))


def same_size(a: Size, b: Size) -> bool:
    """Equal whatever the symbols are (never: equal for the sizes at hand)."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(sympy.expand(sympy.sympify(a) - sympy.sympify(b)) == 0)
