"""Activation checkpointing: its body becomes a part of the graph, marked to be recomputed.

Dynamo puts what `torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)` calls into a graph of its own, which
no pass would look into. What AOTAutograd does with it later is to compute the body in place and to mark every node of
it for the partitioner, with the number of its checkpoint. The same is done here first, and the nodes that passes add
inherit the marks (`inherit`): a layer that is recomputed recomputes its scan.

Selective checkpointing (`create_selective_checkpoint_contexts`) decides op by op: the user's policy is asked for the
ATen ops of each node of the body, on fake tensors, and a node is kept if one of its ops is. So is the operator that
takes a region's place if one of the region's ops is (`keep_if_any`). Any other `context_fn` stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zeco_compile.passes import torch_private

log = logging.getLogger(__name__)

_INHERITED = ("stack_trace", "recompute", "ac_graph_id")


def inherit(made: fx.Node, like: fx.Node) -> fx.Node:
    """Gives a new node the source line of the user's node that it stands for, and its marks of a checkpoint."""
    made.meta.update({key: like.meta[key] for key in _INHERITED if key in like.meta})
    return made


def inline_checkpoints(gm: fx.GraphModule) -> int:
    """Puts the bodies of checkpoints, nested ones too, into the graph of `gm`; returns how many."""
    count = 0
    for node in list(gm.graph.nodes):
        body = _body(gm, node)
        if body is None:
            continue
        within = inline_checkpoints(body)
        policies = _policies(node, body)
        if policies is None:
            continue
        count += 1 + within
        _inline(gm, node, body, policies)
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a checkpoint computes; None for other nodes."""
    if node.op != "call_function" or not torch_private.is_checkpoint(node.target):
        return None
    held = node.args[0]
    assert isinstance(held, fx.Node), "Dynamo gives the body as an attribute of the graph"
    body = gm.get_submodule(str(held.target))
    assert isinstance(body, fx.GraphModule)
    return body


_STRONGEST_FIRST = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.PREFER_SAVE,
    CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.MUST_RECOMPUTE,
)
_KEPT = _STRONGEST_FIRST[:2]


def _policies(node: fx.Node, body: fx.GraphModule) -> dict[fx.Node, CheckpointPolicy] | None:
    """What is to become of the nodes of a body; those not named are recomputed. None where the user decides it in a way
    that is not known."""
    if not torch_private.is_selective_checkpoint(body):
        return {}
    fakes = [a.meta["example_value"] if isinstance(a, fx.Node) else a for a in node.args[1:]]
    try:
        answers = torch_private.checkpoint_policies(body, fakes)
    except (RuntimeError, NotImplementedError, AssertionError) as why:
        log.debug("the policy of the checkpoint `%s` cannot be asked: %s", node, why)
        return None
    if answers is None:
        return None
    return {n: min(found, key=_STRONGEST_FIRST.index) for n, found in answers.items() if found}


def keep_if_any(made: fx.Node, replaced: Iterable[fx.Node]) -> None:
    """Marks a node that stands for others, in the same checkpoint, to be kept for the backward if one of them is."""
    number = made.meta.get("ac_graph_id")
    marks = [n.meta.get("recompute") for n in replaced if n.meta.get("ac_graph_id") == number]
    kept = [policy for policy in _KEPT if policy in marks]
    if number is not None and kept:
        made.meta["recompute"] = kept[0]


def _inline(
    gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule, policies: Mapping[fx.Node, CheckpointPolicy]
) -> None:
    held = node.args[0]
    assert isinstance(held, fx.Node)
    number = torch_private.new_checkpoint()
    arguments = iter(node.args[1:])
    copies: dict[fx.Node, Any] = {}
    results: Any = None
    with gm.graph.inserting_before(node):
        for each in body.graph.nodes:
            if each.op == "placeholder":
                copies[each] = next(arguments)
            elif each.op == "output":
                results = fx.map_arg(each.args[0], copies.__getitem__)
            else:
                copy = copies[each] = gm.graph.node_copy(each, copies.__getitem__)
                if each.op == "get_attr":
                    copy.target = f"{held.target}.{each.target}"
                elif "recompute" not in copy.meta:  # else it is in a checkpoint of its own
                    policy = policies.get(each, CheckpointPolicy.PREFER_RECOMPUTE)
                    copy.meta |= {"recompute": policy, "ac_graph_id": number}
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if not held.users:
        gm.graph.erase_node(held)
