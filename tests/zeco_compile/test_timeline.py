"""Lanes and shares of traces made by hand, and of a real trace of two ranks over gloo."""

from __future__ import annotations

import gzip
import json
import xml.etree.ElementTree

import pytest
import torch
import torch.distributed as dist

from zeco_compile import timeline
from zeco_compile.errors import InvalidTrace


def kernel(name: str, start: float, duration: float, category: str = "kernel", thread: int = 7) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread}


def test_intervals():
    assert timeline.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == ((0, 4), (5, 6))
    taken = ((1, 2), (3, 5), (9, 12))
    assert timeline.without(((0, 4), (4, 8), (10, 11)), taken) == ((0, 1), (2, 3), (5, 8))
    assert timeline.without(((0, 4),), ()) == ((0, 4),)


@pytest.mark.parametrize(
    "scan", ["ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "_all_scan_chain"]
)
def test_kernels(scan):
    events = [
        kernel("gemm", 0, 10),
        kernel(scan, 8, 12, thread=20),
        kernel("gla_chunk_pairs", 12, 4),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 16, 2),
        kernel("Memset", 30, 1, "gpu_memset"),
        kernel("zeco::scan_wait", 0, 50, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = timeline.lanes(events, 3, shift=100)
    assert found.device == "cuda"
    assert found.compute == ((100, 110), (112, 116), (130, 131))
    assert found.scan == ((108, 120),)
    assert found.exposed == ((110, 112), (116, 120))
    assert found.to_dict() == {
        "rank": 3,
        "device": "cuda",
        "span_us": 31,
        "compute_us": 15,
        "scan_us": 12,
        "exposed_us": 6,
        "exposed_share_of_scan": 0.5,
        "exposed_share_of_span": 6 / 31,
    }
    assert timeline.lanes(events, 0, scan="gemm").scan == ((0, 10),)


def test_operators():
    events = [
        kernel("zeco::scan_start", 0, 2, "cpu_op"),
        kernel("zeco::scan_start", 2, 1, "cpu_op"),
        kernel("aten::mm", 3, 4, "cpu_op"),
        kernel("outer", 8, 6, "cpu_op"),
        kernel("zeco::scan_wait", 9, 3, "cpu_op"),
        kernel("zeco::scan_wait", 20, 1, "cpu_op"),
        kernel("python_function", 0, 100, "python_function"),
    ]
    found = timeline.lanes(events, 0)
    assert found.compute == ((0, 7), (8, 9), (12, 14))
    assert found.scan == ((0, 21),)
    assert found.exposed == ((9, 12), (20, 21))
    assert timeline.summary([found, found])["exposed_share_of_scan"] == 4 / 21


def test_what_is_no_trace(tmp_path):
    path = tmp_path / "trace.json"
    for text in ("{", "[]", "{}", "3"):
        path.write_text(text)
        with pytest.raises(InvalidTrace, match=r"no trace of torch\.profiler"):
            timeline.read_trace(path)
    path.write_text('{"traceEvents": []}')
    with pytest.raises(InvalidTrace, match="neither a kernel nor an operator"):
        timeline.read_trace(path)
    found = timeline.lanes([kernel("gemm", 0, 10)], 0)
    with pytest.raises(InvalidTrace, match="the traces last 10 µs"):
        timeline.draw([found], (20.0, 30.0))


def test_window_and_ticks():
    found = timeline.lanes([kernel("gemm", number * 10, 5) for number in range(1000)], 0)
    for window in (None, (100.0, 300.0), (0.0, 1.0)):
        root = xml.etree.ElementTree.fromstring(timeline.draw([found], window))
        ticks = [each.text or "" for each in root.iter() if (each.text or "").endswith(("µs", "ms"))]
        assert 4 <= len(ticks) <= 10
    assert [timeline._round_step(value) for value in (0.03, 0.1, 1, 1.5, 3, 7, 12, 600)] == [
        *(pytest.approx(0.05), pytest.approx(0.1), 1, 2, 5, 10, 20, 1000)
    ]


def _profile(rank: int, folder: str) -> None:
    import zeco_compile

    q, k, v = (torch.randn(1, 512, 2, 32, requires_grad=True) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(1, 512, 2, 32))
    zeco_compile.gated_linear_attention(q, k, v, g).sum().backward()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            torch.ops.zeco.gated_linear_attention(
                q, k, v, g, 1.0, None, False, "all_scan", 2, dist.group.WORLD.group_name
            )[0].sum().backward()
    profiler.export_chrome_trace(f"{folder}/trace{rank}.json")


def test_two_ranks_over_gloo(ranks, tmp_path, capsys):
    ranks(2).run(_profile, str(tmp_path))
    packed = tmp_path / "trace1.json.gz"
    packed.write_bytes(gzip.compress((tmp_path / "trace1.json").read_bytes()))
    out = tmp_path / "pictures" / "timeline.svg"
    timeline.main([str(packed), str(tmp_path / "trace0.json"), "--out", str(out)])
    result = json.loads(out.with_suffix(".json").read_text())
    assert [row["rank"] for row in result["ranks"]] == [0, 1]
    for row in result["ranks"]:
        assert row["device"] == "cpu"
        assert 0 < row["exposed_us"] < row["scan_us"] < row["span_us"]
        assert 0 < row["compute_us"] < row["span_us"]
        assert row["exposed_share_of_scan"] == pytest.approx(row["exposed_us"] / row["scan_us"])
    found = [timeline.read_trace(tmp_path / f"trace{rank}.json") for rank in range(2)]
    # two scans forward, two backward; both ranks at the same time
    assert [len(each.exposed) for each in found] == [4, 4]
    assert found[0].span[0] < found[1].span[1]
    assert found[1].span[0] < found[0].span[1]
    text = out.read_text()
    xml.etree.ElementTree.fromstring(text)
    for expected in ("rank 0: compute", "rank 1: compute", "exposed", timeline._COLOURS["exposed"]):
        assert expected in text
    assert "All-Scan" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        timeline.main([str(packed), "--out", "timeline.gif"])
