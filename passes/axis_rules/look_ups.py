"""Ops that read or write places which other tensors name: tables, indices, gather and scatter."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zeco_compile.passes.axis_rules.registry import ops, positive, rule
from zeco_compile.passes.schema import argument, operand, shape, tensors
from zeco_compile.passes.sizes import same_size
from zeco_compile.passes.tracking import Tracking


@rule(*ops("embedding"))
def embedding(track: Tracking, node: fx.Node) -> None:
    table, index = operand(node, 0), operand(node, 1)
    track.act(node, track.dims(table)[0], "look-up")
    if argument(node, "scale_grad_by_freq", False):
        for dim in track.dims(index):  # a row's gradient is divided by how often it was looked up, anywhere
            track.act(node, dim, "count")
    track.out(node, (*track.dims(index), track.dims(table)[1]))


@rule(*ops("index", "_unsafe_index"))
def index(track: Tracking, node: fx.Node) -> None:
    source = operand(node, 0)
    indices: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    dims = track.dims(source)
    indices += [None] * (len(dims) - len(indices))
    picked = [i for i, n in enumerate(indices) if n is not None]
    if any(indices[i].meta["val"].dtype in (torch.bool, torch.uint8) for i in picked):
        track.opaque(node, "selection by a mask")
        return
    for i in picked:
        track.act(node, dims[i], "look-up")
    new = track.broadcast([track.dims(indices[i]) for i in picked])
    adjacent = picked == list(range(picked[0], picked[-1] + 1))
    if adjacent:
        track.out(node, (*dims[: picked[0]], *new, *dims[picked[-1] + 1 :]))
    else:
        track.out(node, (*new, *(d for i, d in enumerate(dims) if i not in picked)))


@rule(*ops("index_select"))
def index_select(track: Tracking, node: fx.Node) -> None:
    source, which = operand(node, 0), operand(node, 2)
    dims = list(track.dims(source))
    dim = positive(argument(node, "dim"), len(dims))
    track.act(node, dims[dim], "look-up")
    dims[dim] = track.dims(which)[0]
    track.out(node, tuple(dims))


@rule(*ops("gather"))
def gather(track: Tracking, node: fx.Node) -> None:
    source, which = operand(node, 0), operand(node, 2)
    dims, wanted = track.dims(source), track.dims(which)
    dim = positive(argument(node, "dim"), len(dims))
    track.act(node, dims[dim], "look-up")
    out = []
    for i, (a, b) in enumerate(zip(dims, wanted, strict=True)):
        if i == dim:
            out.append(b)
        elif shape(source)[i] == shape(which)[i]:
            out.append(track.broadcast([(a,), (b,)])[0])
        else:
            track.act(node, a, "look-up")
            out.append(b)
    track.out(node, tuple(out))


@rule(*ops("scatter", "scatter_add", "scatter_reduce"))
def scatter(track: Tracking, node: fx.Node) -> None:
    inputs = tensors(node)
    dims = list(track.dims(inputs[0]))
    dim = positive(argument(node, "dim"), len(dims))
    track.act(node, dims[dim], "scatter")
    for other in inputs[1:]:
        for i, d in enumerate(track.dims(other)):
            if i == dim:
                track.act(node, d, "scatter")
            elif shape(other)[i] == shape(inputs[0])[i]:
                dims[i] = track.broadcast([(dims[i],), (d,)])[0]
            else:
                track.act(node, dims[i], "scatter")
    track.out(node, tuple(dims))


@rule(*ops("index_put"))
def index_put(track: Tracking, node: fx.Node) -> None:
    into, values = operand(node, 0), operand(node, 2)
    indices: list[Any] = list(node.args[1])  # type: ignore[arg-type]
    dims = list(track.dims(into))
    given = [i for i, each in enumerate(indices) if each is not None]
    if (
        len(given) != 1
        or len(shape(indices[given[0]])) != 1
        or indices[given[0]].meta["val"].dtype is torch.bool
    ):
        track.opaque(node, "rows that are written to several places")
        return
    (at,) = given
    places = track.dims(indices[at])
    if same_size(shape(into)[at], shape(indices[at])[0]):  # as many as there are: perhaps each of them once
        dims[at] = track.unified(node, dims[at], places[0])
    track.broadcast([(*dims[:at], *places, *dims[at + 1 :]), track.dims(values)])
    track.act(node, dims[at], "scatter")
    track.act(node, places[0], "scatter")
    track.out(node, tuple(dims))


@rule(*ops("index_add"))
def index_add(track: Tracking, node: fx.Node) -> None:
    into, places, source = operand(node, 0), operand(node, 2), operand(node, 3)
    dims = list(track.dims(into))
    at = positive(argument(node, "dim"), len(dims))
    rest = track.broadcast(
        [(*dims[:at], (), *dims[at + 1 :]), (*track.dims(source)[:at], (), *track.dims(source)[at + 1 :])]
    )
    track.act(node, dims[at], "scatter")
    track.act(node, track.unified(node, track.dims(source)[at], track.dims(places)[0]), "scatter")
    track.out(node, (*rest[:at], dims[at], *rest[at + 1 :]))
