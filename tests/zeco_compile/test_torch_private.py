"""Every piece of private PyTorch API that the face uses still is where it was and does what it did."""

import json
import os
import subprocess
import sys

import torch

from zeco_compile.torch_private import (
    compile_with_inductor,
    compile_without_codegen,
    configured_post_pass,
    current_compilation,
    numbers_left_behind,
    root_frame,
)


def test_trace_artifact_reaches_the_trace_that_tlparse_reads(tmp_path):
    script = (
        "from zeco_compile.torch_private import trace_artifact\n"
        "trace_artifact('zeco_text', 'string', lambda: 'one\\ntwo')\n"
        "trace_artifact('zeco_data', 'json', lambda: '{\"a\": 1}')\n"
    )
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=120)
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    records = [json.loads(line[line.index("{") :]) for line in text.splitlines() if '"zeco_' in line]
    assert [record["artifact"] for record in records] == [
        {"name": "zeco_text", "encoding": "string"},
        {"name": "zeco_data", "encoding": "json"},
    ]
    assert all(record["has_payload"] for record in records)
    assert "\tone\n\ttwo\n" in text


def test_trace_artifact_makes_no_text_where_no_trace_is_written():
    # In a process of its own: pytest, capturing logs, counts as somebody who reads the trace. PyTorch
    # finds out with the first record, which Dynamo writes long before it calls a backend.
    script = (
        "import torch\n"
        "from zeco_compile.torch_private import trace_artifact\n"
        "torch._logging.trace_structured('first_record', expect_trace_id=False)\n"
        "trace_artifact('zeco_text', 'string', lambda: print('made'))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        check=True,
        env=environment,
        text=True,
        timeout=120,
    )
    assert done.stdout == ""


def test_inductor_is_patched_for_the_backward_too_and_nothing_is_left_behind():
    seen = []

    class Note(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            seen.append(len(list(graph.nodes)))

        def uuid(self):
            return "note"

    def backend(gm, example_inputs):
        return compile_with_inductor(gm, example_inputs, {"post_grad_custom_post_pass": Note()})

    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        out = torch.compile(lambda x: x.sin().cos(), backend=backend)(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
    torch._dynamo.reset()
    assert len(seen) == 2
    assert configured_post_pass() is None
    torch.testing.assert_close(grad, -x.sin().sin() * x.cos())


def test_graphs_run_as_they_are_after_the_pass():
    seen = []

    def backend(gm, example_inputs):
        return compile_without_codegen(gm, example_inputs, lambda graph: seen.append(type(graph)))

    torch._dynamo.reset()
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin().cos(), backend=backend)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    assert seen == [torch.fx.Graph] * 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), x.sin().cos())
    torch._dynamo.reset()
    assert len(seen) == 3
    torch.testing.assert_close(grad, -x.sin().sin() * x.cos())


def test_on_compile_start_is_called_before_a_trace_and_survives_a_reset():
    script = (
        "import torch\n"
        "from zeco_compile.torch_private import on_compile_start\n"
        "def other(args): raise AssertionError('forgotten by the reset')\n"
        "def traced(x):\n"
        "    traces.append(list(calls))\n"
        "    return x + 1\n"
        "calls, traces = [], []\n"
        "on_compile_start(lambda: calls.append(1))\n"
        "compiled = torch.compile(traced, backend='eager')\n"
        "compiled(torch.ones(2))\n"
        "assert calls == [1], calls\n"
        "torch._dynamo.callback.callback_handler.register_start_callback(other)\n"
        "for _ in range(2):\n"
        "    torch._dynamo.reset()\n"
        "    compiled(torch.ones(2))\n"
        "assert calls == [1, 1, 1], calls\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=300)


def test_current_compilation_knows_the_backend_its_options_and_the_users_stack():
    seen = []

    @torch.compiler.assume_constant_result
    def look():
        seen.append(current_compilation())

    def user_code(x):
        look()
        return x + 1

    def backend(gm, inputs, options=None):
        return gm.forward

    for options, fullgraph in ((None, True), ({"seq_dim": 2}, False)):
        torch._dynamo.reset()
        torch.compile(user_code, backend=backend, options=options, fullgraph=fullgraph)(torch.ones(2))
        compilation = seen.pop()
        assert compilation.backend is backend
        assert compilation.options == options
        assert compilation.fullgraph is fullgraph
        assert "in user_code\n    look()" in compilation.user_stack
    assert current_compilation() is None  # where Dynamo traces nothing


def test_a_backend_can_compile_the_function_again_for_other_arguments():
    """Arguments of every kind, a closure, and a cell: the second trace sees the changed ones, and nothing runs."""
    shapes, ran, offset = [], [], torch.ones(3)

    def user_code(x, *more, scale, **rest):
        def inner(y):
            return y * scale + offset

        return inner(x) + more[0] + rest["last"]

    def backend(gm, inputs):
        sizes = sorted(tuple(i.shape) for i in inputs if isinstance(i, torch.Tensor))
        shapes.append(sizes)
        if len(shapes) == 1:
            root_frame().compile(
                lambda tree: torch.utils._pytree.tree_map_only(torch.Tensor, wider, tree), backend
            )

        def run(*args):
            ran.append(sizes)
            return gm.forward(*args)

        return run

    def wider(tensor):
        return tensor.repeat(2, 1) if tensor.dim() == 2 else tensor

    torch._dynamo.reset()
    x = torch.randn(2, 3)
    result = torch.compile(user_code, backend=backend, fullgraph=True)(x, x + 1, scale=2.0, last=x)
    torch.testing.assert_close(result, x * 2 + 1 + x + 1 + x)
    assert shapes[0] == [(2, 3), (2, 3), (3,)], "x is given twice"
    assert shapes[1] == [(3,), (4, 3), (4, 3), (4, 3)], "and is two tensors once each is made anew"
    assert ran[-1] == shapes[0]


def test_numbers_that_a_function_returns_or_keeps_are_found():
    found, kept = [], {"calls": 2, "text": "no number", "lengths": [1]}

    def backend(gm, example_inputs):
        found.extend(numbers_left_behind())
        return gm.forward

    def function(x):
        unread = [5, 6]
        kept["calls"] += 1
        kept["lengths"].append(len(unread) + 7)
        return x + 1, 4.5

    torch.compile(function, backend=backend, fullgraph=True)(torch.ones(3))
    assert {"1", "3", "4.5", "9"} <= set(found)
    assert not {"5", "6"} & set(found)
