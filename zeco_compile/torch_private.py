"""Private PyTorch API that the face of the package leans on: one named function each, one test each.

The tests are in ``tests/zeco_compile/test_torch_private.py``. When a PyTorch release moves one of these, that
test says which, and this file is the only one of this folder to change.
"""

from __future__ import annotations

import inspect
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch._logging
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, SymNodeVariable
from torch._dynamo.variables.base import VariableTracker
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch._higher_order_ops.scan import scan as scan  # a prototype, not in the public face of torch


def trace_artifact(name: str, encoding: Literal["string", "json"], payload: Callable[[], str]) -> None:
    """Adds a text to the structured trace that ``TORCH_TRACE`` switches on and that tlparse shows.

    ``payload`` is called only if a trace is being written. tlparse shows "json" indented, "string" as it is.
    """
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        # Called from outside a compilation (explain), the trace has no frame to hang the artifact on; without
        # this it would record a stack trace with every artifact to complain about that.
        expect_trace_id=False,
    )


def configured_post_pass() -> Any:
    """The pass (or passes, or None) that the user has Inductor run on graphs after AOTAutograd."""
    from torch._inductor import config

    return config.post_grad_custom_post_pass


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config_patches: Mapping[str, Any]
) -> Callable[..., Any]:
    """Inductor's code for forward and backward, both compiled under the patched configuration."""
    # Inductor takes seconds to import
    from torch._inductor.compile_fx import compile_fx

    # callable but for ahead-of-time packages, which are not asked for here
    compiled: Any = compile_fx(gm, example_inputs, config_patches=dict(config_patches))
    result: Callable[..., Any] = compiled
    return result


def compile_without_codegen(
    gm: fx.GraphModule, example_inputs: Sequence[Any], graph_pass: Callable[[fx.Graph], None]
) -> Callable[..., Any]:
    """AOTAutograd with Inductor's partitioner, whose graphs run node by node after `graph_pass` on each."""

    def compiler(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph_pass(graph_module.graph)
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            # Some ops have other strides than their fakes say (softplus_backward of a permuted gradient).
            node.target = torch.ops.aten.reshape.default
        # inputs come as a list that the callee empties, so that they can be freed before it returns
        graph_module.graph.set_codegen(fx.graph._BoxedCodeGen())
        graph_module.recompile()
        forward = graph_module.forward

        def run(inputs: list[Any]) -> Any:
            return forward(inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        # as Inductor does: mutations of the inputs are copies at the end of the graph
        keep_inference_input_mutations=True,
    )(gm, example_inputs)
    return compiled


def on_compile_start(function: Callable[[], Any]) -> None:
    """Calls `function` whenever Dynamo begins to compile, before it traces: for ever, also after a reset.

    ``torch._dynamo.reset()`` is to forget what was compiled, and clears the callbacks on the way; a backend is
    looked up only once in a process, so it could not register again before the next trace.
    """

    def callback(args: Any) -> None:
        function()

    forget_all = callback_handler.clear

    def forget_all_others() -> None:
        try:
            forget_all()
        finally:
            if callback not in callback_handler.start_callbacks:
                callback_handler.register_start_callback(callback)

    callback_handler.register_start_callback(callback)
    callback_handler.clear = forget_all_others  # type: ignore[method-assign]


@dataclass(frozen=True)
class Compilation:
    """What Dynamo is tracing for: the backend as the user named it, its options, and whether a graph break is an
    error. ``user_stack`` is the Python stack of the traced program, as text."""

    backend: Callable[..., Any]
    options: Mapping[str, Any] | None
    fullgraph: bool
    user_stack: str


def current_compilation() -> Compilation | None:
    """The compilation that this function is called in, through a function that Dynamo takes for a constant."""
    if TracingContext.try_get() is None:
        return None
    tracer = InstructionTranslator.current_tx()
    # Dynamo wraps a backend for debugging, torch.compile before that to bind the options
    wrapper: Any = tracer.output.compiler_fn
    wrapper = inspect.unwrap(wrapper)
    backend = getattr(wrapper, "compiler_fn", wrapper)
    options = getattr(wrapper, "kwargs", {}).get("options")
    fullgraph = bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    return Compilation(
        backend, options, fullgraph, "".join(traceback.format_list(TracingContext.extract_stack()))
    )


@dataclass(frozen=True)
class Frame:
    """The Python function that Dynamo is compiling, with its arguments as they were when it was called."""

    code: Any
    scope: Mapping[str, Any]
    variables: dict[str, Any]
    closure: tuple[Any, ...]

    def compile(self, change: Callable[[Any], Any], backend: Callable[..., Any]) -> None:
        """Compiles the function for changed arguments, with constant sizes, and calls it; `backend` gets its graphs.

        Nothing of it is remembered: the code is a copy, and has caches of its own.
        """
        code = self.code.replace()
        function = types.FunctionType(code, dict(self.scope), code.co_name, None, self.closure or None)
        names = code.co_varnames
        positional = [self.variables[name] for name in names[: code.co_argcount]]
        count = code.co_argcount + code.co_kwonlyargcount
        keywords = {name: self.variables[name] for name in names[code.co_argcount : count]}
        if code.co_flags & inspect.CO_VARARGS:
            positional += self.variables[names[count]]
            count += 1
        if code.co_flags & inspect.CO_VARKEYWORDS:
            keywords |= self.variables[names[count]]
        compiled = torch.compile(function, backend=backend, dynamic=False)
        compiled(*change(positional), **change(keywords))


def root_frame() -> Frame:
    """The frame that the backend is called for. To be called by a backend, within its call."""
    root = InstructionTranslator.current_tx().output.root_tx
    variables = {n: v.cell_contents if isinstance(v, types.CellType) else v for n, v in root.f_locals.items()}
    return Frame(root.f_code, root.f_globals, variables, tuple(root.closure or ()))


def numbers_left_behind() -> list[str]:
    """The Python numbers that the traced function returns, or leaves in objects (`self.seen += x.shape[1]`), in a fixed
    order: constants of the code around the graph, of which the graph shows nothing. To be called by a backend, within
    its call."""
    output = InstructionTranslator.current_tx().output
    effects, seen, found = output.side_effects, {}, []  # type: ignore[var-annotated]

    def note(variable: VariableTracker) -> None:
        if isinstance(variable, SymNodeVariable):
            value = variable.sym_num  # of a length that became a constant, too
            known = isinstance(value, int | float) or value.node.expr.is_number
            found.append(str(value) if known else "a number of the graph")
        elif isinstance(variable, ConstantVariable) and isinstance(variable.value, int | float):
            found.append(str(variable.value))
        for name, value in effects.store_attr_mutations.get(variable, {}).items():
            before = len(found)
            VariableTracker.visit(note, value, seen)
            found[before:] = [f"{name} = {number}" for number in found[before:]]

    VariableTracker.visit(note, output.root_tx.stack, seen)
    for variable in effects.id_to_variable.values():
        if effects.is_modified(variable):
            VariableTracker.visit(note, variable, seen)
    return found
