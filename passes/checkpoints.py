"""Activation checkpointing: its body becomes a part of the graph, marked to be recomputed.

Dynamo puts what `torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False)` calls into a graph of its own, which
no pass would look into. What AOTAutograd does with it later is to compute the body in place and to mark every node of
it for the partitioner, with the number of its checkpoint. The same is done here first, and the nodes that passes add
inherit the marks (`inherit`): a layer that is recomputed recomputes its scan.

Selective checkpointing (`context_fn`) decides op by op, by the user's function, and stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zeco_compile.passes import torch_private

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
        count += 1 + inline_checkpoints(body)
        _inline(gm, node, body)
    if count:
        gm.graph.lint()
        gm.recompile()
    return count


def _body(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a checkpoint computes; None for other nodes and for selective checkpoints."""
    if node.op != "call_function" or not torch_private.is_checkpoint(node.target):
        return None
    held = node.args[0]
    assert isinstance(held, fx.Node), "Dynamo gives the body as an attribute of the graph"
    body = gm.get_submodule(str(held.target))
    assert isinstance(body, fx.GraphModule)
    return None if torch_private.is_selective_checkpoint(body) else body


def _inline(gm: fx.GraphModule, node: fx.Node, body: fx.GraphModule) -> None:
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
                    copy.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": number}
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if not held.users:
        gm.graph.erase_node(held)
