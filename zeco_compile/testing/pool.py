"""Real processes in a gloo group, started once per world size and kept for the next example.

A pool that lost a process, or whose ranks may stand at different places after a failure, is thrown away and
started again at the next use. Nothing waits without a limit.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.testing.errors import HarnessError, RankDied, RankFailed, RankTimedOut, RemoteTraceback
from zeco_compile.testing.nursery import Worker, fork_worker
from zeco_compile.testing.pickling import dumps_by_value
from zeco_compile.testing.worker import Outcome

# After one rank failed, the others are given this long: enough to raise for themselves, or to run into the
# group's timeout where that is shorter.
_GRACE = 20.0
_START_TIMEOUT = 180.0
_LOG_TAIL = 6000


def run_on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    timeout: float = 180.0,
    group_timeout: float = 60.0,
    check: bool = True,
) -> list[Any]:
    """``function(*args)`` on every rank of a gloo group of ``world_size`` processes; what each returned.

    Inside, ``torch.distributed`` is initialised. The function and its arguments travel by cloudpickle,
    its module by value, so it may be a closure or stand in a test file. ``group_timeout`` is the process
    group's own timeout in seconds, ``timeout`` the limit for the whole call.

    With ``check=False`` every rank's :class:`Outcome` comes back and nothing is raised. Otherwise raises
    what the ranks raised when that is a :class:`ZecoError`, else :class:`RankFailed`, :class:`RankDied`
    or :class:`RankTimedOut`, with every failing rank's traceback.
    """
    outcomes = _pool(world_size, group_timeout).run(function, args, timeout)
    if not check:
        return list(outcomes)
    raise_failures(outcomes)
    return [outcome.value for outcome in outcomes]


def raise_failures(outcomes: Sequence[Outcome]) -> None:
    """Raises for the ranks that failed; returns when none did."""
    failed = [outcome for outcome in outcomes if outcome.status != "ok"]
    if not failed:
        return
    text = "\n".join(f"--- rank {o.rank} of {len(outcomes)}: {describe(o)}\n{o.traceback}" for o in failed)
    summary = "; ".join(f"rank {o.rank} {describe(o).partition(chr(10))[0]}" for o in failed)
    died = [o for o in failed if o.status == "died"]
    typed = [o.error for o in failed if isinstance(o.error, ZecoError)]
    if died:
        raise RankDied(f"{summary}\n{text}")
    foreign = [o for o in failed if o.status == "raised" and not isinstance(o.error, ZecoError)]
    if typed and not foreign:
        error = typed[0]
        others = "" if len(typed) == len(failed) else f"; {summary}"
        error.add_note(f"(raised on {len(typed)} of {len(outcomes)} ranks{others})")
        raise error from RemoteTraceback(text)
    if foreign:
        raise RankFailed(f"{summary}\n{text}") from foreign[0].error
    raise RankTimedOut(f"{summary}\n{text}")


def describe(outcome: Outcome) -> str:
    """What a rank did, as the end of a sentence about it."""
    if outcome.status == "ok":
        return str(outcome.value)
    if outcome.status == "raised":
        return f"raised {type(outcome.error).__name__}: {outcome.error}"
    return "died" if outcome.status == "died" else "did not answer in time"


def close_pools() -> None:
    """Ends every process of every pool. Happens by itself at exit."""
    with _LOCK:
        for pool in _POOLS.values():
            pool.close()
        _POOLS.clear()


class Pool:
    """``world_size`` processes in one gloo group that answer one job at a time."""

    def __init__(self, world_size: int, group_timeout: float) -> None:
        if world_size < 1:
            raise HarnessError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        self.group_timeout = group_timeout
        self._processes: list[Worker] = []
        self._pipes: list[Connection] = []
        self._folder: Path | None = None
        self._store: dist.TCPStore | None = None
        self._busy = threading.Lock()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Outcome]:
        """One job on every rank; never raises for what a rank did, see :class:`Outcome`."""
        job = _job(function, args)
        with self._busy:
            try:
                if not self._processes:
                    self._start()
                outcomes = self._ask(job, timeout)
                if any(o.status != "ok" for o in outcomes) and not self._still_in_step(outcomes):
                    self.close()
            except BaseException:
                self.close()
                raise
        return outcomes

    def kill(self, rank: int) -> None:
        """Ends one rank at once, without any clean-up on its side. The next job finds it dead."""
        self._processes[rank].kill()
        self._processes[rank].wait()

    def close(self) -> None:
        """Kills the processes and forgets them; the next job starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes, self._pipes, self._store = [], [], None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="zeco-ranks-"))
        # The parent keeps the store, at a port that the system chose, so that it outlives any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            self._start_rank(rank, self._store.port)
        ready = self._collect(_START_TIMEOUT)
        failed = [o for o in ready if o.status != "ok"]
        if failed:
            text = "\n".join(f"rank {o.rank} {describe(o)}\n{o.traceback}" for o in failed)
            raise HarnessError(f"the processes of a world of {self.world_size} did not start:\n{text}")

    def _start_rank(self, rank: int, port: int) -> None:
        ours, theirs = Pipe(duplex=True)
        place = {
            "rank": rank,
            "world-size": self.world_size,
            "port": port,
            "group-timeout": self.group_timeout,
        }
        arguments = [f"--{name}={value}" for name, value in place.items()]
        with self._log(rank).open("wb") as log, theirs:
            process = fork_worker(arguments, _worker_environment(), theirs.fileno(), log.fileno())
        self._processes.append(process)
        self._pipes.append(ours)

    def _ask(self, job: bytes, timeout: float) -> list[Outcome]:
        for pipe in self._pipes:
            with suppress(OSError):  # a dead rank shows when its answer is read
                pipe.send_bytes(job)
        return self._collect(timeout)

    def _collect(self, timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                outcomes[rank] = self._receive(rank, pipe)
                if outcomes[rank].status != "ok":
                    grace = max(_GRACE, self.group_timeout + 5.0)
                    deadline = min(deadline, time.monotonic() + grace)
        for rank in waiting.values():
            outcomes[rank] = Outcome(rank, "silent", traceback=self._interrupted(rank))
        return [outcomes[rank] for rank in range(self.world_size)]

    def _receive(self, rank: int, pipe: Connection) -> Outcome:
        try:
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            process = self._processes[rank]
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            code = process.returncode
            how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            return Outcome(rank, "died", traceback=f"({how}) last output:\n{self._last_output(rank)}")
        outcome = pickle.loads(answer)
        assert isinstance(outcome, Outcome)
        return outcome

    def _interrupted(self, rank: int) -> str:
        """What a rank that does not answer is doing: faulthandler writes it on this signal, whatever runs."""
        before = self._log(rank).stat().st_size
        with suppress(ProcessLookupError):
            self._processes[rank].send_signal(signal.SIGUSR1)
        for _ in range(50):
            time.sleep(0.05)
            if self._log(rank).stat().st_size > before:
                time.sleep(0.1)
                break
        return f"it was here:\n{self._last_output(rank)}"

    def _still_in_step(self, outcomes: Sequence[Outcome]) -> bool:
        """After every rank refused alike the processes can serve again, if they still meet at a barrier."""
        if not all(o.status == "raised" and isinstance(o.error, ZecoError) for o in outcomes):
            return False
        if len({type(o.error) for o in outcomes}) > 1:
            return False
        return all(o.status == "ok" for o in self._ask(_job(_meet, ()), 10.0))

    def _log(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank{rank}.log"

    def _last_output(self, rank: int) -> str:
        return self._log(rank).read_bytes()[-_LOG_TAIL:].decode(errors="replace")


def _meet() -> None:
    dist.barrier()


def _worker_environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"})
    # The host's own name need not resolve; these processes only talk to each other.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # of a launcher that may have started us
    return environment


def _job(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Where modules are found in this process now, and what to call."""
    return pickle.dumps((sys.path, dumps_by_value(function, args)))


_POOLS: dict[tuple[int, float], Pool] = {}
_LOCK = threading.Lock()


def _pool(world_size: int, group_timeout: float) -> Pool:
    with _LOCK:
        return _POOLS.setdefault((world_size, group_timeout), Pool(world_size, group_timeout))


_OWNER = os.getpid()


def _close_at_exit() -> None:
    if os.getpid() == _OWNER:  # a fork of the process that made the pools must leave them alone
        close_pools()


atexit.register(_close_at_exit)
