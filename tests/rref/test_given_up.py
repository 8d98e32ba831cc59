"""A creation that its creator gave up does not leave room behind, whoever else was told of it."""

from __future__ import annotations

import asyncio

import pytest

from aiograd.errors import Overloaded
from aiograd.rpc.api import rpc_async
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rref import remote
from aiograd.rref.refcount.owner import OwnerTable
from aiograd.rref.refcount.records import BY_CREATOR

OWNER, CREATOR, FRIEND = (PeerInfo(name, n, bytes([n]) * 16) for n, name in enumerate("abc"))
REF, FORK, CHILD = (1, 1, 0), (1, 1, 1), (1, 1, 2)


def test_the_last_fork_takes_an_unmade_value_with_it():
    owner_table = OwnerTable(OWNER)
    woken = []
    owner_table.request(FRIEND.incarnation, 0, 0, [(REF, CHILD, BY_CREATOR)])
    owned = owner_table.look_up(FRIEND, REF, CHILD, BY_CREATOR)
    owned.waiters[FRIEND] = lambda: woken.append(owned.error)
    owner_table.release([(REF, FORK, True)])  # the creator timed out before its call had left
    assert REF in owner_table.records
    owner_table.release([(REF, CHILD, False)])
    assert "given up" in str(woken[0])
    assert not owner_table.records


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def test_who_waits_for_a_value_of_its_own_is_told_why_it_was_given_up(workers):
    async with workers(1, options=Options(max_inflight=1)):
        first = rpc_async("worker0", never)
        rref = remote("worker0", never, timeout=0.05)
        with pytest.raises(Overloaded, match="until the deadline"):
            await rref.to_here(timeout=20)
        assert first.cancel()
