"""Real processes over gloo for tests, kept alive from one test to the next.

`RankPool(world_size).run(function, *args)` calls ``function(rank, *args)`` on every rank at once and
returns the results, in order. Functions go over by value (cloudpickle), so a test module's own functions
work. An exception on a rank comes back as its result where `run(..., errors=True)` asks for it, and is
raised otherwise. The ranks find each other through a file, and this process finds them through a socket
whose name the system chose.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import cloudpickle


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


class RankPool:
    """``world_size`` processes of one gloo world with the given timeout of its process group."""

    def __init__(self, world_size: int, timeout_seconds: float = 60.0) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment = {**os.environ, **one_thread}
        with Listener(family="AF_UNIX") as listener:
            self._processes = [
                subprocess.Popen(
                    [
                        sys.executable,
                        __file__,
                        str(listener.address),
                        f"{self._folder.name}/store",
                        str(rank),
                        str(world_size),
                        str(timeout_seconds),
                    ],
                    env=environment,
                )
                for rank in range(world_size)
            ]
            connections = [listener.accept() for _ in range(world_size)]
        self._connections: list[Connection] = [None] * world_size  # type: ignore[list-item]
        for connection in connections:
            self._connections[connection.recv()] = connection

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: list[int] | None = None,
        errors: bool = False,
        seconds: float = 240.0,
    ) -> list[Any]:
        """``function(rank, *args)`` on every rank (or on ``ranks``, with None for the others)."""
        module = sys.modules.get(function.__module__)
        if module is not None and function.__module__ != "__main__":
            cloudpickle.register_pickle_by_value(module)
        task = cloudpickle.dumps((function, args))
        asked = list(range(self.world_size)) if ranks is None else ranks
        for rank in asked:
            self._connections[rank].send_bytes(task)
        results: list[Any] = [None] * self.world_size
        deadline = time.monotonic() + seconds
        for rank in asked:
            if not self._connections[rank].poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise RankFailed(f"rank {rank} gave no result within {seconds} s")
            ok, value, text = cloudpickle.loads(self._connections[rank].recv_bytes())
            if not ok and not errors:
                value = RankFailed(f"rank {rank}:\n{text}")
            results[rank] = value
        if not errors:
            for result in results:
                if isinstance(result, RankFailed):
                    raise result
        return results

    def kill(self, rank: int) -> None:
        """Ends one rank at once, without any clean-up on its side."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def _serve(address: str, store: str, rank: int, world_size: int, timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with Client(address, family="AF_UNIX") as connection:
        connection.send(rank)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        while True:
            try:
                function, args = cloudpickle.loads(connection.recv_bytes())
            except EOFError:
                break
            try:
                answer = (True, function(rank, *args), "")
            except Exception as error:
                answer = (False, error, traceback.format_exc())
            try:
                reply = cloudpickle.dumps(answer)
            except Exception:
                error = RuntimeError(f"could not be pickled: {answer[1]!r}")
                reply = cloudpickle.dumps((False, error, answer[2]))
            connection.send_bytes(reply)
    # Peers may be gone already; nothing that this process still holds needs an orderly end.
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
