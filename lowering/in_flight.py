"""Finds a started scan again from the tensor that stands for it.

``scan_start`` returns a one-element tensor, and ``scan_wait`` gets it back, maybe as another tensor over the
same storage: so jobs are kept by storage, as PyTorch's functional collectives keep theirs. When the storage
goes without a wait (an exception came in between, a graph was dropped), its job is let go too: it still runs
to its end, since other ranks wait for it, but nothing keeps its result.
"""

from __future__ import annotations

import threading
import weakref

import torch

from zeco_compile.lowering import torch_private
from zeco_compile.lowering.errors import TransferNotFound
from zeco_compile.lowering.jobs import Job

_lock = threading.Lock()
_jobs: dict[int, Job[torch.Tensor]] = {}


def put(token: torch.Tensor, job: Job[torch.Tensor]) -> None:
    """Let ``token``'s storage stand for ``job``."""
    key = torch_private.storage_key(token)
    with _lock:
        _jobs[key] = job
    # at exit nothing is left to do, and torch may be half gone by then
    weakref.finalize(token.untyped_storage(), _forget, key).atexit = False


def take(token: torch.Tensor) -> Job[torch.Tensor]:
    """The job of ``token``, once. Raises TransferNotFound."""
    with _lock:
        job = _jobs.pop(torch_private.storage_key(token), None)
    if job is None:
        raise TransferNotFound(
            "zeco::scan_wait was given a tensor that no zeco::scan_start in this process returned, or that "
            "was waited for before. Each start is waited for once, with the very tensor that it returned: a "
            "graph transformation must not copy it, nor wait twice."
        )
    return job


def pending() -> int:
    """How many started scans nobody has waited for yet."""
    with _lock:
        return len(_jobs)


def _forget(key: int) -> None:
    # no lock: the garbage collector may call this in a thread that holds it; popping is atomic
    _jobs.pop(key, None)
