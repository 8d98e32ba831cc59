"""Which errors the faults of a schedule justify."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.rpc.options import Options
from aiograd.testing import simulate
from aiograd.testing.simulator.schedule import Fault, Harm
from aiograd.testing.simulator.world import World


class Story:
    """Faults and broken connections at given moments, and what they justify at the end."""

    def __init__(self):
        self.world = World(1, options=Options(resume=3.0))
        self.harm = Harm(self.world)
        self.loop = self.world.loop

    def until(self, moment):
        self.loop.run_until_complete(asyncio.sleep(moment - self.loop.time()))

    def fault(self, at, kind, a, b="", seconds=0.0):
        self.until(at)
        self.harm.note(Fault(at, kind, a, b, seconds))

    def breaks(self, at, a, b):
        self.fault(at, "reset", a, b)
        self.world.wire.note_break(a, b)


@pytest.fixture
def story():
    story = Story()
    yield story
    story.loop.close()


def test_a_broken_connection_alone_justifies_no_loss(story):
    story.breaks(1.0, "a", "b")
    story.until(9.0)
    assert not story.harm.may_lose("a")
    assert not story.harm.lossy


@pytest.mark.parametrize("kind", ["pause", "clog", "cut_one_way"])
def test_a_pair_without_a_chance_to_resume_in_time_may_lose_each_other(story, kind):
    story.breaks(1.0, "a", "b")
    story.fault(1.2, kind, "b", "" if kind == "pause" else "a", seconds=1.9)
    story.fault(2.5, "pause", "a", seconds=1.0)
    story.until(4.0)
    assert story.harm.may_lose("a")
    assert story.harm.may_lose("b")
    assert story.harm.lossy
    assert not story.harm.may_lose("c")


def test_a_pause_that_began_before_the_connection_broke_counts_from_the_break_on(story):
    story.fault(0.5, "pause", "a", seconds=2.7)
    story.breaks(1.0, "a", "b")
    story.until(9.0)
    assert story.harm.may_lose("a")


def test_a_pause_without_a_broken_connection_justifies_no_loss(story):
    story.fault(1.0, "pause", "a", seconds=4.0)
    story.until(9.0)
    assert not story.harm.lossy


@pytest.mark.parametrize("free", [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)])
def test_a_second_without_hindrance_is_a_chance_to_resume(story, free):
    begin, end = free
    story.breaks(1.0, "a", "b")
    if begin > 1.0:
        story.fault(1.0, "pause", "a", seconds=begin - 1.0)
    if end < 4.0:
        story.fault(end, "pause", "b", seconds=4.0 - end)
    story.until(9.0)
    assert not story.harm.lossy


def test_no_loss_is_justified_before_the_time_to_resume_is_over(story):
    story.breaks(1.0, "a", "b")
    story.fault(1.0, "pause", "a", seconds=4.0)
    story.until(3.99)
    assert not story.harm.may_lose("a")
    story.until(4.0)
    assert story.harm.may_lose("a")


def test_hindrances_of_other_pairs_do_not_count(story):
    story.breaks(1.0, "a", "b")
    story.fault(1.0, "pause", "c", seconds=4.0)
    story.fault(1.0, "clog", "a", "c", seconds=4.0)
    story.until(9.0)
    assert not story.harm.lossy


def test_the_wire_notes_when_each_end_sees_that_its_connection_was_broken():
    async def program(world):
        assert await ag.rpc_async("worker0", max, args=(1, 2)) == 2
        assert not world.wire.breaks
        await asyncio.sleep(2.0)
        assert await ag.rpc_async("worker0", max, args=(1, 2)) == 2
        return world.wire.breaks

    breaks = simulate(program, workers=1, faults=[Fault(1.0, "reset", "worker0", "driver")])
    assert breaks == [(1.0, frozenset({"worker0", "driver"}))] * 2
