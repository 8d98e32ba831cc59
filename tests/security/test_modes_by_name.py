"""A mode for each name: one worker serves members it trusts and partners at once."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest

import aiograd as ag
from aiograd.cluster import TLS
from aiograd.errors import AuthError, NotAllowed, SerializationError
from tests.security import partner_functions as offer

OPEN = "trusted"
BANK = {"worker2": "restricted", "*": "trusted"}
CLOSED = {"worker0": "trusted", "*": "restricted"}


@pytest.mark.parametrize("mode", [BANK, CLOSED], ids=["bank", "closed"])
async def test_one_worker_serves_trusted_members_and_partners(workers, lookups, mode):
    async with workers(OPEN, mode, OPEN) as (_, middle, partner):
        assert await ag.rpc_async("worker1", lambda x: {x, "any"}, (1,)) == {1, "any"}
        assert await ag.rpc_async("worker2", lambda x: {x, "any"}, (1,)) == {1, "any"}
        await asyncio.gather(*[each.agent.links.drain(1e9) for each in (middle, partner)])
        lookups.clear()
        partner.make_current()
        assert await ag.rpc_async("worker1", offer.add, (1,)) == 2
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            await ctx.backward(y.sum())
            np.testing.assert_allclose(ctx.gradients[x].numpy(), np.ones((1, 3)))
        with pytest.raises(NotAllowed):
            await ag.rpc_async("worker1", lambda: 1)
        with pytest.raises(SerializationError):
            await ag.rpc_async("worker1", offer.echo, ({1, 2},))
        middle.make_current()  # the other way it is the same connection
        with pytest.raises(NotAllowed):
            await ag.rpc_async("worker2", lambda: 1)
        assert await ag.rpc_async("worker2", offer.add, (1,)) == 2
        assert lookups == []


async def test_a_registered_name_may_call_what_is_exposed(workers):
    async with workers(OPEN, {"worker0": "registered", "*": "trusted"}, OPEN) as (_, _, other):
        assert await ag.rpc_async("worker1", offer.echo, ({1, 2},)) == [[{1, 2}], {}]
        with pytest.raises(NotAllowed):
            await ag.rpc_async("worker1", offer.hidden)
        other.make_current()
        assert await ag.rpc_async("worker1", offer.hidden) == "never"


async def test_references_of_trusted_members_stay_from_partners(workers):
    async with workers(OPEN, BANK, OPEN):
        rref = ag.remote("worker1", offer.make, ("private",))
        await rref.future()
        with pytest.raises(NotAllowed):  # its owner would have to speak plain data with worker2
            await ag.rpc_async("worker2", offer.read, (rref,))
        assert await rref == "private"


async def test_a_handshake_with_another_mode_than_the_rosters_is_refused(workers):
    async with workers(OPEN, BANK, OPEN) as (_, bank, partner):
        promise = replace(bank.agent.info, restricted=False, exceptions=())
        partner.agent.directory.add(promise)
        partner.make_current()
        with pytest.raises(AuthError, match="another mode") as caught:
            await ag.rpc_async("worker1", offer.add, (1,))
        assert caught.value.worker == "worker1"


async def test_modes_by_name_hold_from_the_rendezvous_on(tmp_path):
    place = f"unix:{tmp_path}/meet"
    secrets = {"shop": b"s" * 32, "till": b"t" * 32, "bank": b"b" * 32}
    options = ag.Options(secret=secrets, mode={"shop": "restricted", "*": "trusted"})
    bank = ag.Worker("bank", rank=0, world_size=3, rendezvous=place, options=options)
    rest = [
        ag.Worker(
            name,
            rank=rank,
            world_size=3,
            rendezvous=place,
            options=ag.Options(secret={"bank": secrets[name], name: b"o" * 32, other: b"p" * 32}),
        )
        for rank, name, other in ((1, "shop", "till"), (2, "till", "shop"))
    ]
    await asyncio.gather(*[each.__aenter__() for each in (bank, *rest)])
    try:
        shop, till = rest
        shop.make_current()
        assert await ag.rpc_async("bank", offer.add, (1,)) == 2
        with pytest.raises(NotAllowed):
            await ag.rpc_async("bank", lambda: 1)
        assert await ag.rpc_async("till", lambda: 1) == 1
        till.make_current()
        assert await ag.rpc_async("bank", lambda: 1) == 1
        bank.make_current()
        assert await ag.rpc_async("till", lambda: 1) == 1
    finally:
        await asyncio.gather(*[each.close() for each in (bank, *rest)])


async def test_a_cluster_of_processes_proves_no_names_and_so_has_no_modes_by_name():
    options = ag.Options(mode={"worker1": "restricted", "*": "trusted"})
    with pytest.raises(ValueError, match="proves a name"):
        ag.LocalCluster(2, options=options)
    async with ag.LocalCluster(2, options=options, processes=False) as cluster:
        with pytest.raises(NotAllowed):
            await cluster["worker1"].call(lambda: 1)


async def test_one_secret_from_the_environment_proves_no_names(tmp_path, monkeypatch):
    monkeypatch.setenv("AIOGRAD_SECRET", "s" * 32)
    worker = ag.Worker(
        "bank", rank=0, rendezvous=f"unix:{tmp_path}/meet", options=ag.Options(mode=BANK)
    )
    with pytest.raises(ValueError, match="proves a name"):
        await worker.__aenter__()


def test_modes_by_name_are_checked():
    with pytest.raises(ValueError, match="all others"):
        ag.Options(mode={"bank": "restricted"})
    with pytest.raises(ValueError, match="one of"):
        ag.Options(mode={"bank": "closed", "*": "trusted"})
    with pytest.raises(ValueError, match="no name"):
        ag.Options(mode={"b a n k": "trusted", "*": "trusted"})
    with pytest.raises(ValueError, match="certificate proves"):
        ag.Options(mode=BANK, tls=TLS("a.pem", "a.key", mutual=False))
    assert ag.Options(mode=BANK, tls=TLS("a.pem", "a.key")).mode == BANK


def test_modes_by_name_are_copied_and_travel():
    modes = dict(BANK)
    options = ag.Options(mode=modes)
    modes["*"] = "restricted"
    assert options.mode_for("anybody") == "trusted"
    assert options.mode_for("worker2") == "restricted"
    assert pickle.loads(pickle.dumps(options)) == options
