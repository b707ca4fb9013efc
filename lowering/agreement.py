"""Ranks that should do the same thing find out, before they wait for each other, whether they do.

Contract: what differs between ranks is raised on *every* rank, by the same error with the same message, and
no rank is left waiting. Both checks begin with one all-gather of one small header on the CPU, so that a
rank in one check and a rank in the other (one recompiles since its length changed, the others run what they
have) see each other instead of waiting for each other. A rank that fails on its way to a check leaves word of
it (`give_up`), for which those who have waited a while look. A rank that does not come at all makes the others
raise `RankMissing` after the group's timeout.

The headers go over a gloo group of their own. They cannot interleave with the user's collectives or with the
states on their way, and on CUDA they do not touch the stream.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from zeco_compile.kernels.errors import ZecoError
from zeco_compile.lowering import torch_private
from zeco_compile.lowering.errors import RanksDisagree, UnequalShards
from zeco_compile.lowering.groups import ONE_RANK, members

# One header is `_HEADER` integers: which check, length of the text to follow, identity of the key, how many
# lengths there are, and the first `_INLINE` of them.
_HEADER = 16
_INLINE = _HEADER - 4
_LENGTHS = 1
_AGREEMENT = 2

# How long a rank waits for the others between two looks for word from them, and how long such word has to stand: a rank
# that has failed may have caught its error, and be on its way to the check that the others are in.
_LOOK_SECONDS = 1.0
_STANDS_SECONDS = 8.0

# How long a rank that has failed looks for the failures of the others, to tell who is missing.
_REPORT_SECONDS = 2.0


class RankMissing(ZecoError):
    """A rank did not take part in a check within the group's timeout, or has died."""


def check_agreement(group: str, key: str, payload: dict[str, Any], lengths: Sequence[int] = ()) -> None:
    """All ranks of ``group`` are at the same point ``key`` with the same ``payload``; for compile time.

    ``payload`` maps names to values made of None, bool, int, float, str, tuples, lists and dicts (anything
    else is a TypeError, before any communication). ``lengths`` are this rank's lengths along the sequence,
    so that ranks that differ because their shards do are told so. Blocks until all ranks have come.

    Raises on every rank `UnequalShards` if lengths differ, `RanksDisagree` if the keys, or the payloads, or
    the checks differ, with who has what; `RankMissing` after the group's timeout on the ranks that did
    come.
    """
    text = json.dumps([key, _canonical(payload)]).encode()
    if group == ONE_RANK:
        return
    control = _control(group)
    with control.lock:
        headers = control.exchange(_AGREEMENT, text, 0, lengths)
        texts = control.gather_texts(text, [header[1] for header in headers])
    _raise_for_payloads(group, [json.loads(each) for each in texts])


def all_agree(group: str, mine: bool) -> bool:
    """Whether every rank of ``group`` says so. To be called right behind a check, where all ranks are at one place.

    Raises `RankMissing` as the checks do.
    """
    if group == ONE_RANK:
        return mine
    control = _control(group)
    with control.lock:
        return control.all_agree(mine)


def give_up(group: str, why: str) -> None:
    """Leaves word for the ranks of ``group`` that this one has failed by itself, and will not come to what is next.

    To be called where an error is raised that no check has raised. It communicates with the store only, and waits for
    nobody; the word is taken back when this rank comes to a check after all.
    """
    if group == ONE_RANK:
        return
    control = _control(group)
    with control.lock:
        control.leave_word(why)


def check_lengths(group: str, lengths: Sequence[int], key: str = "") -> None:
    """All ranks of ``group`` are about to run the same thing on slices of equal ``lengths``; for every call.

    One all-gather of 128 bytes (two for more than 12 lengths). ``key`` names what is about to run, and is
    compared too. Raises on every rank `UnequalShards`, with each rank's lengths, or `RanksDisagree`;
    `RankMissing` after the group's timeout on the ranks that did come.
    """
    if group == ONE_RANK:
        return
    control = _control(group)
    with control.lock:
        control.exchange(_LENGTHS, *_encoded(key), lengths)


class _Control:
    """The gloo group on which the members of one process group compare notes."""

    def __init__(self, name: str, generation: int) -> None:
        self.name = name
        self.generation = generation
        self.main = torch_private.resolve_process_group(name)
        self.store = torch_private.default_store()
        self.rank, self.size = self.main.rank(), self.main.size()
        self.timeout = torch_private.group_timeout(self.main)
        self.prefix = f"zeco/control/{name}/{generation}"
        self.broken = ""
        self.checks = self.failures = 0  # checks that are over, and this rank's failures since
        self.lock = threading.Lock()
        self.headers = torch.zeros(self.size * _HEADER, dtype=torch.int64)
        self.gloo: dist.ProcessGroup | None = None

    def exchange(self, check: int, text: bytes, identity: int, lengths: Sequence[int]) -> list[list[int]]:
        """All ranks' headers, once everything in them that has to agree does.

        ``text`` is not sent, only its size; ``identity`` stands for it where it has to be equal everywhere.
        """
        header = [check, len(text), identity, len(lengths), *lengths[:_INLINE]]
        header += [0] * (_HEADER - len(header))
        if self.failures:
            self.store.set(self._word_of(self.rank), json.dumps([-1, 0, ""]))  # it comes after all
        self._all_gather(self.headers, torch.tensor(header, dtype=torch.int64))
        rows = self.headers.view(self.size, _HEADER).tolist()
        first = rows[0]
        self.checks, self.failures = self.checks + 1, 0
        if all(row[0] == first[0] and row[2:] == first[2:] for row in rows):
            if len(lengths) > _INLINE:
                self._compare_lengths(rows, self._gather_integers(lengths[_INLINE:], rows))
            return rows
        # All that follows is decided from `rows` alone, which every rank has: all raise, and raise the same.
        if any(row[3] != first[3] for row in rows):
            _raise_unequal(self.name, [f"{row[3]} lengths {tuple(row[4 : 4 + row[3]])}" for row in rows])
        self._compare_lengths(rows, [[] for _ in rows])
        if any(row[0] != first[0] for row in rows):
            doing = {_LENGTHS: "runs a compiled graph", _AGREEMENT: "compiles"}
            raise RanksDisagree(
                f"the ranks of {_group_text(self.name)} are not doing the same: "
                f"{_who_has_what(self.name, [doing[row[0]] for row in rows])}. A rank compiles again when "
                "something that Dynamo guards on changed there (a shape, a flag of the module, grad "
                "mode). Make it change on every rank at the same call."
            )
        keys = [key.decode() for key in self.gather_texts(text, [row[1] for row in rows])]
        raise RanksDisagree(
            f"the ranks of {_group_text(self.name)} are about to run different graphs: "
            f"{_who_has_what(self.name, _excerpts(keys))}. Call the same compiled model, in the same mode, "
            "in the same order on every rank."
        )

    def all_agree(self, mine: bool) -> bool:
        everyone = torch.zeros(self.size, dtype=torch.int64)
        self._all_gather(everyone, torch.tensor([int(mine)]))
        return bool(everyone.all())

    def gather_texts(self, text: bytes, sizes: list[int]) -> list[bytes]:
        """Every rank's text, given their sizes in bytes."""
        width = max(sizes)
        mine = torch.zeros(width, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        everyone = torch.zeros(self.size * width, dtype=torch.uint8)
        self._all_gather(everyone, mine)
        rows = everyone.view(self.size, width)
        return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]

    def _gather_integers(self, values: Sequence[int], rows: list[list[int]]) -> list[list[int]]:
        mine = torch.tensor(list(values), dtype=torch.int64)
        everyone = torch.zeros(len(rows) * len(values), dtype=torch.int64)
        self._all_gather(everyone, mine)
        return everyone.view(len(rows), len(values)).tolist()

    def _compare_lengths(self, rows: list[list[int]], rest: list[list[int]]) -> None:
        lengths = [(*row[4 : 4 + row[3]], *more) for row, more in zip(rows, rest, strict=True)]
        if any(each != lengths[0] for each in lengths):
            _raise_unequal(self.name, [_lengths_text(each) for each in lengths])

    def _connect(self) -> dist.ProcessGroup:
        if self.store.check([f"{self.prefix}/failed"]):
            raise RuntimeError("the other ranks gave up before this rank came")
        self.store.set(f"{self.prefix}/here/{self.rank}", "1")
        here = [f"{self.prefix}/here/{rank}" for rank in range(self.size)]

        def all_here() -> bool:
            if self.store.check(here):
                return True
            time.sleep(0.01)
            return False

        self._until(all_here)
        store = dist.PrefixStore(self.prefix, self.store)
        return torch_private.make_gloo_group(store, self.rank, self.size, self.timeout)

    def _all_gather(self, out: torch.Tensor, mine: torch.Tensor) -> None:
        def all_gather() -> None:
            if self.gloo is None:
                self.gloo = self._connect()
            self._wait(torch_private.all_gather(self.gloo, out, mine))

        self._guarded(all_gather)

    def _word_of(self, rank: int) -> str:
        """Where in the store a rank leaves word."""
        return f"{self.prefix}/word/{rank}"

    def leave_word(self, why: str) -> None:
        self.failures += 1
        word = json.dumps([self.checks, self.failures, why])
        # where rank 0 has gone, and the store with it, whoever waits finds out by that
        with contextlib.suppress(RuntimeError):
            self.store.set(self._word_of(self.rank), word)

    def _wait(self, work: dist.Work) -> None:
        """Raises RuntimeError where the exchange fails, and where a rank says that it will not come."""

        def ended() -> bool:
            try:
                work.wait(datetime.timedelta(seconds=_LOOK_SECONDS))
            except RuntimeError:
                if work.is_completed():
                    raise
                return False
            return True

        self._until(ended)

    def _until(self, ended: Callable[[], bool]) -> None:
        """Calls ``ended``, which may wait itself, until it is true. Raises RuntimeError if a rank does not come."""
        begin = time.monotonic()
        looked, first_seen = begin, dict[str, float]()
        while not ended():
            now = time.monotonic()
            if now - looked < _LOOK_SECONDS:
                continue
            looked = now
            for word in self._words():
                if now - first_seen.setdefault(word, now) > _STANDS_SECONDS:
                    if self.gloo is not None:
                        torch_private.abandon(self.gloo)
                    raise RuntimeError(word)
            if now - begin > self.timeout.total_seconds() + _LOOK_SECONDS:
                raise RuntimeError(f"nothing came within {_seconds_text(self.timeout)}")

    def _words(self) -> Iterator[str]:
        """What ranks say that have failed, at this check, more often than this one has: they do not come to it."""
        for rank in range(self.size):
            key = self._word_of(rank)
            if rank != self.rank and self.store.check([key]):
                checks, failures, why = json.loads(self.store.get(key))
                if checks == self.checks and failures > self.failures:
                    yield f"{_ranks_text(self.name, [rank])} has raised an error of its own: {why}"

    def _guarded(self, communicate: Callable[[], None]) -> None:
        if self.broken:
            raise RankMissing(self.broken)
        try:
            communicate()
        except RuntimeError as error:
            # The connections go first: the others, which may be waiting for this rank, then fail now too.
            # Dropping the last reference is what closes them, so the traceback may not hold one either.
            self.gloo = None
            self.broken = self._missing_text(error)
            raise RankMissing(self.broken) from error

    def _missing_text(self, error: Exception) -> str:
        missing = self._who_is_missing()
        if missing is None:
            who = "which one cannot be told (the store of the process group, on rank 0, is gone as well)"
        elif not missing:
            who = "which one cannot be told: each of them is alive and has failed in the same way"
        else:
            who = f"missing: {_ranks_text(self.name, missing)}"
        reason = str(error).strip().splitlines()[-1]
        return (
            f"a rank of {_group_text(self.name)} did not come to compare what the ranks are about to do; "
            f"{who}. Timeout of the group: {_seconds_text(self.timeout)}. It has died, raised an error of "
            "its own (look at its output), or never called the compiled model. Every rank has to call it, "
            f"equally often. [{type(error).__name__}: {reason}]"
        )

    def _who_is_missing(self) -> list[int] | None:
        """The ranks that do not report the same failure, or None if nobody can be asked.

        A rank that waited in vain writes so to the store; whoever has not written shortly after did not wait.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self.store.set(f"{self.prefix}/failed", "1")
            self.store.set(f"{self.prefix}/failed/{self.rank}", "1")
            deadline = time.monotonic() + _REPORT_SECONDS
            while others and time.monotonic() < deadline:
                others = [rank for rank in others if not self.store.check([f"{self.prefix}/failed/{rank}"])]
                time.sleep(0.02)
        except RuntimeError:  # the store's server lives in the process of rank 0 and goes with it
            return None
        return others


_controls: dict[str, _Control] = {}
_controls_lock = threading.Lock()


def _control(name: str) -> _Control:
    """The control group of process group ``name``, made at the first check. Hold its lock to use it."""
    control = _controls.get(name)
    try:
        if control is not None and torch_private.resolve_process_group(name) is control.main:
            return control
    except (RuntimeError, KeyError):
        del _controls[name]
    members(name)  # says what is wrong if there is no such group (any more)
    with _controls_lock:
        control = _controls.get(name)
        if control is None or control.main is not torch_private.resolve_process_group(name):
            same_store = control is not None and control.store is torch_private.default_store()
            generation = control.generation + 1 if control is not None and same_store else 0
            control = _controls[name] = _Control(name, generation)
    return control


@lru_cache(maxsize=1024)
def _encoded(key: str) -> tuple[bytes, int]:
    """``key`` as bytes, and a number for it that is equal in every process, which ``hash`` is not."""
    text = key.encode()
    return text, int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _canonical(value: Any) -> Any:
    """``value`` as JSON that is equal whenever the values are, whatever the order of dicts was."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return [_canonical(each) for each in value]
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _canonical(value[name]) for name in sorted(value)}
    raise TypeError(
        "a payload for check_agreement may hold None, bool, int, float, str, tuples, lists, and dicts "
        f"with str keys, not {type(value).__name__}: {value!r}"
    )


def _raise_for_payloads(group: str, everyone: list[list[Any]]) -> None:
    keys = [key for key, _ in everyone]
    if any(key != keys[0] for key in keys):
        raise RanksDisagree(
            f"the ranks of {_group_text(group)} compile different things: {_who_has_what(group, keys)}. "
            "Call the same compiled model in the same order on every rank."
        )
    payloads = [payload for _, payload in everyone]
    names = list(dict.fromkeys(name for payload in payloads for name in payload))
    differing = []
    for name in names:
        whole = [payload.get(name, _ABSENT) for payload in payloads]
        if any(value != whole[0] for value in whole):
            texts = _excerpts(["(absent)" if value is _ABSENT else _text(value) for value in whole])
            differing.append(f"  {name}: {_who_has_what(group, texts)}")
    if differing:
        raise RanksDisagree(
            f"the ranks of {_group_text(group)} compiled {keys[0]!r} differently:\n"
            + "\n".join(differing)
            + "\n"
            "Give every rank the same model, options, dtypes and shapes, and the same versions of torch and "
            "zeco_compile."
        )


_ABSENT = {"absent": True}


def _raise_unequal(group: str, texts: list[str]) -> None:
    raise UnequalShards(
        f"the ranks of {_group_text(group)} hold slices of different lengths along the sequence: "
        f"{_who_has_what(group, texts)}. Every rank has to pass the same number of tokens. Pad the "
        "sequence to a multiple of the number of ranks before it is cut (`zeco_compile.shard_sequence` "
        "cuts it evenly)."
    )


def _lengths_text(lengths: Sequence[int]) -> str:
    return str(lengths[0]) if len(lengths) == 1 else str(tuple(lengths))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _excerpts(texts: list[str], limit: int = 200) -> list[str]:
    """The texts as they are, or, where they are long, each from shortly before the place where they part."""
    if all(len(text) <= limit for text in texts):
        return texts
    same = next(
        (at for at, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1),
        min(map(len, texts)),
    )
    start = max(0, same - limit // 4)
    return [f"{text[start : start + limit]!r} (first difference at character {same})" for text in texts]


def _who_has_what(group: str, values: Sequence[str]) -> str:
    """``rank 1: 15; ranks 0, 2: 16``: the values, the rarest first, with the ranks that have them."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    rarest_first = sorted(holders.items(), key=lambda item: (len(item[1]), item[1]))
    return "; ".join(f"{_ranks_text(group, ranks)}: {value}" for value, ranks in rarest_first)


def _ranks_text(group: str, ranks: Sequence[int]) -> str:
    """``ranks 0, 1 (global ranks 2, 3)``, the bracket only where the two differ."""
    in_world = members(group).global_ranks
    plural = "s" if len(ranks) > 1 else ""
    text = f"rank{plural} {', '.join(map(str, ranks))}"
    if in_world != tuple(range(len(in_world))):
        text += f" (global rank{plural} {', '.join(str(in_world[rank]) for rank in ranks)})"
    return text


def _group_text(group: str) -> str:
    return f"the group of global ranks {list(members(group).global_ranks)}"


def _seconds_text(timeout: datetime.timedelta) -> str:
    return f"{timeout.total_seconds():g} s"
