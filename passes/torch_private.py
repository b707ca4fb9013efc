"""Private PyTorch API that the passes lean on: one named function or class each, one test each.

The tests are in ``tests/passes/test_torch_private.py``. When a PyTorch release moves one of these, that test
says which, and this file is the only one of the passes to change.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import sympy
import torch
import torch._dynamo
from torch import fx
from torch._dynamo.exc import (
    RestartAnalysis,
    ShortenTraceback,
    TensorifyScalarRestartAnalysis,
    UncapturedHigherOrderOpError,
)
from torch._dynamo.source import LocalSource, TensorPropertySource
from torch._dynamo.symbolic_convert import InstructionTranslator, TensorifyState
from torch._functorch.autograd_function import autograd_function_apply
from torch._guards import ChainedSource, CompileContext, TracingContext
from torch._higher_order_ops.effects import _EffectType as EffectType
from torch._higher_order_ops.effects import with_effects
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._higher_order_ops.wrap import uid as checkpoint_numbers
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    maybe_enable_thunkify,
    py_sym_types,
)
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree
from torch.utils._ordered_set import OrderedSet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext
from torch.utils.checkpoint import _CachingTorchDispatchMode as CachingMode


class LoudBackendError(ShortenTraceback, UncapturedHigherOrderOpError):
    """Base of exceptions that a backend may raise and that reach the user as they are.

    Dynamo treats exceptions from a backend in three places, and each wants another type:

    - ``OutputGraph._call_user_compiler`` wraps everything in ``BackendCompilerFailed``, and turns some
      fake-tensor exceptions into a graph break, but re-raises a ``ShortenTraceback``.
    - ``ConvertFrame.__call__`` falls back to eager under ``torch._dynamo.config.suppress_errors``, for every
      exception but an ``UncapturedHigherOrderOpError``. For this package eager on a slice of the sequence is
      a wrong number, so the fallback must not happen whatever that setting says.
    - ``_TorchDynamoContext`` strips Dynamo's own frames from the traceback for both types, and keeps
      ``__cause__`` only for the second.
    """

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)
        self.message = message

    def __str__(self) -> str:
        """The message as raised: Dynamo appends its own copy of the user's stack, and advice on debugging
        Dynamo, to ``args`` on the way out."""
        return str(getattr(self, "message", self.args[0] if self.args else ""))


def is_dynamo_restart(error: BaseException) -> bool:
    """Whether `error` asks Dynamo to trace the frame once more. It is a message to Dynamo, not a failure."""
    return isinstance(error, RestartAnalysis)


def fake_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The fake mode that AOTAutograd will use for this graph, and the example inputs in it.

    Dynamo's own fake tensors (``example_value``) belong to an older mode whose symbols may have been refined.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        raise RuntimeError("no tracing context: the backend must be called by torch.compile")
    mode = context.fake_mode
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    fakes = []
    for node, value in zip(placeholders, example_inputs, strict=True):
        if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is mode):
            fakes.append(value)
        else:
            graph_argument = node.meta.get("grapharg")
            source = getattr(graph_argument, "source", None)
            symbolic = (getattr(context, "tensor_to_context", None) or {}).get(value)
            fakes.append(mode.from_tensor(value, source=source, symbolic_context=symbolic))
    return mode, fakes


def trace_functional(function: Callable[..., Any], fakes: Sequence[Any]) -> fx.GraphModule:
    """ATen graph of `function` on fake tensors, functionalised, composite ops taken apart.

    Must run inside the fake mode of `fakes`. The outputs are the tensors that `function` returned, then the
    final values of its inputs (changed or not); what else is dead is dropped by `make_fx`. Nodes of values in
    between are found by `traced_node` while `function` runs. What PyTorch itself computes from symbolic sizes (is it
    contiguous? how much memory?) has no nodes: they were nine of ten, and a fifth of the time.
    """

    def functional(*args: Any) -> list[Any]:
        with maybe_enable_thunkify(), FunctionalTensorMode() as functionalising:
            give_tokens(functionalising)
            wrapped = [FunctionalTensor.to_functional(a) if isinstance(a, torch.Tensor) else a for a in args]
            results = [r for r in pytree.tree_leaves(function(*wrapped)) if isinstance(r, torch.Tensor)]
            finals = []
            for tensor in [*results, *(w for w in wrapped if isinstance(w, torch.Tensor))]:
                if isinstance(tensor, FunctionalTensor):
                    torch._sync(tensor)
                    tensor = torch._from_functional_tensor(tensor.elem)
                finals.append(tensor)
            return finals

    traced: fx.GraphModule = make_fx(functional, tracing_mode="real")(*fakes)
    return traced


def give_tokens(mode: FunctionalTensorMode) -> None:
    """Lets ops with a side effect be traced (the check for errors behind `torch.linalg.inv`). AOTAutograd gives them
    tokens, made before the trace, that keep them in order; without one the functional mode fails."""
    for effect in EffectType:
        mode._tokens[effect] = torch.empty(0)


def checks_only(node: fx.Node) -> bool:
    """A check that raises or does nothing, traced as an op with a side effect."""
    return node.target is with_effects and node.args[1] is torch.ops.aten._linalg_check_errors.default


def tracing_graph() -> fx.Graph | None:
    """The graph that the innermost `make_fx` is building now."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def traced_node(value: Any) -> Any:
    """The node of the graph being traced that holds this tensor's present value; other values as they are.

    A number that was computed from sizes gets its node now: `trace_functional` puts that off, and a long chain of
    such numbers would be too deep to be made up for at its end.
    """
    mode = get_proxy_mode()
    if mode is None:
        return value
    if isinstance(value, py_sym_types):
        number: Any = get_proxy_slot(value, mode.tracer, None)
        if number is not None:
            number.force()
        return value
    if isinstance(value, FunctionalTensor):
        torch._sync(value)
        value = torch._from_functional_tensor(value.elem)
    if isinstance(value, torch.Tensor):
        slot = get_proxy_slot(value, mode.tracer, None)
        return None if slot is None else slot.proxy.node
    return value


def memory_of(value: Any) -> list[int]:
    """The memory of each tensor in a value being traced functionally, as a number that all its views share."""
    return [
        leaf.elem.untyped_storage()._cdata
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, FunctionalTensor)
    ]


def symbols_of_size(size: Any) -> set[Any]:
    """The symbol that a fake tensor's size is, under the name it was made with and the one it has now."""
    if not isinstance(size, torch.SymInt):
        return set()
    return {e for e in (size.node.expr, size.node._expr) if e.is_Symbol}


def shape_guards(fake_mode: Any) -> list[tuple[Any, str]]:
    """What was assumed of symbolic sizes so far: (condition, the user's source line or "")."""
    shape_env = getattr(fake_mode, "shape_env", None)
    if shape_env is None:
        return []
    return [
        (guard.expr, str(getattr(guard.sloc, "maybe_user_loc", None) or "")) for guard in shape_env.guards
    ]


def is_autograd_function(target: Any) -> bool:
    """The operator that Dynamo makes of a `torch.autograd.Function`: called with the bodies of forward and backward,
    and the arguments."""
    return target is autograd_function_apply


def is_scan(target: Any) -> bool:
    """The operator that Dynamo makes of `torch._higher_order_ops.scan`: called with the body of a step, the values
    carried at first, what is scanned (the steps in dimension 0), and what all steps share."""
    return target is scan_op


def trace_batched(body: fx.GraphModule, fakes: Sequence[Any], dims: Sequence[int | None]) -> fx.GraphModule:
    """ATen graph, functional, of `body` applied by `torch.vmap` along `dims` of its inputs; its results have the new
    dimension in front, and each node the source line of the node of `body` that it comes from.

    Must run inside the fake mode of `fakes`. The outputs are the results, and then the inputs.
    """
    batched = torch.vmap(fx.Interpreter(body).run, in_dims=tuple(dims), out_dims=0, randomness="different")
    with preserve_node_meta():
        traced = trace_functional(batched, fakes)
    traced.graph.eliminate_dead_code()
    return traced


def is_checkpoint(target: Any) -> bool:
    """The operator that Dynamo makes of `torch.utils.checkpoint.checkpoint`."""
    return target is tag_activation_checkpoint


def is_selective_checkpoint(body: fx.GraphModule) -> bool:
    """The user decides which of its ops are recomputed (``context_fn``)."""
    return "_checkpoint_context_fn" in body.meta


class _Asking(TorchDispatchMode):
    """Asks the policy of a selective checkpoint for every op, as the mode of `torch.utils.checkpoint` does."""

    def __init__(self, policy: Callable[..., CheckpointPolicy | bool]) -> None:
        super().__init__()
        self.policy = policy
        self.answers: list[CheckpointPolicy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in SAC_IGNORED_OPS:
            return out
        known = {"is_recompute": False, "op_output": out}
        wanted = inspect.signature(SelectiveCheckpointContext.__init__).parameters
        context = SelectiveCheckpointContext(**{name: known[name] for name in known if name in wanted})
        answer = self.policy(context, func, *args, **kwargs)
        if isinstance(answer, bool):
            answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        self.answers.append(answer)
        return out


class _OpByOp(fx.Interpreter):
    """Runs a body and collects what has been answered for the ops of each node."""

    def __init__(self, body: fx.GraphModule, asking: _Asking) -> None:
        super().__init__(body)
        self.asking = asking
        self.answers: dict[fx.Node, list[CheckpointPolicy]] = {}

    def run_node(self, node: fx.Node) -> Any:
        asked = len(self.asking.answers)
        result = super().run_node(node)
        self.answers[node] = self.asking.answers[asked:]
        return result


def checkpoint_policies(
    body: fx.GraphModule, fakes: Sequence[Any]
) -> dict[fx.Node, list[CheckpointPolicy]] | None:
    """What the policy of a selective checkpoint says of the ATen ops of each node of its body, on these arguments.

    None for a ``context_fn`` that does not come from ``create_selective_checkpoint_contexts``.
    """
    forward, *_ = body.meta["_checkpoint_context_fn"]()
    if not isinstance(forward, CachingMode):
        return None
    mode = next((fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)), nullcontext())
    run = _OpByOp(body, _Asking(forward.policy_fn))
    with mode, run.asking:
        run.run(*fakes)
    return run.answers


def new_checkpoint() -> int:
    """A number for ``meta["ac_graph_id"]``, by which the partitioner knows what is recomputed together."""
    return next(checkpoint_numbers)


def shape_state(shape_env: Any) -> tuple[int, ...]:
    """Changes whenever more is known of the symbols than before."""
    return len(shape_env.guards), len(shape_env.replacements), len(_hints(shape_env))


def shape_facts(shape_env: Any) -> tuple[list[Any], dict[Any, int]]:
    """The conditions under which a trace holds, and the values at hand of the symbols in them."""
    hints = {symbol: int(value) for symbol, value in _hints(shape_env).items() if value.is_Integer}
    current = {symbol: value for symbol, value in hints.items() if symbol not in shape_env.replacements}
    return [shape_env.replace(guard.expr) for guard in shape_env.guards], current


def _hints(shape_env: Any) -> Mapping[Any, Any]:
    # torch 2.11 has another name for it
    renamed = hasattr(shape_env, "backed_var_to_val")
    hints: Mapping[Any, Any] = shape_env.backed_var_to_val if renamed else shape_env.var_to_val
    return hints


def source_name(placeholder: fx.Node) -> str:
    """What Dynamo calls the origin of a placeholder: "L['self']._buffers['mask']"; "" if unknown."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    name = source.name
    return str(name() if callable(name) else name)


def is_argument(placeholder: fx.Node) -> bool:
    """Whether the placeholder is (part of) an argument of the compiled function, not something a module, a
    closure or a global holds."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return True
    guard_source = source.guard_source
    kind = guard_source() if callable(guard_source) else guard_source
    if "MODULE" in kind.name or not kind.name.startswith("LOCAL"):
        return False
    while isinstance(source, ChainedSource):
        source = source.base
    if isinstance(source, LocalSource):
        return bool(source.is_input)
    return True


def is_of_a_tensor(placeholder: fx.Node) -> bool:
    """Whether the number is a size, a stride or the offset of another input, and no argument of the user's."""
    return isinstance(getattr(placeholder.meta.get("grapharg"), "source", None), TensorPropertySource)


def mark_weakly_dynamic(tensor: torch.Tensor, dim: int) -> bool:
    """Asks Dynamo to trace a size as a symbol if the code allows it; False if that had been asked before, or that it
    be a constant."""
    marks = ("_dynamo_weak_dynamic_indices", "_dynamo_dynamic_indices", "_dynamo_static_indices")
    if any(dim in getattr(tensor, mark, ()) for mark in marks):
        return False
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return True


def all_sizes_vary() -> bool:
    """Whether every size is traced as a symbol, as `torch.compile(dynamic=True)` asks for."""
    return not torch._dynamo.config.assume_static_by_default


def may_vary(tensor: torch.Tensor, dim: int) -> bool:
    """Whether the user has asked that this size be a symbol (`torch._dynamo.mark_dynamic`)."""
    return dim in getattr(tensor, "_dynamo_dynamic_indices", ())


def is_all_symbolic(
    gm: fx.GraphModule, example_inputs: Sequence[Any], dims: Sequence[tuple[int, int]]
) -> bool:
    """Whether ``dims``, each an input and a dimension, are symbolic, and nothing else of the inputs."""
    _, fakes = fake_inputs(gm, example_inputs)
    if any(isinstance(value, FakeTensor) for value in example_inputs):
        return False
    known = {symbol for index, dim in dims for symbol in symbols_of_size(fakes[index].shape[dim])}
    tensors = [fake for fake in fakes if isinstance(fake, torch.Tensor)]
    numbers = [n for t in tensors for n in (*t.shape, *t.stride(), t.storage_offset())]
    numbers += [fake for fake in fakes if not isinstance(fake, torch.Tensor)]
    symbolic = [n for n in numbers if isinstance(n, py_sym_types)]
    free = {symbol for n in symbolic for symbol in n.node.expr.free_symbols}
    return bool(symbolic) and free <= known and all(isinstance(n, torch.SymInt) for n in symbolic)


def with_constant_sizes(
    gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[fx.GraphModule, list[int], list[Any]]:
    """`gm` for inputs of constant sizes: a graph without the numbers among the inputs, which inputs are left, and
    those, to be given to AOTAutograd.

    Dynamo is told by guards that the code is for these sizes, and traces again for others. Its own graph stays as it
    is: from that it takes what to call the code with.
    """
    mode, fakes = fake_inputs(gm, example_inputs)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    constant = FakeTensorConverter()  # the mode's own remembers the symbols
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    kept, inputs = [], []
    for index, (node, value, fake) in enumerate(zip(placeholders, example_inputs, fakes, strict=True)):
        if isinstance(fake, torch.SymInt):
            _put_in_place_of(node, int(fake))  # which makes a guard
            graph.erase_node(node)
            continue
        kept.append(index)
        if isinstance(fake, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in fake.shape):
            for size in fake.shape:
                int(size)  # a guard
            inputs.append(constant.from_real_tensor(mode, value))
        else:
            inputs.append(value)
    constant_gm = fx.GraphModule(gm, graph)
    constant_gm.meta.update(gm.meta)
    return constant_gm, kept, inputs


def with_numbers(gm: fx.GraphModule, symbols: Mapping[Any, int]) -> tuple[fx.GraphModule, list[int]]:
    """`gm` without the sizes among its inputs, which become the numbers that `symbols` gives them; and which inputs
    are left."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    kept = []
    for index, node in enumerate([node for node in graph.nodes if node.op == "placeholder"]):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.SymInt):
            kept.append(index)
            continue
        _put_in_place_of(node, constant_size(value, symbols))
        graph.erase_node(node)
    return fx.GraphModule(gm, graph), kept


def constant_size(size: Any, symbols: Mapping[Any, int]) -> int:
    """A size, with these numbers for its symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.xreplace({symbol: sympy.Integer(n) for symbol, n in symbols.items()}))


def _put_in_place_of(node: fx.Node, number: int) -> None:
    def changed(argument: fx.Node) -> Any:
        return number if argument is node else argument

    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg(user.args, changed), fx.node.map_arg(user.kwargs, changed)


def mark_constant(tensor: torch.Tensor, dim: int) -> bool:
    """Asks Dynamo to trace a size as a constant, whatever `mark_weakly_dynamic` has asked for. False if it was asked
    before.

    ``torch._dynamo.mark_static`` does nothing while Dynamo compiles, so its attributes are set here.
    """
    marked: Any = tensor
    if dim in getattr(tensor, "_dynamo_static_indices", ()):
        return False
    marked._dynamo_weak_dynamic_indices = getattr(tensor, "_dynamo_weak_dynamic_indices", set()) - {dim}
    marked._dynamo_static_indices = getattr(tensor, "_dynamo_static_indices", set()) | {dim}
    marked._has_dynamo_dim_marking = True
    return True


def symbolic_floats(gm: fx.GraphModule) -> set[str]:
    """The names of the symbols that stand for Python floats in Dynamo's graph."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    own = (value.node._expr for value in values if isinstance(value, torch.SymFloat))
    return {expression.name for expression in own if expression.is_Symbol}


def mark_constant_float(symbol: str) -> None:
    """Asks Dynamo to trace a Python float as a constant, by the name of its symbol, when the trace is restarted."""
    TensorifyState.specialize(symbol)


def restart_trace(reason: str) -> NoReturn:
    """Makes Dynamo trace the frame once more. Of its restarts this is the one that a backend may raise.

    Dynamo keeps a log of the places where it might break the graph, and insists that a second trace passes the
    same ones. With a symbolic length it need not, so the log is cleared, as its own message advises.
    """
    InstructionTranslator.current_tx().speculation_log.clear()
    raise TensorifyScalarRestartAnalysis(restart_reason=reason)


def graph_break(gm: fx.GraphModule) -> tuple[str, str] | None:
    """(Dynamo's reason, the stack as text) if the graph ends in a break; None if it is the whole frame."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return str(reason.reason), "".join(traceback.format_list(list(reason.user_stack)))


def compiles_left() -> int | None:
    """How many more graphs Dynamo will compile for the present frame before it runs it in eager, unasked."""
    compile_id = CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_compile_id is None:
        return None
    config = torch._dynamo.config
    limit = getattr(config, "recompile_limit", None) or config.cache_size_limit
    return int(limit) - 1 - int(compile_id.frame_compile_id)


GraphPass = CustomGraphPass
"""Base class of passes that Inductor's caches know by a `uuid`."""


def pin_nodes(graph: fx.Graph, before: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Makes Inductor's scheduler run each key after its values, which have to be tensors.

    Wraps the key in ``control_deps``; on torch 2.11 a value that is a tuple would be ignored in silence.
    """
    preserve_node_ordering(graph, {node: OrderedSet(earlier) for node, earlier in before.items()})


def passes_in_order(*passes: Any) -> Any:
    """One graph pass for Inductor that runs several, in order, and is cacheable where all of them are.

    A pass may be a `CustomGraphPass`, a plain function (which Inductor cannot cache), a tuple or list of
    such (torch 2.13), or None.
    """
    flat = [each for given in passes for each in (given if isinstance(given, tuple | list) else [given])]
    present = [each for each in flat if each is not None]
    if len(present) == 1:
        return present[0]
    return _InferenceAwarePasses(present) if any(map(_knows_inference, present)) else _Passes(present)


class _Passes(CustomGraphPass):
    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        identities = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return tuple(identities) if all(identities) else None


# torch 2.13 has passes that are told whether the graph is for inference; 2.11 has not
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


def _knows_inference(given: Any) -> bool:
    return _InferenceAware is not CustomGraphPass and isinstance(given, _InferenceAware)


class _InferenceAwarePasses(_Passes, _InferenceAware):
    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for each in self.passes:
            if _knows_inference(each):
                each(graph, is_inference)
            else:
                each(graph)


def is_behind_graph_break() -> bool:
    """Whether the frame that is being compiled is what Dynamo made of the code behind a graph break."""
    return InstructionTranslator.current_tx().f_code.co_name.startswith("torch_dynamo_resume_in_")
