"""Which rule an op has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from zeco_compile.passes.tracking import Tracking

Rule = Callable[[Tracking, fx.Node], None]
_RULES: dict[Any, Rule] = {}
_RULES_OF_KINDS: list[tuple[Callable[[Any], bool], Rule]] = []


def rule_for(target: Any) -> Rule | None:
    """The rule of an op overload; None if there is none."""
    if target in _RULES:
        return _RULES[target]
    packet = getattr(target, "overloadpacket", None)
    if packet in _RULES:
        return _RULES[packet]
    return next((rule for is_one, rule in _RULES_OF_KINDS if is_one(target)), None)


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """The decorated function is the rule of these ops (overloads, or packets for all their overloads)."""

    def register(function: Rule) -> Rule:
        for target in targets:
            _RULES[target] = function
        return function

    return register


def rule_of_kind(is_one: Callable[[Any], bool]) -> Callable[[Rule], Rule]:
    """The decorated function is the rule of all ops of a kind that have none of their own."""

    def register(function: Rule) -> Rule:
        _RULES_OF_KINDS.append((is_one, function))
        return function

    return register


def ops(*names: str) -> list[Any]:
    """Op packets of ATen by name; names that this PyTorch does not have are left out."""
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def positive(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def dim_list(dim: Any, rank: int) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(rank))
    return [positive(d, rank) for d in (dim if isinstance(dim, list | tuple) else [dim])]
