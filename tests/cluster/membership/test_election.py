"""When the coordinator is lost, one member takes over, and never two."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from aiograd.cluster.api import barrier, get_worker_info
from aiograd.cluster.membership import election as election_module
from aiograd.cluster.membership.roster import first_version
from aiograd.cluster.worker import Worker
from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.extension import FaultAction
from aiograd.rpc.options import Options
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(election_module, "TURN", 0.2)
    monkeypatch.setattr(election_module, "ELECTION", 3.0)


def leaders(workers: list[Worker]) -> set[str]:
    """Whom these workers follow."""
    found = set()
    for worker in workers:
        leader = worker.member.coordinator
        found.add(worker.name if leader is None else leader.name)
    return found


def crash(worker: Worker) -> asyncio.Task[None]:
    return asyncio.create_task(worker.close(graceful=False))


async def agree(workers: list[Worker], names: list[str], within: float = 10.0) -> None:
    """Wait until these workers follow one coordinator, and know each other."""

    def settled() -> bool:
        rosters = [[peer.name for peer in worker.member.peers] for worker in workers]
        return len(leaders(workers)) == 1 and all(roster == names for roster in rosters)

    await until(settled, within)


async def who() -> str:
    return get_worker_info().name


async def test_the_lowest_rank_takes_over_and_joins_and_barriers_work_again(world):
    a, *others = await world.open(*"abcdef")
    calls = [x.agent.call(y.name, who) for x in others for y in others for _ in range(4)]
    await crash(a)
    await agree(others, list("bcdef"))
    assert leaders(others) == {"b"}
    assert len(await asyncio.gather(*calls)) == 100
    await world.everyone(others, barrier)
    # A newcomer finds the successor through any member.
    plan = replace(
        world.worker("x", 9)._plan,
        name="",
        rank=None,
        rendezvous=None,
        secret=None,
        invitation=replace(others[3].invitation(), addresses=others[3].addresses),
    )
    newcomer = Worker.from_plan(replace(plan, listen=("memory:newcomer",)))
    await newcomer.start()
    try:
        assert newcomer.rank > 5
        await agree([*others, newcomer], [*"bcdef", newcomer.name])
        assert await others[4].agent.call(newcomer.name, who) == newcomer.name
        # The successor can be lost, too.
        await crash(others[0])
        await agree([*others[1:], newcomer], [*"cdef", newcomer.name])
        assert leaders(others[1:]) == {"c"}
    finally:
        await newcomer.close(graceful=False)


@pytest.mark.parametrize("service", ["cluster.elect", "cluster.succeed"])
@pytest.mark.parametrize("point", range(4))
async def test_a_candidate_that_crashes_at_any_message_is_replaced(world, service, point):
    a, b, *others = await world.open(*"abcdef")
    sent: Counter[str] = Counter()
    ends = []

    class Crash:
        def on_send(self, kind: str, to: str) -> FaultAction:
            sent[kind] += 1
            if kind == service and sent[kind] == point + 1:
                ends.append(crash(b))
            return FaultAction()

    b.faults = Crash()
    await crash(a)
    await until(lambda: ends)
    await ends[0]
    await agree(others, list("cdef"), within=10)
    terms = {worker.member.succession.term for worker in others}
    assert len(terms) == 1
    assert len(leaders(others)) == 1


async def test_the_minority_does_not_elect_and_leaves_with_the_reason(world):
    a, b, c, *others = await world.open(*"abcde")
    served = [asyncio.create_task(worker.serve()) for worker in others]
    left = [worker.left for worker in others]
    await asyncio.gather(*map(crash, (b, c, a)))
    # The coordinator may have announced the end of some before it ended itself.
    remaining = {len(worker.member.roster.members) for worker in others if worker.running}
    if remaining <= {2, 3}:
        pytest.skip("the coordinator was quicker: the others are no minority any more")
    assert await asyncio.gather(*served) == [False, False]
    for why in await asyncio.gather(*left):
        assert "lost the coordinator a" in why
        assert "no majority of" in why


async def test_a_member_that_still_reaches_the_coordinator_grants_no_vote(world):
    a, b, c = await world.open(*"abc")
    lost = a.agent.info
    answer = await b.agent.request("c", "cluster.elect", 1, b.member.roster.version, lost)
    assert answer[0] is False
    assert leaders([b, c]) == {"a"}


async def test_only_the_winner_of_a_later_term_is_followed(world):
    a, b, c = await world.open(*"abc")
    peers = tuple(b.member.peers)
    # Of our term, and of a later term while the coordinator is there.
    for version in (first_version(0), 7, first_version(1)):
        with pytest.raises((NotAllowed, ProtocolError)):
            await b.agent.request("c", "cluster.succeed", version, peers, ((a.agent.info, "why"),))
    assert leaders([b, c]) == {"a"}


async def test_two_members_do_not_elect(world):
    a, b = await world.open("a", "b")
    serving = asyncio.create_task(b.serve())
    await crash(a)
    assert not await serving


async def test_who_is_struck_out_learns_no_roster_from_those_who_have_a_newer_one(world):
    a, b, c, _ = await world.open(*"abcd")
    before = b.member.roster.version
    c.member.roster.version += 1  # a change that b has missed: its own loss
    del c.member.roster.members["b"]
    answer = await b.agent.request("c", "cluster.elect", 1, before, a.agent.info)
    assert answer[:4] == (False, 0, (), ())


# ── partners ────────────────────────────────────────────────────────────────────────────────────


async def with_a_partner(world) -> list[Worker]:
    """An open cluster of trusted workers, and a partner of the lowest rank behind rank 0."""
    found = []
    for rank, name in enumerate(("a", "partner", "b", "c", "d")):
        options = Options(grace=2.0, timeout=10.0)
        if name == "partner":
            options = replace(options, mode="restricted")
        found.append(await world.worker(name, rank, options=options).start())
    return found


async def test_a_partner_does_not_lead_and_leaves_when_its_coordinator_is_lost(world):
    a, partner, *others = await with_a_partner(world)
    left = partner.left
    serving = asyncio.create_task(partner.serve())
    await crash(a)
    assert not await serving
    assert "lost the coordinator a" in await left
    await agree(others, list("bcd"))
    assert leaders(others) == {"b"}


async def test_a_partner_gets_no_vote_and_nobody_follows_it(world, monkeypatch):
    a, partner, *others = await with_a_partner(world)
    lost, peers = a.agent.info, tuple(partner.member.peers)

    async def out_of_reach(self: object, peer: object) -> bool:
        return False

    monkeypatch.setattr(election_module.Election, "_leads", out_of_reach)
    for worker in others:
        with pytest.raises(NotAllowed):
            await partner.agent.request(worker.name, "cluster.elect", 1, first_version(1), lost)
        with pytest.raises(NotAllowed):
            await partner.agent.request(
                *(worker.name, "cluster.succeed", first_version(1), peers, ((lost, "why"),))
            )
    assert leaders(others) == {"a"}


async def test_a_partner_that_lies_about_votes_and_rosters_is_not_asked(world):
    """Its answer would be the roster of the next coordinator."""
    a, partner, *others = await with_a_partner(world)
    asked = []

    def lie(sender: object, *request: object) -> object:
        asked.append(request)
        return True, 1 << 100, (partner.agent.info,), (), 1

    partner.agent.services["cluster.elect"] = lie
    await crash(a)
    await until(lambda: leaders(others) == {"b"})
    await agree(others, list("bcd"))
    assert not asked
