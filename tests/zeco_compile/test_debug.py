"""Dumps are complete, readable, flushed when a pass raises, and never end a compilation."""

import ast
import json
import logging
import shutil

import pytest
import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

from zeco_compile.debug import DebugDump
from zeco_compile.errors import DebugFolderUnusable, UnsupportedOp
from zeco_compile.passes.locations import user_location
from zeco_compile.passes.report import Report
from zeco_compile.settings import Settings


def model(x):
    y = torch.sin(x)  # the line of sin
    return y.flip(1)


@pytest.fixture
def gm():
    """What Dynamo hands to a backend."""
    captured = []

    def backend(gm, example_inputs):
        captured.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(torch.ones(2, 3))
    torch._dynamo.reset()
    return captured[0]


def dump_to(folder, rank=0, graph_index=0):
    return DebugDump(Settings.parse({"debug_dir": folder}), rank, graph_index)


def replace_sin(gm):
    for node in gm.graph.nodes:
        if node.target is torch.sin:
            node.target = torch.cos
    gm.recompile()


def test_one_file_per_graph_with_shapes_strides_devices_and_source_lines(gm, tmp_path):
    dump = dump_to(tmp_path, rank=1, graph_index=2)
    report = Report(rank=1, world_size=2, graph=2)
    with dump.compiling(report, gm):
        dump.graph("user_graph", gm)
        with report.recording("recognize", gm):
            replace_sin(gm)
        dump.graph("after recognize", gm)
    folder = tmp_path / "rank1" / "graph2"
    assert sorted(path.name for path in folder.iterdir()) == [
        "00_user_graph.py",
        "01_after_recognize.py",
        "report.json",
        "report.md",
    ]
    before = (folder / "00_user_graph.py").read_text()
    after = (folder / "01_after_recognize.py").read_text()
    assert before.startswith("# user graph: graph 2 on rank 1\n")
    assert "torch.sin(" in before
    assert "torch.cos(" not in before
    assert "torch.cos(" in after
    assert '"f32[2, 3][3, 1]cpu"' in before
    assert f"# File: {__file__}:" in before
    assert "the line of sin" in before
    ast.parse(before)
    ast.parse(after)
    data = json.loads((folder / "report.json").read_text())
    assert data["passes"][0]["op_difference"] == {"torch.cos": 1, "torch.sin": -1}
    assert (folder / "report.md").read_text() == report.to_markdown()
    assert report.error == ""


def test_a_pass_that_raises_leaves_graph_error_and_report(gm, tmp_path):
    dump = dump_to(tmp_path)
    report = Report()

    def passes():
        with dump.compiling(report, gm):
            dump.graph("user_graph", gm)
            replace_sin(gm)
            node = next(node for node in gm.graph.nodes if node.target is torch.cos)
            raise UnsupportedOp("torch.cos", location=user_location(node), why="a test.")

    with pytest.raises(UnsupportedOp):
        passes()
    folder = tmp_path / "rank0" / "graph0"
    assert sorted(path.name for path in folder.iterdir()) == [
        "00_user_graph.py",
        "01_when_it_failed.py",
        "error.txt",
        "report.json",
        "report.md",
    ]
    assert "torch.sin(" in (folder / "00_user_graph.py").read_text()
    assert "torch.cos(" in (folder / "01_when_it_failed.py").read_text()
    error = (folder / "error.txt").read_text()
    assert error.startswith("UnsupportedOp: `torch.cos` cannot be computed on one rank's slice")
    assert "in passes\n" in error
    assert json.loads((folder / "report.json").read_text())["error"].startswith("UnsupportedOp: `torch.cos`")
    assert "refused or failed" in (folder / "report.md").read_text()


def test_graphs_are_on_disk_before_the_next_pass(gm, tmp_path):
    dump = dump_to(tmp_path)
    dump.graph("user_graph", gm)
    assert (tmp_path / "rank0" / "graph0" / "00_user_graph.py").read_text().endswith("\n")


def test_a_request_to_trace_again_is_no_failure(gm, tmp_path):
    dump = dump_to(tmp_path)
    report = Report()

    def passes():
        with dump.compiling(report, gm):
            dump.graph("user_graph", gm)
            raise TensorifyScalarRestartAnalysis(restart_reason="see the length")

    with pytest.raises(TensorifyScalarRestartAnalysis):
        passes()
    assert [path.name for path in (tmp_path / "rank0" / "graph0").iterdir()] == ["00_user_graph.py"]
    assert report.error == ""


def test_files_of_an_earlier_run_go_and_other_files_stay(gm, tmp_path):
    folder = tmp_path / "rank0" / "graph0"
    folder.mkdir(parents=True)
    for name in ("07_after_old.py", "error.txt", "report.md", "notes.txt", "mine.py"):
        (folder / name).write_text("old")
    dump_to(tmp_path).graph("user_graph", gm)
    assert sorted(path.name for path in folder.iterdir()) == ["00_user_graph.py", "mine.py", "notes.txt"]


def test_ranks_and_graphs_do_not_share_a_folder(gm, tmp_path):
    for rank in range(2):
        for graph_index in range(2):
            dump_to(tmp_path, rank, graph_index).graph("user_graph", gm)
    assert len(list(tmp_path.glob("rank*/graph*/00_user_graph.py"))) == 4


def test_nothing_is_written_or_printed_without_a_folder(gm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ZECO_DEBUG", raising=False)
    # Nobody reads the trace (pytest's capturing of logs may count as somebody).
    monkeypatch.setattr("zeco_compile.debug.trace_artifact", lambda name, encoding, payload: None)
    monkeypatch.setattr(type(gm), "print_readable", lambda *_, **__: pytest.fail("printed"))
    dump = DebugDump(Settings.parse(), 0, 0)
    with dump.compiling(Report(), gm):
        dump.graph("user_graph", gm)
    assert list(tmp_path.iterdir()) == []


def test_an_unusable_folder_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DebugFolderUnusable) as caught:
        dump_to(tmp_path / "file" / "dumps")
    assert str(tmp_path / "file" / "dumps") in str(caught.value)
    assert "ZECO_DEBUG" in str(caught.value)


def test_a_folder_that_takes_no_files_is_an_error_at_the_start(tmp_path, monkeypatch):
    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(DebugFolderUnusable, match="No space left on device"):
        dump_to(tmp_path)


def test_a_folder_that_vanishes_while_compiling_is_logged_and_survived(gm, tmp_path, caplog):
    dump = dump_to(tmp_path / "dumps")
    shutil.rmtree(tmp_path / "dumps")
    with caplog.at_level(logging.ERROR, logger="zeco_compile"), dump.compiling(Report(), gm):
        dump.graph("user_graph", gm)
    assert len(caplog.records) == 3
    assert "the compilation goes on without it" in caplog.text


def test_a_graph_that_cannot_be_printed_is_replaced_by_the_reason(gm, tmp_path, monkeypatch, caplog):
    def broken(self, *_, **__):
        raise RuntimeError("node without users\nerased")

    monkeypatch.setattr(type(gm), "print_readable", broken)
    with caplog.at_level(logging.ERROR, logger="zeco_compile"):
        dump_to(tmp_path).graph("user_graph", gm)
    text = (tmp_path / "rank0" / "graph0" / "00_user_graph.py").read_text()
    assert "# This could not be printed:" in text
    assert "node without users" in text
    ast.parse(text)
    assert "could not print 00_user_graph.py" in caplog.text


def test_the_same_texts_go_into_the_trace(gm, tmp_path, monkeypatch):
    artifacts = {}
    monkeypatch.setattr(
        "zeco_compile.debug.trace_artifact",
        lambda name, encoding, payload: artifacts.update({name: (encoding, payload())}),
    )
    dump = dump_to(tmp_path, graph_index=4)
    with dump.compiling(Report(), gm):
        dump.graph("user_graph", gm)
    folder = tmp_path / "rank0" / "graph4"
    assert artifacts == {
        "zeco_graph4_00_user_graph.py": ("string", (folder / "00_user_graph.py").read_text()),
        "zeco_graph4_report.json": ("json", (folder / "report.json").read_text()),
        "zeco_graph4_report.md": ("string", (folder / "report.md").read_text()),
    }
