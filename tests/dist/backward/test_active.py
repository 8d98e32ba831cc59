"""Passes under way: what they wait for, their deadline, and the table that holds them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiograd.dist.backward.active import ActivePass, Late, PassTable
from aiograd.dist.backward.plan import Topology
from aiograd.dist.backward.state import Pass, Terms
from aiograd.rpc.directory import PeerInfo

ME = PeerInfo("me", 0, bytes(16))


def active(number: int = 1, context_id: int = 7, begun_here: bool = True) -> ActivePass:
    context: Any = SimpleNamespace(id=context_id, seconds=0.0)
    state = Pass((context_id, number), ME, ME, Terms(), Topology({}, {}))
    done = asyncio.get_running_loop().create_future() if begun_here else None
    return ActivePass(context, state, done, 0)


async def test_a_pass_whose_deadline_is_reached_ends_with_late():
    this, bucket = active(), {}
    this.limit(bucket)
    assert list(bucket) == [this]
    this.expire()
    with pytest.raises(Late):
        await this.done
    assert not this.over


async def test_a_deadline_after_the_end_does_nothing():
    this, bucket = active(), {}
    this.limit(bucket)
    this.done.set_result(None)
    this.unlimit()
    this.expire()
    assert not bucket
    assert this.over


async def test_a_failure_that_nobody_awaits_is_not_logged(caplog):
    active().fail(ValueError("nobody awaits it"))
    active(begun_here=False).fail(ValueError("nobody could"))
    assert not caplog.records


async def test_the_originator_waits_for_the_end_and_others_for_their_own_part():
    assert active().waits
    other = active(begun_here=False)
    assert not other.waits
    other.draining = True
    assert other.waits


async def test_a_pass_is_live_while_it_is_the_one_in_the_table():
    table, this = PassTable(), active()
    assert not table.is_live(this)
    table.add(this)
    assert table.is_live(this)
    table.add(active())
    assert not table.is_live(this)


async def test_passes_of_one_context_can_be_discarded_while_they_are_listed():
    table = PassTable()
    for each in (active(1), active(2), active(3, context_id=8)):
        table.add(each)
    for each in table.of(7):
        table.discard(each.key)
    assert [each.key for each in table.all()] == [(8, 3)]
    assert table.of(7) == []


async def test_a_table_keeps_nothing_of_passes_that_ended():
    table = PassTable()
    for each in (active(1), active(2)):
        table.add(each)
        table.discard(each.key)
        table.discard(each.key)  # the second time does nothing
    assert len(table) == 0
    assert not any(vars(table)[name] for name in ("_passes", "_by_context"))


async def test_a_context_is_looked_up_without_a_look_at_the_passes_of_others():
    table = PassTable()
    others = [active(number, context_id=number) for number in range(1, 51)]
    for each in others:
        table.add(each)
        each.context = None  # whoever asks for it raises
    mine = active(99, context_id=99)
    table.add(mine)
    assert table.of(99) == [mine]
