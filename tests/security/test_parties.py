"""Parties that share a secret with one of the others only: a registry, a clinic and a lab.

Names are proven, so no party can impersonate another, and parties without a shared secret cannot
connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

import aiograd as ag
from aiograd.cluster import TLS
from aiograd.cluster.config import WorkerPlan
from aiograd.cluster.joining.rendezvous import parse_rendezvous
from aiograd.errors import AuthError, NotAllowed, RpcError, WorkerLost
from aiograd.rpc import scope
from aiograd.rpc.agent import Agent
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.wire.handshake import HELLO_SIZE, VERSION, Handshake, Identity
from tests.security import partner_functions as offer
from tests.support.certificates import issue

CLINIC, LAB = b"what clinic and registry share..", b"what lab and registry share....."
STRANGERS = b"what nobody here has ever heard of"  # the same in every run: a test is named after it
NAMES = ("registry", "clinic", "lab")
SECRETS: dict[str, dict[str, bytes]] = {
    "registry": {"clinic": CLINIC, "lab": LAB},
    "clinic": {"registry": CLINIC},
    "lab": {"registry": LAB},
}


def worker(name: str, place: str, world_size: int | None = 3, **settings: Any) -> ag.Worker:
    settings.setdefault("secret", SECRETS[name])
    options = ag.Options(**{"mode": "restricted", "grace": 2.0, **settings})
    rank = NAMES.index(name)
    return ag.Worker(name, rank=rank, world_size=world_size, rendezvous=place, options=options)


@contextlib.asynccontextmanager
async def together(*workers: ag.Worker) -> AsyncIterator[tuple[ag.Worker, ...]]:
    """All of them in this loop; they leave together, too."""
    async with asyncio.timeout(20):
        await asyncio.gather(*[each.start() for each in workers])
    try:
        workers[0].make_current()
        yield workers
    finally:
        await asyncio.gather(*[each.close() for each in workers])


@pytest.fixture(params=["unix", "tcp", "tls", "file"])
def rendezvous(request: pytest.FixtureRequest, tmp_path: Path, free_port: int) -> Any:
    """The rendezvous, and the options of each party."""
    kind = request.param
    places = {"unix": f"unix:{tmp_path}/meet", "file": f"file:{tmp_path}/sign"}
    place = places.get(kind, f"127.0.0.1:{free_port}")
    papers = certificates(tmp_path) if kind == "tls" else {}
    transport = "tcp" if kind in ("tcp", "tls") else "auto"
    return place, {
        name: {"transport": transport, **({"tls": papers[name]} if papers else {})}
        for name in NAMES
    }


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificates(folder: Path) -> dict[str, TLS]:
    authority = trustme.CA()
    return {name: issue(authority, folder, name) for name in NAMES}


# ── together ────────────────────────────────────────────────────────────────────────────────────


async def test_parties_work_with_the_registry_and_not_with_each_other(rendezvous, lookups):
    place, settings = rendezvous
    three = [worker(name, place, **settings[name]) for name in NAMES]
    async with together(*three) as (_, clinic, lab):
        assert [each.name for each in ag.workers()] == list(NAMES)
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            parts = [await ag.rpc_async(name, offer.project, (x,)) for name in NAMES[1:]]
            await ctx.backward((parts[0] + parts[1]).sum())
            np.testing.assert_allclose(ctx.gradients[x].numpy(), 2 * np.ones((1, 3)))
        for party, other in ((clinic, "lab"), (lab, "clinic")):
            party.make_current()
            assert await ag.rpc_async("registry", offer.add, (1,)) == 2
            for _ in range(2):
                begun = time.perf_counter()
                with pytest.raises(AuthError, match=f"{party.name} and {other} share no") as caught:
                    await ag.rpc_async(other, offer.add, (1,))
                assert caught.value.worker == other
                assert time.perf_counter() - begun < 1
        for each in three:  # that they cannot speak with each other is no loss of anybody
            assert [info.name for info in each.workers()] == list(NAMES)
        await asyncio.gather(
            *[each.member.collectives.gather(None, None, 5, "barrier") for each in three]
        )
        assert lookups == []


async def test_a_party_with_one_secret_for_all_is_refused_where_it_shares_none(tmp_path):
    """The clinic has one secret for all peers; the lab's listener refuses it, at once."""
    place = f"unix:{tmp_path}/meet"
    three = [worker("registry", place), worker("clinic", place, secret=CLINIC)]
    async with together(*three, worker("lab", place)) as everyone:
        _, clinic, _ = everyone
        clinic.make_current()
        assert await ag.rpc_async("registry", offer.add, (1,)) == 2
        begun = time.perf_counter()
        with pytest.raises(AuthError, match="clinic and lab cannot connect") as caught:
            await ag.rpc_async("lab", offer.add, (1,))
        assert time.perf_counter() - begun < 1
        assert caught.value.worker == "lab"
        await asyncio.gather(
            *[each.member.collectives.gather(None, None, 5, "barrier") for each in everyone]
        )


async def test_a_secret_for_all_others_lets_others_in(tmp_path):
    place = f"unix:{tmp_path}/meet"
    rest = b"what all but the clinic share..."
    registry = worker("registry", place, secret={"clinic": CLINIC, "*": rest})
    async with together(registry, worker("clinic", place), worker("lab", place, secret=rest)):
        assert await ag.rpc_async("clinic", offer.add, (1,)) == 2
        assert await ag.rpc_async("lab", offer.add, (1,)) == 2


async def test_secrets_are_read_from_a_file_for_each_name(tmp_path):
    def written(name: str, secret: bytes) -> Path:
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_bytes(secret)
        return path

    clinic, lab = written("clinic", CLINIC), written("lab", LAB)
    files: dict[str, Mapping[str, Path]] = {
        "registry": {"clinic": clinic, "lab": lab},
        "clinic": {"registry": clinic},
        "lab": {"registry": lab},
    }
    place = f"unix:{tmp_path}/meet"
    three = [worker(name, place, secret=None, secret_file=files[name]) for name in NAMES]
    async with together(*three):
        assert await ag.rpc_async("lab", offer.add, (1,)) == 2
    clinic.chmod(0o644)
    with pytest.raises(AuthError, match="chmod 600"):
        await worker("registry", place, secret=None, secret_file=files["registry"]).start()


async def test_a_worker_that_is_given_its_rank_asks_for_it_by_its_name(tmp_path):
    place = f"unix:{tmp_path}/meet"
    registry = worker("registry", place, world_size=None)
    options = ag.Options(secret=SECRETS["lab"], mode="restricted")
    plan = WorkerPlan(name="lab", rank=None, options=options, rendezvous=parse_rendezvous(place))
    async with together(registry):
        lab = await ag.Worker.from_plan(plan).start()
        try:
            assert lab.rank == 1
            registry.make_current()
            assert await ag.rpc_async("lab", offer.add, (1,)) == 2
        finally:
            await lab.close()


# ── posing ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("lab", {"registry": CLINIC}),  # the clinic as the lab
        ("lab", CLINIC),
        ("clinic", STRANGERS),
        ("clinic", {"registry": STRANGERS}),
        ("clinic", {"bank": CLINIC}),  # who would not speak with a registry
        ("registry", CLINIC),  # as the registry, at its own door
    ],
)
async def test_joining_by_another_name_or_with_another_secret_is_refused(rendezvous, name, secret):
    place, settings = rendezvous
    registry = worker("registry", place, world_size=None, **settings["registry"])
    async with together(registry):
        impostor = ag.Worker(
            name,
            rank=7,
            rendezvous=place,
            options=ag.Options(secret=secret, mode="restricted", **settings[name]),
        )
        begun = time.perf_counter()
        with pytest.raises(AuthError, match=name):
            await impostor.start()
        assert time.perf_counter() - begun < 4
        assert [each.name for each in ag.workers()] == ["registry"]
        clinic = worker("clinic", place, world_size=None, **settings["clinic"])
        async with clinic:  # and others are served
            registry.make_current()
            assert await ag.rpc_async("clinic", offer.add, (1,)) == 2


async def test_a_stranger_gets_the_same_answers_for_known_and_unknown_names(tmp_path):
    """So known names cannot be probed."""
    async with together(worker("registry", f"unix:{tmp_path}/meet", world_size=None)) as (one,):
        heard = []
        for name in ("clinic", "bank", "registry", "nobody"):
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/meet")
            stranger = Handshake(
                Identity(name, 7, os.urandom(16)), b"x" * 32, os.urandom(32), client=True
            )
            writer.write(stranger.start())
            answer = await reader.readexactly(HELLO_SIZE)
            with pytest.raises(AuthError):
                stranger.receive(answer)
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                rest = await reader.read()
            assert one.name.encode() not in answer
            assert one.agent.incarnation not in answer
            heard.append((answer[:10], rest))  # magic and version; the rest looks random
            writer.close()
        assert heard == [(b"aiograd\0" + VERSION.to_bytes(2, "little"), b"")] * 4
        assert one.agent.limits["handshake"] == 4


async def test_joining_fails_where_the_registry_does_not_prove_its_name(tmp_path):
    """The lab listens where the registry should: the clinic does not take it for the registry."""
    place = f"unix:{tmp_path}/meet"
    false = ag.Worker(
        "registry", rank=0, rendezvous=place, options=ag.Options(secret={"clinic": LAB})
    )
    async with together(false):
        with pytest.raises(AuthError, match="clinic and registry"):
            await worker("clinic", place, world_size=None).start()


async def test_a_member_joins_by_the_name_that_it_proved(tmp_path):
    """Proving one's own name and asking for a place under another one is no way in."""
    place = f"unix:{tmp_path}/meet"
    async with together(worker("registry", place, world_size=None)) as (registry,):
        options = ag.Options(secret=SECRETS["clinic"], mode="restricted")
        clinic = Agent("clinic", 1, secret=SECRETS["clinic"], options=options)
        try:
            await clinic.start()
            coordinator = await clinic.connect(f"unix:{tmp_path}/meet")
            as_lab = replace(clinic.info, name="lab")
            with pytest.raises(NotAllowed, match="for itself only"):
                await clinic.request(coordinator, "cluster.join", as_lab, None, ())
            assert [each.name for each in registry.workers()] == ["registry"]
        finally:
            await clinic.close()


@contextlib.asynccontextmanager
async def three_agents() -> AsyncIterator[list[Agent]]:
    """Three that share secrets two by two, and know each other."""
    runtime, shared = Runtime(), {}
    for pair in (("a", "b"), ("a", "c"), ("b", "c")):
        shared[frozenset(pair)] = os.urandom(32)
    agents = []
    try:
        for rank, name in enumerate("abc"):
            secrets = {other: shared[frozenset((name, other))] for other in set("abc") - {name}}
            agents.append(Agent(name, rank, secret=secrets, runtime=runtime))
            await agents[-1].start(f"memory:{name}")
        for agent in agents:
            for other in agents:
                agent.directory.add(other.info)
        yield agents
    finally:
        for agent in agents:
            await agent.close()


def claim(agent, incarnation):
    """Let an agent present itself with another incarnation from now on."""
    agent.incarnation = incarnation
    authenticator = agent.listener._authenticator
    authenticator.identity = replace(authenticator.identity, incarnation=incarnation)


@pytest.mark.parametrize("known_by", ["its link", "the roster", "both"])
async def test_a_stolen_incarnation_does_not_take_over_a_connection(known_by):
    """Incarnations are in the roster: c proves to be c, and says that it is the start of b."""
    async with three_agents() as (a, b, c):
        if known_by != "the roster":
            assert await b.call("a", whoami) == "a"
        if known_by == "its link":  # it has come, and is no member so far
            a.directory.remove("b")
        links = dict(a.links.table)
        claim(c, b.incarnation)
        with pytest.raises((AuthError, WorkerLost)):
            await c.call("a", whoami)
        assert a.links.table == links
        assert await b.call("a", whoami) == "a"


async def test_a_stolen_incarnation_does_not_connect_before_its_owner_is_known():
    """The same, before a has heard of b: incarnations follow from names, so c cannot have b's."""
    async with three_agents() as (a, b, c):
        a.directory.remove("b")
        claim(c, b.incarnation)
        with pytest.raises((WorkerLost, AuthError)):
            await c.call("a", whoami)
        a.directory.add(b.info)
        assert await a.call("b", whoami) == "b"


@pytest.mark.parametrize("stolen", [8, 16], ids=["stamp", "whole"])
async def test_the_incarnation_of_a_dead_worker_is_nobodys(stolen):
    """lab died; what it held would be given to whoever came with its incarnation."""
    async with three_agents() as (a, b, c):
        dead = b.incarnation
        assert await b.call("a", whoami) == "a"
        await b.close()
        a.directory.remove("b")
        claim(c, dead[:stolen] + c.incarnation[stolen:])
        with pytest.raises((WorkerLost, AuthError)):
            await c.call("a", whoami)


async def test_another_member_at_a_peers_address_is_not_taken_for_it():
    """b is gone, and c listens where b did, with b's incarnation but by its own, proven name."""
    async with three_agents() as (a, b, c):
        info = b.info
        await b.close()
        claim(c, info.incarnation)
        await c.listener.listen("memory:b")
        with pytest.raises((WorkerLost, AuthError)) as caught:
            await a.call("b", offer.add, (1,))
        assert caught.value.worker == "b"


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_peer_cannot_claim_the_workers_own_name(name):
    runtime = Runtime()
    async with contextlib.AsyncExitStack() as stack:
        a, twin = (Agent(each, 0, secret=LAB, runtime=runtime) for each in ("a", name))
        for agent in (a, twin):
            stack.push_async_callback(agent.close)
        await a.start("memory:a")
        await twin.start()
        claim(twin, a.incarnation)
        with pytest.raises(AuthError):
            await twin.connect("memory:a")
        assert await a.call("a", whoami) == "a"


def whoami() -> str:
    return scope.AGENT.get().name


# ── what is shown, checked and kept ─────────────────────────────────────────────────────────────


async def test_secrets_by_name_show_up_nowhere(tmp_path, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    place = f"unix:{tmp_path}/meet"
    shown: list[Any] = []
    async with together(*[worker(name, place) for name in NAMES]) as everyone:
        for each in everyone:
            agent = each.agent
            shown += [each, agent, each._plan, agent.options, agent.identity]
            known = agent.listener._authenticator
            shown += [vars(agent.listener), vars(agent.dialer), vars(known), vars(known._keyring)]
            shown += [vars(agent.options), vars(known.handshake())]
            assert CLINIC not in pickle.dumps(agent.options)
        everyone[1].make_current()
        with pytest.raises(AuthError) as caught:
            await ag.rpc_async("lab", offer.add, (1,))
        shown += [caught.value, pickle.dumps(caught.value)]
    text = " ".join(map(repr, shown)) + caplog.text + "".join(capfd.readouterr())
    for secret in (CLINIC, LAB):
        assert secret.decode() not in text
        assert secret.hex() not in text


def test_secrets_by_name_are_checked():
    for wrong in ({}, {"b a d": CLINIC}, {"lab": b"short"}, {"lab": LAB, "*": b""}):
        with pytest.raises(ValueError, match=r"at least|no name"):
            ag.Options(secret=wrong)
    with pytest.raises(TypeError, match="bytes"):
        ag.Options(secret={"lab": "a text that is long enough"})
    with pytest.raises(ValueError, match="at least one"):
        ag.Options(secret_file={})
    with pytest.raises(ValueError, match="one party"):
        ag.LocalCluster(1, options=ag.Options(secret={"driver": LAB}))


def test_secrets_by_name_are_copied_and_stay_at_home():
    secrets = {"lab": LAB}
    options = ag.Options(secret=secrets, secret_file={"lab": "lab.key"})
    secrets["lab"] = CLINIC
    assert options.secret == {"lab": LAB}
    again = pickle.loads(pickle.dumps(options))
    assert again.secret is None
    assert again.secret_file == {"lab": "lab.key"}


def test_modes_by_name_need_names_that_are_proven():
    one_sided = TLS("a.pem", "a.key", mutual=False)
    modes = {"lab": "restricted", "*": "trusted"}
    assert ag.Options(mode=modes, tls=one_sided, secret={"lab": LAB}).mode_for("lab")
    for secret in (LAB, {"*": LAB}):
        with pytest.raises(ValueError, match="proves a name"):
            ag.Options(mode=modes, tls=one_sided, secret=secret)


async def test_an_incomplete_world_names_the_missing_party(tmp_path):
    place = f"unix:{tmp_path}/meet"
    registry = WorkerPlan(
        name="registry",
        rank=0,
        world_size=2,
        options=ag.Options(secret=SECRETS["registry"]),
        rendezvous=parse_rendezvous(place),
        join_timeout=0.3,
    )
    with pytest.raises(RpcError, match="no word from rank 1"):
        await ag.Worker.from_plan(registry).start()
