"""Every piece of private PyTorch API that the face uses still is where it was and does what it did."""

import json
import os
import subprocess
import sys


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
