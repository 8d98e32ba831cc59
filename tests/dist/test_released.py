"""Released contexts of partners: late messages do not revive them, and each partner has its own memory."""

from __future__ import annotations

import numpy as np

import aiograd as ag
from aiograd.dist import released
from aiograd.dist.registry import ContextRegistry
from aiograd.dist.released import IDS, ReleasedForPartners
from aiograd.rpc.directory import LOST_PEERS
from tests.security import partner_functions as offer
from tests.security.conftest import workers_by_mode
from tests.support.waiting import until


def test_one_partner_pushes_out_ids_of_its_own_only():
    found = ReleasedForPartners()
    found.add("lab", 1)
    for id in range(2, 3 * IDS):
        found.add("clinic", id)
    assert 1 in found
    assert 2 not in found
    assert 3 * IDS - 1 in found
    assert len(found) == IDS + 1


def test_the_names_are_bounded():
    found = ReleasedForPartners()
    for number in range(LOST_PEERS + 5):
        found.add(f"w{number}", number)
    assert len(found) == LOST_PEERS
    assert 0 not in found


async def test_contexts_of_partners_do_not_push_out_those_of_this_worker(monkeypatch):
    monkeypatch.setattr(released, "IDS", 3)
    monkeypatch.setattr("aiograd.dist.registry.REMEMBERED", 3)
    monkeypatch.setattr("aiograd.dist.registry.LATELY", 0.0)
    async with workers_by_mode("restricted", "restricted") as (_, there):
        registry = there.agent.parts[ContextRegistry]
        own = registry.new()
        registry.release(own.id)
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        ids = []
        for _ in range(6):
            async with ag.context() as ctx:
                await ag.rpc_async("worker1", offer.project, (x,))
                ids.append(ctx.id)
        await until(lambda: not registry.all())
        assert own.id in registry._released
        assert [id in registry._partners_released for id in ids] == [False] * 3 + [True] * 3
        sender = there.agent.directory.get("worker0")
        assert registry.arriving(ids[-1], sender, "call") is None
