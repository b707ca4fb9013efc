"""From the rewritten graph to code that runs: AOTAutograd, then Inductor or the graphs as they are.

Contract: `generate(gm, example_inputs, settings)` takes the graph that Dynamo gave and our passes rewrote, and
returns the callable that a Dynamo backend returns. It changes no global configuration, and its result is
cached by PyTorch's own caches (Inductor only), so in a warm process none of it may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.compile_fx import compile_fx

from zeco_compile.settings import Settings


def generate(gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Code for `gm`, forward and backward, as ``settings.codegen`` asks. To be called in a Dynamo backend."""
    if settings.codegen == "aot_eager":
        return _aot_eager(gm, example_inputs)
    return compile_fx(gm, example_inputs, config_patches={})


def _aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    def compiler(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph_module.graph.set_codegen(fx.graph._BoxedCodeGen())
        graph_module.recompile()
        run = graph_module.forward
        return _boxed(run)

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(gm, example_inputs)


def _boxed(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(arguments: list[Any]) -> Any:
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
