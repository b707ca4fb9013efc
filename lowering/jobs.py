"""Pieces of communication under way: on a worker thread (gloo), or on a side stream (NCCL)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Job(Generic[T]):
    """A piece of communication under way. ``wait`` returns its result or raises what it raised."""

    def done(self) -> bool:
        """Whether ``wait`` would not block (the host: a CUDA job is always done in that sense)."""
        raise NotImplementedError

    def wait(self) -> T:
        """The result. May be called more than once."""
        raise NotImplementedError


class WorkerJob(Job[T]):
    def __init__(self, run: Callable[[], T]) -> None:
        self._run: Callable[[], T] | None = run
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def execute(self) -> None:
        try:
            assert self._run is not None
            self._result = self._run()
        except BaseException as error:  # handed to whoever waits; the worker itself must live on
            self._error = error
        finally:
            self._run = None  # lets go of the tensors that the job read
            self._finished.set()

    def fail(self, error: BaseException) -> None:
        self._run = None
        self._error = error
        self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> T:
        self._finished.wait()
        if self._error is not None:
            raise self._error
        return self._result


class StreamJob(Job[T]):
    """Work enqueued on a side stream. ``keep`` are tensors that it reads: freed when the job goes."""

    def __init__(
        self, result: T, event: torch.cuda.Event, device: torch.device, keep: Sequence[torch.Tensor]
    ) -> None:
        self._result = result
        self._event = event
        self._device = device
        self._keep = tuple(keep)

    def done(self) -> bool:
        return True

    def wait(self) -> T:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for tensor in _tensors(self._result):
            # made on the side stream, used from here on by this one: the allocator has to know
            tensor.record_stream(stream)
        self._keep = ()
        return self._result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def work_through(jobs: queue.SimpleQueue[WorkerJob | None]) -> None:
    """The worker thread: holds no communicator, so that a dropped one can go."""
    while True:
        job = jobs.get()
        if job is None:
            return
        job.execute()
        del job
