"""Tests for models that are to be compiled with ``backend="zeco"``.

``assert_equivalent`` runs a model compiled and sharded over real processes and compares it, outputs and
every gradient on every rank, with itself run unsharded in eager. ``assert_refused`` checks that every
rank refuses it. The processes of a world size are started once (gloo, one thread each) and serve all
later examples.
"""

from zeco_compile.testing.compare import Difference
from zeco_compile.testing.equivalence import Equivalence, assert_equivalent, assert_refused
from zeco_compile.testing.errors import (
    HarnessError,
    NotEquivalent,
    NotRefused,
    RankDied,
    RankFailed,
    RankTimedOut,
)
from zeco_compile.testing.pool import close_pools, run_on_ranks
from zeco_compile.testing.worker import Outcome

__all__ = [
    "Difference",
    "Equivalence",
    "HarnessError",
    "NotEquivalent",
    "NotRefused",
    "Outcome",
    "RankDied",
    "RankFailed",
    "RankTimedOut",
    "assert_equivalent",
    "assert_refused",
    "close_pools",
    "run_on_ranks",
]
