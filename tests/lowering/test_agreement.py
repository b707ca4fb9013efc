"""Ranks that differ all raise, at once, in the same words; where one stays away, the others raise."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch.distributed as dist

from zeco_compile.lowering import agreement, groups
from zeco_compile.lowering.errors import RanksDisagree, UnequalShards


def _errors(pool: Any, function: Any, *args: Any) -> list[Exception]:
    """What every rank raised, within seconds."""
    pool.run(_nothing)
    start = time.monotonic()
    results = pool.run(function, *args, errors=True, seconds=30)
    assert time.monotonic() - start < 5
    return results


def _nothing(rank: int) -> None:
    agreement.check_lengths(groups.resolve_group(), (1,))


def _lengths_of(rank: int, lengths: list[tuple[int, ...]]) -> None:
    agreement.check_lengths(groups.resolve_group(), lengths[rank])


def _agree_on(rank: int, payloads: list[dict[str, Any]], keys: list[str]) -> None:
    agreement.check_agreement(groups.resolve_group(), keys[rank], payloads[rank])


def _same_error(results: list[Exception], kind: type[Exception]) -> str:
    assert [type(result) for result in results] == [kind] * len(results)
    assert len({str(result) for result in results}) == 1
    return str(results[0])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_ranks_pass(ranks: Any, world_size: int) -> None:
    pool = ranks(world_size)
    lengths = (5, 0, 2**40)
    assert pool.run(_lengths_of, [lengths] * world_size) == [None] * world_size
    assert pool.run(_lengths_of, [()] * world_size) == [None] * world_size
    assert pool.run(_lengths_of, [tuple(range(40))] * world_size) == [None] * world_size
    payload = {"hash": "ab", "sizes": (1, [2.5, None]), "nested": {"b": True, "a": "ü"}}
    assert pool.run(_agree_on, [payload] * world_size, ["graph 0"] * world_size) == [None] * world_size
    assert pool.run(_agree_on, [{}] * world_size, [""] * world_size) == [None] * world_size


def test_order_of_a_dict_does_not_matter(ranks: Any) -> None:
    payloads = [{"a": {"x": 1, "y": 2}, "b": 1}, {"b": 1, "a": {"y": 2, "x": 1}}]
    assert ranks(2).run(_agree_on, payloads, ["k", "k"]) == [None, None]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_token_less(ranks: Any, world_size: int) -> None:
    lengths = [(16,)] * (world_size - 1) + [(15,)]
    text = _same_error(_errors(ranks(world_size), _lengths_of, lengths), UnequalShards)
    others = "rank 0: 16" if world_size == 2 else f"ranks {', '.join(map(str, range(world_size - 1)))}: 16"
    assert f"rank {world_size - 1}: 15" in text
    assert others in text


def test_lengths_differ_beyond_the_header(ranks: Any) -> None:
    lengths = [(4,) * 30, (4,) * 29 + (5,), (4,) * 30]
    text = _same_error(_errors(ranks(3), _lengths_of, lengths), UnequalShards)
    assert "rank 1: (4, 4," in text


def test_number_of_lengths_differs(ranks: Any) -> None:
    text = _same_error(_errors(ranks(2), _lengths_of, [(4, 4), (4,)]), UnequalShards)
    assert "rank 0: 2 lengths (4, 4)" in text
    assert "rank 1: 1 lengths (4,)" in text


def test_after_a_disagreement_the_group_still_works(ranks: Any) -> None:
    pool = ranks(2)
    _errors(pool, _lengths_of, [(4,), (5,)])
    assert pool.run(_lengths_of, [(4,), (4,)]) == [None, None]


def test_payloads_differ(ranks: Any) -> None:
    payloads = [{"options": "a", "graph": "g"}, {"options": "b", "graph": "g"}, {"options": "a", "extra": 1}]
    text = _same_error(_errors(ranks(3), _agree_on, payloads, ["layer"] * 3), RanksDisagree)
    assert "options: rank 1: b; ranks 0, 2: a" in text
    assert "graph: rank 2: (absent); ranks 0, 1: g" in text
    assert 'extra: rank 2: "1"' not in text
    assert "extra: rank 2: 1" in text


def test_long_values_that_differ_at_their_end(ranks: Any) -> None:
    payloads = [{"graph": "x" * 5000 + end} for end in "ab"]
    text = _same_error(_errors(ranks(2), _agree_on, payloads, ["k", "k"]), RanksDisagree)
    assert "first difference" in text
    assert len(text) < 2000


def test_keys_differ(ranks: Any) -> None:
    text = _same_error(_errors(ranks(2), _agree_on, [{}, {}], ["graph 0", "graph 1"]), RanksDisagree)
    assert "graph 0" in text
    assert "graph 1" in text


def _one_compiles(rank: int, lengths: list[int]) -> None:
    name = groups.resolve_group()
    if rank == 1:
        agreement.check_agreement(name, "graph", {"a": 1}, lengths=(lengths[rank],))
    else:
        agreement.check_lengths(name, (lengths[rank],))


def test_one_compiles_again_while_the_others_run(ranks: Any) -> None:
    text = _same_error(_errors(ranks(3), _one_compiles, [8, 8, 8]), RanksDisagree)
    assert "rank 1: compiles; ranks 0, 2: runs a compiled graph" in text


def test_one_compiles_again_since_its_length_differs(ranks: Any) -> None:
    text = _same_error(_errors(ranks(3), _one_compiles, [8, 7, 8]), UnequalShards)
    assert "rank 1: 7; ranks 0, 2: 8" in text


def _graphs(rank: int) -> None:
    agreement.check_lengths(groups.resolve_group(), (4,), key=f"graph {rank}")


def test_ranks_run_different_graphs(ranks: Any) -> None:
    text = _same_error(_errors(ranks(2), _graphs), RanksDisagree)
    assert "rank 0: graph 0; rank 1: graph 1" in text


def test_payload_that_cannot_be_compared(ranks: Any) -> None:
    results = _errors(ranks(2), _agree_on, [{"a": object()}] * 2, ["k", "k"])
    assert [type(result) for result in results] == [TypeError] * 2
    with pytest.raises(TypeError, match="not object"):
        agreement.check_agreement("", "k", {"a": object()})


def test_one_rank_needs_nobody() -> None:
    agreement.check_lengths("", (3,))
    agreement.check_agreement("", "k", {"a": 1})


def _in_subgroup(rank: int, lengths: list[int]) -> None:
    left, right = dist.new_group([0, 2]), dist.new_group([3, 1], sort_ranks=False)
    mine = left if rank in (0, 2) else right
    agreement.check_lengths(groups.resolve_group(mine), (lengths[rank],))


def test_groups_inside_the_world(ranks: Any) -> None:
    assert ranks(4).run(_in_subgroup, [4, 5, 4, 5]) == [None] * 4
    results = ranks(4).run(_in_subgroup, [4, 5, 4, 6], errors=True, seconds=30)
    assert results[0] is None
    assert results[2] is None
    text = _same_error([results[1], results[3]], UnequalShards)
    assert "rank 0 (global rank 3): 6; rank 1 (global rank 1): 5" in text


def _timed(rank: int, calls: int) -> float:
    name = groups.resolve_group()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        agreement.check_lengths(name, (1024, 1024))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def test_lengths_are_cheap_to_compare(ranks: Any) -> None:
    medians = ranks(2).run(_timed, 300)
    print(f"check_lengths on 2 gloo ranks: median {1e6 * max(medians):.0f} µs")
    assert max(medians) < 0.02  # some hundred µs; the bound allows for a busy machine


def _after_a_round(rank: int, check: str) -> tuple[str, str, float]:
    name = groups.resolve_group()
    start = time.monotonic()
    try:
        if check == "lengths":
            agreement.check_lengths(name, (4,))
        else:
            agreement.check_agreement(name, "k", {})
    except agreement.RankMissing as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


@pytest.mark.parametrize("check", ["lengths", "agreement"])
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "never-connected"])
def test_a_rank_that_never_calls(fresh_ranks: Any, check: str, connected: bool) -> None:
    pool = fresh_ranks(3, 3)
    if connected:
        pool.run(_nothing)
    results = pool.run(_after_a_round, check, ranks=[0, 2], seconds=60)
    for rank in (0, 2):
        kind, text, seconds = results[rank]
        assert kind == "RankMissing"
        assert "missing: rank 1." in text
        assert seconds < 3 + agreement._REPORT_SECONDS + 3
    # The group is done for; the next check says so without waiting, also to the rank that comes late.
    for kind, _, seconds in pool.run(_after_a_round, check, seconds=60):
        assert kind == "RankMissing"
        assert seconds < 1


def test_a_rank_that_dies(fresh_ranks: Any) -> None:
    pool = fresh_ranks(3, 60)
    pool.run(_nothing)
    pool.kill(1)
    results = pool.run(_after_a_round, "lengths", ranks=[0, 2], seconds=60)
    for rank in (0, 2):
        kind, text, seconds = results[rank]
        assert kind == "RankMissing"
        assert "missing: rank 1." in text
        assert seconds < 10


def _impatient() -> str:
    agreement._LOOK_SECONDS, agreement._STANDS_SECONDS = 0.2, 0.6
    return groups.resolve_group()


def _one_fails(rank: int, who: int) -> None:
    group = _impatient()
    if rank == who:
        agreement.give_up(group, "ValueError: of its own")
    else:
        agreement.check_lengths(group, (1,))


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "never-connected"])
def test_a_rank_that_fails_by_itself_leaves_word(fresh_ranks: Any, connected: bool) -> None:
    pool = fresh_ranks(2, 60)
    if connected:
        pool.run(_nothing)
    start = time.monotonic()
    waited, failed = pool.run(_one_fails, 1, errors=True, seconds=50)
    assert time.monotonic() - start < 20
    assert failed is None
    assert isinstance(waited, agreement.RankMissing)
    assert "rank 1 has raised an error of its own: ValueError: of its own" in str(waited)


def _all_fail_and_go_on(rank: int) -> None:
    group = _impatient()
    for _ in range(2):
        agreement.give_up(group, "ValueError: everywhere")
    time.sleep(2.0 * rank)
    agreement.check_lengths(group, (1,))


def test_word_of_a_failure_on_every_rank_is_no_news(fresh_ranks: Any) -> None:
    assert fresh_ranks(2, 60).run(_all_fail_and_go_on) == [None, None]
