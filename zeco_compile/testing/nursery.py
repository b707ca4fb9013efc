"""Processes that have imported everything before they start: one process imports, the ranks are forks of it.

Importing PyTorch and its compiler takes some seconds of processor time, and a test that breaks a rank throws all of
its processes away. `fork_worker` asks a process that has done the imports, and nothing else, for a fork that runs
worker.py. There is one such process for each environment that workers were asked for; it ends with this process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from zeco_compile.frames import roomy
from zeco_compile.garbage import collect_seldom

_IGNORED = (
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
)  # they change from test to test; a job brings its own sys.path
_MOST = 1 << 20


class Worker:
    """A forked rank, with the part of `subprocess.Popen` that the pool needs."""

    def __init__(self, nursery: _Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"status": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_worker(arguments: Sequence[str], environment: Mapping[str, str], pipe: int, log: int) -> Worker:
    """A process that runs `worker.main(arguments)` with the file descriptor `pipe` as it is numbered there, in
    ``--pipe``, and writes to `log`."""
    key = tuple(sorted((k, v) for k, v in environment.items() if k not in _IGNORED))
    with _LOCK:
        nursery = _NURSERIES.get(key)
        if nursery is None or nursery.process.poll() is not None:
            nursery = _NURSERIES[key] = _Nursery(environment)
    return Worker(nursery, nursery.ask({"fork": list(arguments)}, [pipe, log]))


class _Nursery:
    """The process that forks, and the socket to ask it by."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    "from zeco_compile.testing.nursery import main; main()",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
            )

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self.lock:
            socket.send_fds(self.socket, [json.dumps(request).encode()], descriptors)
            answer = self.socket.recv(_MOST)
        if not answer:
            raise ConnectionError("the process that ranks are forked from has ended")
        return json.loads(answer)


_NURSERIES: dict[Any, _Nursery] = {}
_LOCK = threading.Lock()


# ----- in the process that forks


@roomy
def main() -> None:
    """Imports, then forks when asked, until the socket closes."""
    ours = socket.socket(fileno=int(sys.argv[1]))
    _import_everything()
    collect_seldom()  # looking for garbage is a fifth of a rank's time otherwise
    codes: dict[int, int] = {}
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(ours, _MOST, 2)
        except InterruptedError:
            continue
        if not message:
            return
        request = json.loads(message)
        if "fork" in request:
            pid = os.fork()
            if pid == 0:
                ours.close()
                _become_worker(request["fork"], *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            answer: int | None = pid
        else:
            answer = _status(request["status"], codes)
        ours.send(json.dumps(answer).encode())


def _status(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        with suppress(ChildProcessError):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def _become_worker(arguments: Sequence[str], pipe: int, log: int) -> None:
    from zeco_compile.testing import worker

    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        worker.main([*arguments, f"--pipe={pipe}", f"--parent={os.getppid()}"])
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import_everything() -> None:
    import torch
    import torch._inductor.compile_fx

    import zeco_compile.backend
    import zeco_compile.testing.on_rank
    import zeco_compile.testing.worker  # noqa: F401

    torch.set_num_threads(1)
    # What is imported only when something is compiled. No backward: autograd's threads would not survive a fork.
    torch.compile(lambda x: (x @ x).sin(), backend="aot_eager")(torch.ones(2, 2))
    torch._dynamo.reset()
