"""The user's line is found through PyTorch's and this package's own frames, and its absence is survived."""

import contextlib
import linecache
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.utils import _traceback

from zeco_compile.passes import locations
from zeco_compile.passes.locations import (
    UNKNOWN,
    Location,
    innermost_user_frame,
    parse_stack_trace,
    user_location,
)

HERE = str(Path(__file__))
TORCH = str(Path(torch.__file__).parent)
PACKAGE = str(Path(locations.__file__).parent)


def frame(file: str, line: int, function: str, code: str = "") -> str:
    return f'  File "{file}", line {line}, in {function}\n' + (f"    {code}\n" if code else "")


class Scale(nn.Module):
    def forward(self, x):
        return x * 2  # the line of Scale


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.scale = Scale()

    def forward(self, x):
        x = self.norm(x)  # the line of the norm
        return self.scale(x)


def line_of(comment: str) -> int:
    lines = Path(HERE).read_text().splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {comment}"))


def captured_graph(model, *inputs) -> fx.Graph:
    graphs = []

    def keep(gm, example_inputs):
        graphs.append(gm.graph)
        return gm.forward

    torch.compile(model, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


def test_nodes_of_a_captured_model_point_at_the_users_lines():
    graph = captured_graph(Model(), torch.ones(2, 4))
    norm, scale = (node for node in graph.nodes if node.op == "call_function")
    assert user_location(norm) == Location(
        HERE, line_of("the line of the norm"), "forward", "x = self.norm(x)  # the line of the norm"
    )
    assert user_location(scale).line == line_of("the line of Scale")
    assert str(user_location(scale)) == f"{HERE}:{line_of('the line of Scale')}"


def test_placeholder_output_and_no_node_have_no_line_or_a_users():
    graph = captured_graph(Model(), torch.ones(2, 4))
    output = next(node for node in graph.nodes if node.op == "output")
    assert user_location(output) == UNKNOWN
    assert user_location(None) == UNKNOWN
    assert not UNKNOWN.known
    assert "unknown" in str(UNKNOWN)


def test_innermost_user_frame_skips_torch_the_package_and_the_standard_library():
    stack = (
        frame("/home/someone/train.py", 3, "step", "loss = model(x)")
        + frame("/home/someone/model.py", 7, "forward", "y = gla(q)")
        + frame(contextlib.__file__, 81, "inner", "return func(*args)")
        + frame(f"{TORCH}/nn/functional.py", 99, "linear", "return torch.linear(x)")
        + frame(f"{PACKAGE}/recognize.py", 5, "substitute", "return op(q)")
        + frame("<eval_with_key>.3", 5, "forward")
    )
    assert innermost_user_frame(stack) == Location("/home/someone/model.py", 7, "forward", "y = gla(q)")


def test_a_model_library_counts_as_user_code():
    library = f"{Path(TORCH).parent}/transformers/models/x.py"
    assert innermost_user_frame(frame(library, 2, "forward", "y = x")).file == library


def test_a_library_that_rearranges_tensors_is_none_of_the_users():
    own = frame("/home/someone/model.py", 7, "forward", 'y = rearrange(x, "b t d -> t b d")')
    library = frame(f"{Path(TORCH).parent}/einops/_backends.py", 9, "transpose", "return x.permute(axes)")
    assert innermost_user_frame(own + library).file == "/home/someone/model.py"
    assert innermost_user_frame(frame("/home/someone/einops/model.py", 7, "f", "y = x")).line == 7


def test_only_library_frames_give_the_innermost_of_them():
    stack = frame(f"{TORCH}/a.py", 1, "f", "x") + frame(f"{TORCH}/b.py", 2, "g", "y")
    assert innermost_user_frame(stack) == Location(f"{TORCH}/b.py", 2, "g", "y")


@pytest.mark.parametrize("stack", [None, "", "nonsense\n  File without quotes, line 3", 7])
def test_no_stack_trace_or_an_unreadable_one_is_unknown(stack):
    assert innermost_user_frame(stack) == UNKNOWN


def test_marks_under_the_source_line_and_missing_source_lines():
    stack = (
        '  File "/a.py", line 1, in f\n    y = x.sum()\n        ^^^^^^^\n'
        '  File "/b.py", line 2, in g\n'
        '  File "/c d.py", line 3\n    z = y\n'
    )
    assert parse_stack_trace(stack) == [
        Location("/a.py", 1, "f", "y = x.sum()"),
        Location("/b.py", 2, "g", ""),
        Location("/c d.py", 3, "", "z = y"),
    ]


def test_source_line_is_read_from_the_file_where_the_trace_has_none(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("import torch\ny = torch.flip(x, [1])\n")
    linecache.checkcache()
    assert innermost_user_frame(frame(str(file), 2, "f")).code == "y = torch.flip(x, [1])"


def test_describe_shows_place_function_and_line():
    described = Location("/m.py", 12, "forward", "y = x.flip(1)").describe()
    assert described == "/m.py:12, in forward\n    y = x.flip(1)"
    assert Location("/m.py", 12).describe() == "/m.py:12"


def test_the_short_form_of_a_frame():
    """Whatever folders the file has in common with PyTorch's."""
    short = _traceback.shorten_filename
    line = line_of("the line of Scale")
    code = "return x * 2  # the line of Scale"
    for file in (HERE, str(Path(torch.nn.__file__))):
        found = locations.of_short_frame(
            f"{linecache.getline(file, line).strip()}  # {short(file)}:{line} in forward"
        )
        assert (found.file, found.line) == (file, line)
    assert locations.of_short_frame(f"{code} changed  # {short(HERE)}:{line} in forward") == UNKNOWN
    assert locations.of_short_frame(f"{code}  # nowhere/else.py:{line} in forward") == UNKNOWN
    assert locations.of_short_frame("") == UNKNOWN


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("L['x']", "x"),
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "self.layers[0].weight"),
        ("L['batch']['tokens']", "batch['tokens']"),
    ],
)
def test_the_origin_of_an_input_as_one_would_write_it(name, written):
    assert locations.source_expression(name) == written


def test_an_expression_is_the_code_and_where_it_is():
    graph = fx.Graph()
    node = graph.call_function(torch.sin, (graph.placeholder("x"),))
    assert locations.expression(node, "torch.sin") == "`torch.sin`"
    node.meta["stack_trace"] = '  File "model.py", line 3, in forward\n    y = torch.sin(x)\n'
    assert locations.expression(node, "torch.sin") == "`y = torch.sin(x)` at model.py:3"
