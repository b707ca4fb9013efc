"""One rank of the pool, in a process of its own.

It joins a gloo group, then answers jobs (a pickled function and its arguments) one by one until its pipe
closes. It never outlives the process that started it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.testing.pickling import dumps


@dataclass(frozen=True)
class Outcome:
    """What one rank answered to one job.

    ``status`` is "ok" (then ``value`` holds what the function returned), "raised" (then ``error`` holds the
    exception, the compiler's own wherever Dynamo had wrapped it), "died" or "silent" (no answer in time).
    ``traceback`` is text: where it raised, or what the process was doing or last wrote.
    """

    rank: int
    status: Literal["ok", "raised", "died", "silent"]
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


def innermost_zeco_error(error: BaseException) -> ZecoError | None:
    """The ZecoError that an exception is, wraps (as Dynamo does) or was raised from, if there is one."""
    seen: set[int] = set()
    queue: list[BaseException | None] = [error]
    while queue:
        candidate = queue.pop(0)
        if candidate is None or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if isinstance(candidate, ZecoError):
            return candidate
        inner = getattr(candidate, "inner_exception", None)  # torch._dynamo.exc.BackendCompilerFailed
        queue += [
            inner if isinstance(inner, BaseException) else None,
            candidate.__cause__,
            candidate.__context__,
        ]
    return None


def _raised(rank: int, error: BaseException) -> Outcome:
    text = traceback.format_exc()
    plain = (innermost_zeco_error(error) or error).with_traceback(None)
    plain.__cause__ = plain.__context__ = None
    return Outcome(rank, "raised", error=plain, traceback=text)


def _rebuilt(cls: type[BaseException], message: str) -> BaseException:
    error = cls.__new__(cls)
    error.args = (message,)
    return error


class _ByMessage(BaseException):
    """Stands in for an exception that only survives the journey as its class and its message."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self.error), str(self.error))


def _dumps(outcome: Outcome) -> bytes:
    try:
        answer = dumps(outcome)
        pickle.loads(answer)  # many exceptions pickle, but cannot be built again from their arguments
        return answer
    except Exception as error:
        if outcome.error is None:
            return _dumps(_raised(outcome.rank, TypeError(f"the result cannot be sent back: {error}")))
        return dumps(replace(outcome, error=_ByMessage(outcome.error)))


def _follow_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _serve(rank: int, pipe: Connection) -> None:
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            sys.path[:], call = pickle.loads(job)
            function, args = pickle.loads(call)
            outcome = Outcome(rank, "ok", value=function(*args))
        except KeyboardInterrupt:
            return
        except Exception as error:
            outcome = _raised(rank, error)
        pipe.send_bytes(_dumps(outcome))
        outcome = function = args = None  # type: ignore[assignment]  # a model must not outlive its job


def _meet_others(store: dist.TCPStore, place: argparse.Namespace) -> None:
    """Starting takes long on a busy machine, longer than the timeout of a group may be."""
    store.set(f"started/{place.rank}", "")
    store.wait([f"started/{rank}" for rank in range(place.world_size)], timedelta(minutes=3))


def main(arguments: Sequence[str]) -> None:
    """Runs until the pipe closes; the arguments are the pool's business."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "world-size", "pipe", "port", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--group-timeout", type=float, required=True)
    place = parser.parse_args(arguments)

    # The parent asks for all threads' tracebacks with this signal when a rank stays silent.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    threading.Thread(target=_follow_parent, args=(place.parent,), daemon=True).start()

    pipe = Connection(place.pipe)
    torch.set_num_threads(1)
    timeout = timedelta(seconds=place.group_timeout)
    store = dist.TCPStore("127.0.0.1", place.port, is_master=False, timeout=timeout)
    _meet_others(store, place)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
    )
    pipe.send_bytes(_dumps(Outcome(place.rank, "ok")))
    _serve(place.rank, pipe)
    # Not through the interpreter's exit: a communicator's thread may be blocked on a neighbour that has left.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
