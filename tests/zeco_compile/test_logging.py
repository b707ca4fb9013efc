"""``zeco_compile`` logs under its own name, which TORCH_LOGS knows without being told.

PyTorch reads TORCH_LOGS while ``import torch`` runs, before any backend is looked up, and takes the name of
any installed package: it imports the package and gives its logger a level and a handler. So there is nothing
to register; what has to hold is that the import works at that moment, whichever of the two comes first.
"""

import os
import subprocess
import sys

import pytest

REPORT = (
    "import logging, zeco_compile.debug\n"
    "for name in ('zeco_compile', 'zeco_compile.debug', 'zeco_compile.passes.report'):\n"
    "    log = logging.getLogger(name)\n"
    "    log.debug('debug from ' + name)\n"
    "    log.info('info from ' + name)\n"
    "    log.error('error from ' + name)\n"
)


def output_of(script, torch_logs=None):
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    environment["OMP_NUM_THREADS"] = "1"
    if torch_logs is not None:
        environment["TORCH_LOGS"] = torch_logs
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("first", "torch_logs", "shown"),
    [
        ("import torch", "+zeco_compile", ["debug", "info", "error"]),
        ("import zeco_compile", "+zeco_compile,+dynamo", ["debug", "info", "error"]),
        ("import zeco_compile.debug", "zeco_compile", ["info", "error"]),
        ("import zeco_compile.passes.errors", "-zeco_compile", ["error"]),
    ],
)
def test_torch_logs_sets_the_level_of_all_loggers(first, torch_logs, shown):
    output = output_of(f"{first}\n{REPORT}", torch_logs)
    for name in ("zeco_compile", "zeco_compile.debug", "zeco_compile.passes.report"):
        for level in ("debug", "info", "error"):
            lines = [line for line in output.splitlines() if line.endswith(f"{level} from {name}")]
            assert len(lines) == (level in shown), output


def test_without_torch_logs_only_what_matters_is_shown():
    output = output_of(f"import torch\n{REPORT}")
    assert "error from zeco_compile.debug" in output
    assert "info from" not in output


def test_set_logs_takes_the_name_in_a_running_process():
    script = (
        "import logging, torch\ntorch._logging.set_logs(modules={'zeco_compile': logging.DEBUG})\n" + REPORT
    )
    assert "debug from zeco_compile.passes.report" in output_of(script)
