"""A bound on log lines that others cause."""

from __future__ import annotations

from aiograd.rpc.observe.log_rate import LogRate


def test_some_lines_pass_in_every_second_and_the_others_are_counted():
    now = 0.0
    rate = LogRate(lambda: now, 3)
    assert [rate.allows() for _ in range(5)] == [True] * 3 + [False] * 2
    now = 1.0
    assert rate.allows()
    assert rate.dropped == 2
