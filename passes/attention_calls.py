"""`nn.MultiheadAttention`, taken apart into what it computes.

Dynamo keeps the function behind it, `F.multi_head_attention_forward`, as one node, and so does every module that
calls it: `nn.MultiheadAttention`, the layers of `nn.Transformer`. `take_apart` puts projections, attention
and the output's projection in its place, each a node that the other passes know.

Contract: what comes out is the function's own result, masked rows and dropout included. Without the weights
(`need_weights=False`) the attention is `F.scaled_dot_product_attention`; with them a softmax written out, as there.
Calls with keys and values beside those of the sequence (`bias_k`, `add_zero_attn`, `static_k`) stay as they are.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from zeco_compile.passes.checkpoints import inherit

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_KEYS_OF_ITS_OWN = ("bias_k", "bias_v", "static_k", "static_v")


def take_apart(gm: fx.GraphModule) -> int:
    """Puts what they compute in the place of calls of `F.multi_head_attention_forward`; returns how many."""
    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=F.multi_head_attention_forward):
        given = _SIGNATURE.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        call = given.arguments
        query = _value(call["query"])
        only_results = all(user.target is operator.getitem for user in node.users)
        if query is None or not only_results:
            continue
        if call["add_zero_attn"] or any(call[name] is not None for name in _KEYS_OF_ITS_OWN):
            continue
        _replace(_Call(node, call, query))
        count += 1
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


@dataclass(frozen=True)
class _Call:
    """One call, the arguments by their names, and the query [L, N, E] or [L, E] as Dynamo knows it."""

    node: fx.Node
    given: dict[str, Any]
    query: torch.Tensor

    @property
    def heads(self) -> int:
        return int(self.given["num_heads"])

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node before the call; a name is a method."""
        graph = self.node.graph
        with graph.inserting_before(self.node):
            if isinstance(target, str):
                made = graph.call_method(target, args, kwargs)
            else:
                made = graph.call_function(target, args, kwargs)
        return inherit(made, self.node)


def _replace(at: _Call) -> None:
    given, batched = at.given, at.query.dim() == 3
    query, key, value = (_heads_first(at, each, batched) for each in _projected(at))
    causal, need_weights = given["is_causal"], given["need_weights"]
    padding = given["key_padding_mask"]
    if causal and padding is None and not need_weights:
        mask = None  # the hint stands for the mask
    else:
        causal = causal and padding is None
        mask = _mask(at, batched)
    dropout = given["dropout_p"] if given["training"] else 0.0
    weights = None
    if need_weights:
        out, weights = _with_weights(at, query, key, value, mask, dropout)
    else:
        out = at.call(
            F.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=bool(causal),
        )
    # [N, H, L, E / H] -> [L, N, E]
    out = at.call("flatten", at.call("permute", out, 2, 0, 1, 3), 2)
    out = at.call(F.linear, out, given["out_proj_weight"], given["out_proj_bias"])
    if not batched:
        out = at.call("squeeze", out, 1)
    for user in list(at.node.users):
        result = weights if user.args[1] == 1 else out
        if user.args[1] == 1 and weights is not None:
            result = _returned(at, weights, batched)
        if isinstance(result, fx.Node) and "example_value" in user.meta:
            result.meta["example_value"] = user.meta["example_value"]
        user.replace_all_uses_with(result)  # type: ignore[arg-type]  # None, where there are no weights
        at.node.graph.erase_node(user)
    at.node.graph.erase_node(at.node)


def _projected(at: _Call) -> list[fx.Node]:
    """Query, key and value, projected: [L, N, E], or [L, E]."""
    given = at.given
    inputs = [given[name] for name in ("query", "key", "value")]
    bias = given["in_proj_bias"]
    if not given["use_separate_proj_weight"]:
        weight = given["in_proj_weight"]
        if inputs[0] is inputs[1] is inputs[2]:
            return _thirds(at, at.call(F.linear, inputs[0], weight, bias), -1)
        matrices = _thirds(at, weight, 0)
    else:
        matrices = [given[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
    biases = [None] * 3 if bias is None else _thirds(at, bias, 0)
    return [at.call(F.linear, *each) for each in zip(inputs, matrices, biases, strict=True)]


def _thirds(at: _Call, whole: Any, dim: int) -> list[fx.Node]:
    parts = at.call("chunk", whole, 3, dim)
    return [at.call(operator.getitem, parts, i) for i in range(3)]


def _heads_first(at: _Call, projected: fx.Node, batched: bool) -> fx.Node:
    """[N, H, L, E / H]; one sequence by itself is a batch of one."""
    if not batched:
        projected = at.call("unsqueeze", projected, 1)
    return at.call("permute", at.call("unflatten", projected, -1, (at.heads, -1)), 1, 2, 0, 3)


def _mask(at: _Call, batched: bool) -> fx.Node | None:
    """What is added to the scores [N, H, L, S], of any shape that is expanded to that."""
    mask, padding = (_added(at, at.given[name]) for name in ("attn_mask", "key_padding_mask"))
    given = _value(at.given["attn_mask"])
    if mask is not None and given is not None and given.dim() == 3:
        mask = at.call("unflatten", mask, 0, (-1, at.heads))  # one for each head of each sequence
    if padding is None:
        return mask
    for dim in (1, 1) if batched else (0, 1, 1):
        padding = at.call("unsqueeze", padding, dim)
    return padding if mask is None else at.call(torch.add, mask, padding)


def _added(at: _Call, mask: Any) -> fx.Node | None:
    """A mask as a number for each pair: a boolean one, true where nothing is to be seen, becomes minus infinity."""
    held = _value(mask)
    if held is None or held.dtype != torch.bool:
        return mask
    zeros = at.call(torch.zeros_like, mask, dtype=at.query.dtype)
    return at.call("masked_fill", zeros, mask, float("-inf"))


def _with_weights(
    at: _Call, query: fx.Node, key: fx.Node, value: fx.Node, mask: fx.Node | None, dropout: float
) -> tuple[fx.Node, fx.Node]:
    """The attention [N, H, L, E / H] and its weights [N, H, L, S]."""
    width = at.query.shape[-1] // at.heads
    scaled = at.call(torch.mul, query, math.sqrt(1.0 / float(width)))
    scores = at.call(torch.matmul, scaled, at.call("transpose", key, -2, -1))
    if mask is not None:
        scores = at.call(torch.add, scores, mask)
    weights = at.call(F.softmax, scores, dim=-1)
    if dropout > 0.0:
        weights = at.call(F.dropout, weights, p=dropout)
    return at.call(torch.matmul, weights, value), weights


def _returned(at: _Call, weights: fx.Node, batched: bool) -> fx.Node:
    if at.given["average_attn_weights"]:
        weights = at.call("mean", weights, dim=1)
    return weights if batched else at.call("squeeze", weights, 0)


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
