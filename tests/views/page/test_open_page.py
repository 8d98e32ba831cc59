"""A page that is open while workers come and go, for seconds instead of an hour; and its report."""

from __future__ import annotations

import pytest

from tests.views.page.open_page import SETTLED, Report, keep_open


@pytest.mark.deadline(120)
@pytest.mark.parametrize("seed", [0, 1])
async def test_every_change_of_the_cluster_is_shown(seed):
    # By the events that a page gets; `make browser` and `make open-page` have the page itself.
    report = await keep_open(4.0, 0.2, browser=False, seed=seed)
    assert report.changes >= 2
    assert report.calls > 0
    assert report.passes > 0
    assert len(report.memory["server"]) == len(report.memory["worker0"]) == report.changes


def test_memory_that_grows_is_a_fault_of_a_long_run():
    steady, growing = [10**8] * 50, [million * 10**6 for million in range(100, 150)]
    report = Report(SETTLED, {"server": steady, "worker0": growing, "page": [0] * 50})
    assert report.faults() == ["worker0 has grown by 30.0 MB, 26.2%"]
    report.seconds = SETTLED - 1  # it is still finding its level
    assert report.faults() == []
    assert "+26.2%" in str(report)
