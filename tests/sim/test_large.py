"""Hundreds of workers: what joining, a fan-out, passes, deaths and rest cost and leave.

AIOGRAD_LARGE=1000 simulates as many.
"""

from __future__ import annotations

import os

from aiograd.testing.simulator.large import run_large

SIZE = int(os.environ.get("AIOGRAD_LARGE", "150"))


def test_a_large_cluster_joins_works_loses_members_and_rests() -> None:
    figures = run_large(SIZE, participants=50, deaths=20)
    # Everybody is connected to the coordinator, and to nobody else unless it calls it.
    assert figures.joined_connections == SIZE - 1
    assert figures.working_connections == SIZE - 1
    assert figures.resting_connections == SIZE - 1 - 20
    assert figures.resting_bytes == 0
    assert figures.loss_seconds < 1.0


def test_the_bytes_of_a_join_grow_as_the_rosters_do() -> None:
    """Each newcomer gets the roster once: n times n entries of about a hundred bytes."""
    figures = run_large(100, participants=2, deaths=1)
    assert figures.join_bytes < 100 * 100 * 150
