"""The report is complete as data and readable as a document."""

import json

import pytest
import torch
from torch import fx, nn

from zeco_compile.passes.locations import Location
from zeco_compile.passes.report import (
    Communication,
    Decision,
    PassRecord,
    Region,
    Report,
    Role,
    Scan,
    count_ops,
    format_bytes,
    format_seconds,
    op_difference,
    op_name,
)

WHERE = Location("/home/someone/model.py", 40, "forward", "o = (q @ k.mT * mask) @ v")
SHIFT = Location("/home/someone/model.py", 31, "conv", "x = F.pad(x, (0, 0, 3, 0))")


NEAR = {"latency": 5e-6, "per_byte": 2.5e-12, "gap": 0.0, "source": "measured by ranks (0, 1)"}
FAR = {"latency": 1e-3, "per_byte": 2e-11, "gap": 1e-3, "source": "assumed: 400 Gb/s a rank"}


def full_report() -> Report:
    return Report(
        rank=1,
        world_size=2,
        group="'0', ranks [0, 1]",
        graph=3,
        length="s27",
        seq_inputs={"ids": 1, "state": None},
        settings={"schedule": "auto", "blocks": None},
        location=Location("/home/someone/model.py", 25, "forward", ""),
        regions=[
            Region(
                name="gla_0",
                family="per channel",
                how="by meaning",
                location=WHERE,
                roles={
                    "q": Role("q_proj", "[B, H, T, K] = [2, 4, s27, 16]", "transposed (1, 2)", WHERE),
                    "g": Role("sigmoid", "[B, H, T, K] = [2, 4, s27, 16]", "log(sigmoid)", WHERE),
                },
                scale="K**-0.5 = 0.25",
                layout="[B, H, T, D] in your graph, [B, T, H, D] in the kernel",
                notes=["the mask `a | b` is causal"],
                check_error=3.2e-15,
                sizes_checked=["T=13, B=2", "T=29, B=3"],
            )
        ],
        decisions=[
            Decision("pad", "F.pad", "halo exchange", SHIFT, "3 rows of the previous rank"),
            Decision("mul", "mul", "position-local"),
            Decision("mul_1", "mul", "position-local"),
            Decision("add", "add", "position-local"),
        ],
        scans=[
            Scan("gla_0", "all_scan", 4, 8192, 12.3e-6, "nccl", 2, {"intra": NEAR, "inter": FAR}),
        ],
        communication=[
            Communication(
                "state of gla_0",
                "to the next rank",
                "B*H*K*V*4",
                8192,
                calls=2,
                alternatives={"all-gather of k and v": 1 << 20},
            )
        ],
        passes=[PassRecord("recognize", 0.25, 1, {"matmul": -2, "zeco.gated_linear_attention": 1}, 20, 12)],
    )


def test_markdown_says_everything_that_a_newcomer_asks_for():
    text = full_report().to_markdown()
    for expected in [
        "# zeco_compile: graph 3 on rank 1 of 2",
        "- model code: `/home/someone/model.py:25`",
        "- tokens per rank: s27",
        "- inputs along the sequence: `ids` (dim 1); whole on every rank: `state`",
        "- linear-attention regions recognised: 1",
        "- other operations: 3 position-local, 1 halo exchange",
        "- sent by this rank per step, forward and backward: 16.0 KiB",
        "### gla_0: decay per channel, recognised by meaning",
        "`/home/someone/model.py:40`, in `forward`\n\n```python\no = (q @ k.mT * mask) @ v\n```",
        "| g | `sigmoid` | `[B, H, T, K] = [2, 4, s27, 16]` | `log(sigmoid)` | `/home/someone/model.py:40` |",
        "largest relative difference 3.2e-15 at T=13, B=2; T=29, B=3",
        "| `pad` | `F.pad` | **halo exchange** | 3 rows of the previous rank | `/home/someone/model.py:31` "
        "| `x = F.pad(x, (0, 0, 3, 0))` |",
        "Position-local, left as they are (3): `add` x1, `mul` x2",
        "| state of gla_0 | to the next rank | `B*H*K*V*4` | 8.0 KiB | 2 | 16.0 KiB "
        "| all-gather of k and v: 1.0 MiB |",
        "| gla_0 | `all_scan` | 4 | 8.0 KiB | 12.3 µs |",
        "| nccl | inside of 2 host(s) | 5 µs | 0 µs | 0.0025 ns | measured by ranks (0, 1) |",
        "| nccl | between hosts | 1 ms | 1 ms | 0.02 ns | assumed: 400 Gb/s a rank |",
        "| recognize | 250.0 | 1 | 20 -> 12 | -2 `matmul`, +1 `zeco.gated_linear_attention` |",
        "| `schedule` | `'auto'` |",
    ]:
        assert expected in text, expected


def test_every_table_row_has_the_cells_of_its_header():
    report = full_report()
    report.decisions.append(
        Decision("or", "a|b", "all-reduce", Location("/m|n.py", 1, "f", "x | y"), "a | b")
    )
    lines = report.to_markdown().splitlines()
    width = 0
    for line in lines:
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.replace("\\|", "").count("|")
        assert width in (0, cells), line
        width = cells


def test_empty_report_says_that_there_is_nothing():
    text = Report().to_markdown()
    assert "None in this graph." in text
    assert "None looks at other positions." in text
    assert "Nothing." in text
    assert "- process group: none (one rank)" in text


def test_an_error_stands_on_top():
    text = Report(error="UnsupportedOp: `torch.flip` ...").to_markdown()
    assert text.index("refused or failed") < text.index("UnsupportedOp") < text.index("Each rank runs")


def test_json_round_trip_holds_every_field():
    report = full_report()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["regions"][0]["roles"]["g"]["transform"] == "log(sigmoid)"
    assert data["regions"][0]["location"] == {
        "file": "/home/someone/model.py",
        "line": 40,
        "function": "forward",
        "code": "o = (q @ k.mT * mask) @ v",
    }
    assert data["communication"][0]["alternatives"] == {"all-gather of k and v": 1 << 20}
    assert data["scans"][0]["links"]["intra"] == NEAR
    assert data["bytes_per_step"] == 16384
    assert data["decisions"][0]["location"]["code"] == "x = F.pad(x, (0, 0, 3, 0))"


def test_bytes_of_a_symbolic_length_are_not_summed():
    report = full_report()
    report.communication.append(Communication("halo", "to the next rank", "B*3*D*4"))
    assert report.bytes_per_step is None
    assert "depends on the length" in report.to_markdown()
    assert "| symbolic | 1 | symbolic |" in report.to_markdown()


def test_recording_times_a_pass_and_counts_its_ops():
    report = Report()
    gm = fx.symbolic_trace(lambda x: torch.sin(x) + 1)
    with report.recording("sin to cos", gm) as record:
        for node in gm.graph.nodes:
            if node.target is torch.sin:
                node.target = torch.cos
                record.matches += 1
    (kept,) = report.passes
    assert kept is record
    assert (kept.name, kept.matches, kept.nodes_before, kept.nodes_after) == ("sin to cos", 1, 4, 4)
    assert kept.op_difference == {"torch.cos": 1, "torch.sin": -1}
    assert kept.seconds > 0


def test_a_pass_that_raises_is_recorded_with_what_it_did():
    report = Report()
    gm = fx.symbolic_trace(lambda x: torch.sin(x))

    def half_a_pass():
        with report.recording("half", gm):
            next(node for node in gm.graph.nodes if node.op == "call_function").target = torch.cos
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        half_a_pass()
    assert report.passes[0].op_difference == {"torch.cos": 1, "torch.sin": -1}


def test_names_of_ops_are_those_that_people_write():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            y = torch.nn.functional.silu(self.linear(x)).view(-1) + 1
            return torch.ops.aten.sin.default(y)

    graph = fx.symbolic_trace(Model()).graph
    names = [op_name(node) for node in graph.nodes]
    assert names == [
        "placeholder",
        "call_module",
        "F.silu",
        "Tensor.view",
        "operator.add",
        "aten.sin.default",
        "output",
    ]


def test_counts_include_subgraphs():
    inner = fx.symbolic_trace(lambda x: torch.sin(x))
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.sin, (graph.call_module("inner", (x,)),)))
    gm = fx.GraphModule({"inner": inner}, graph)
    assert count_ops(gm) == {"torch.sin": 2, "call_module": 1}


def test_op_difference_names_only_what_changed():
    assert op_difference({"a": 1, "b": 2, "c": 1}, {"b": 2, "c": 3, "d": 1}) == {"a": -1, "c": 2, "d": 1}


def test_bytes_are_printed_in_binary_units():
    assert [format_bytes(n) for n in (0, 512, 1536, 3 << 20, 5 << 40)] == [
        "0 B",
        "512 B",
        "1.5 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (2.5e-7, "0.25 µs"), (7.84e-6, "7.84 µs"), (0.00125, "1.25 ms"), (3, "3 s")],
)
def test_times_are_readable(seconds, text):
    assert format_seconds(seconds) == text
