"""From the rewritten graph to code that runs: AOTAutograd, then Inductor or the graphs as they are.

Contract: `generate(gm, example_inputs, settings)` takes the graph that Dynamo gave and our passes rewrote,
and returns what a Dynamo backend returns. Forward and backward graphs go through the overlap pass on the way,
which raises ``OrderLost`` rather than lose the order that it promises. No global configuration changes, and a
pass that the user configured for Inductor still runs, before ours.

PyTorch's caches stay usable with Inductor: in a warm process nothing of what is here may run but `generate`
itself. What they know of us is `_identity`: they see the ops in a graph, but not what those do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import fx

from zeco_compile import kernels, lowering, passes, torch_private
from zeco_compile.passes.overlap import OverlapPass, order_transfers
from zeco_compile.passes.torch_private import passes_in_order
from zeco_compile.settings import Settings


def generate(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Code for `gm`, forward and backward, as ``settings.codegen`` asks; takes over `gm`.

    To be called by a Dynamo backend, within its call. Raises ``OrderLost``, and what AOTAutograd and Inductor
    raise. The backward may be compiled later, when it is called.
    """
    if settings.codegen == "aot_eager":
        return torch_private.compile_without_codegen(gm, example_inputs, _orderer(settings))
    overlap = OverlapPass(overlap=settings.overlap, identity=_identity(settings))
    patches = {
        "post_grad_custom_post_pass": passes_in_order(torch_private.configured_post_pass(), overlap),
        # Near a convolution Inductor would lay out 4-D tensors channels-last, among them q, k and v, whose
        # "channels" are then the tokens, and where that length is symbolic it fails to compare the strides.
        "layout_optimization": False,
    }
    return torch_private.compile_with_inductor(gm, example_inputs, patches)


def _orderer(settings: Settings) -> Callable[[fx.Graph], None]:
    """Nodes run in the order of the graph, so there is nothing to pin; without overlap, nothing to do."""

    def order(graph: fx.Graph) -> None:
        if settings.overlap:
            order_transfers(graph)

    return order


def _identity(settings: Settings) -> str:
    return f"{settings.identity()} {_source_hash()}"


@cache
def _source_hash() -> str:
    """Of the code that decides what our ops are traced into: a cached program is stale when it changes."""
    digest = hashlib.sha256()
    for package in (kernels, lowering, passes):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.glob("**/*.py")):
            digest.update(f"{package.__name__}/{file.relative_to(folder)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
