from __future__ import annotations

from zeco_compile.lowering import op_log


def test_records_only_inside():
    op_log.record("before")
    with op_log.recording() as log:
        op_log.record("a")
        with op_log.recording() as inner:
            op_log.record("b")
        op_log.record("c")
    op_log.record("after")
    assert log == ["a", "b", "c"]
    assert inner == ["b"]


def test_equal_logs_are_told_apart():
    with op_log.recording() as outer:
        with op_log.recording():
            pass
        op_log.record("a")
    assert outer == ["a"]
