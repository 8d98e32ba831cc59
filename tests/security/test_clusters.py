"""Two clusters that share a secret: nobody is led from one into the other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import aiograd as ag
from aiograd.errors import AuthError
from aiograd.wire.handshake import NO_CLUSTER

OPTIONS = ag.Options(secret=b"one secret for two clusters", grace=1.0)


@contextlib.asynccontextmanager
async def cluster(place: str, *names: str) -> AsyncIterator[list[ag.Worker]]:
    """Workers of one open cluster, the coordinator first."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for rank, name in enumerate(names):
            worker = ag.Worker(name, rank=rank, rendezvous=place, options=OPTIONS)
            stack.push_async_callback(worker.close, graceful=False)
            found.append(await worker.start())
        yield found


async def test_the_coordinator_makes_the_id_and_all_members_take_it_over(tmp_path: Path) -> None:
    async with cluster(f"unix:{tmp_path}/one", "a", "b", "c") as workers:
        ids = {worker.agent.cluster for worker in workers}
        assert len(ids) == 1
        assert NO_CLUSTER not in ids
    async with cluster(f"unix:{tmp_path}/one", "a") as (again,):
        assert again.agent.cluster not in ids


async def test_a_member_of_one_cluster_is_refused_by_the_other(tmp_path: Path) -> None:
    """Whoever answers at its address, or passes bytes on, must belong to the same cluster."""
    async with (
        cluster(f"unix:{tmp_path}/one", "a", "b") as (_, b),
        cluster(f"unix:{tmp_path}/two", "c", "d") as (c, d),
    ):
        for stranger in (c, d):
            for address in stranger.agent.info.addresses:
                with pytest.raises(AuthError):
                    await b.agent.connect(address)
            assert "another cluster" in str(stranger.agent.refusals["b"])
        assert b.agent.links.get(d.agent.incarnation) is None
        b.make_current()
        assert await ag.rpc_async("a", abs, (-1,)) == 1


async def test_a_newcomer_may_join_either(tmp_path: Path) -> None:
    async with (
        cluster(f"unix:{tmp_path}/one", "a") as (a,),
        cluster(f"unix:{tmp_path}/two", "c") as (c,),
    ):
        for rank, (name, member) in enumerate((("e", a), ("f", c)), 1):
            place = f"unix:{tmp_path}/{'one' if member is a else 'two'}"
            async with ag.Worker(name, rank=rank, rendezvous=place, options=OPTIONS) as newcomer:
                assert newcomer.agent.cluster == member.agent.cluster
