from __future__ import annotations

import pytest

from zeco_compile.lowering import volume

SIZE = volume.LayerSize(
    batch=2, length=100, heads=3, key_dim=4, value_dim=5, decay_width=4, value_bytes=2, state_bytes=4
)
STATE, DECAY = 2 * 3 * 4 * 5 * 4, 2 * 3 * 4 * 4


def test_sizes():
    assert SIZE.state == STATE
    assert SIZE.decay == DECAY
    assert SIZE.keys_and_values == 2 * 100 * 3 * 9 * 2


def test_chain_sends_one_state_whatever_the_number_of_ranks():
    for world_size in (2, 3, 64):
        sent = [volume.schedule_bytes("all_scan", SIZE, rank, world_size) for rank in range(world_size)]
        assert sent == [STATE] * (world_size - 1) + [0]
    assert volume.schedule_bytes("lasp1", SIZE, 0, 1) == 0


def test_comparisons_grow_with_the_number_of_ranks():
    assert volume.schedule_bytes("lasp2", SIZE, 0, 8) == 7 * (STATE + DECAY)
    assert volume.gather_states_bytes(SIZE, 8) == 7 * (STATE + DECAY)
    assert volume.gather_keys_and_values_bytes(SIZE, 8) == 7 * SIZE.keys_and_values


def test_tree_is_logarithmic():
    assert volume.schedule_bytes("all_scan_tree", SIZE, 1, 1024) <= 11 * (STATE + DECAY)
    assert volume.schedule_bytes("all_scan_tree", SIZE, 0, 2) == STATE
    assert volume.schedule_bytes("all_scan_tree", SIZE, 1, 2) == 0


def test_unknown_schedule():
    with pytest.raises(ValueError, match="auto"):
        volume.schedule_bytes("auto", SIZE, 0, 2)


def test_counter():
    volume.reset()
    volume.count("a", 3)
    volume.count("a", 4)
    volume.count("b", 1)
    assert volume.sent() == {"a": 7, "b": 1}
    volume.reset()
    assert volume.sent() == {}
