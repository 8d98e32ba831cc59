"""Invitations: who has one can join; no text of them shows the secret."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import pickle
import stat
import traceback
from dataclasses import replace

import pytest

import aiograd as ag
from aiograd.cluster.joining import bootstrap
from aiograd.cluster.joining.invitation import check_versions, own_versions
from aiograd.errors import AuthError, RpcError
from aiograd.rpc.options import Options
from tests.support.waiting import until

SECRET = b"a secret of the cluster"
QUICK = Options(grace=2.0, timeout=10.0, secret=SECRET)


@pytest.fixture
def place(tmp_path):
    return f"unix:{tmp_path}/meet"


@pytest.fixture
async def a(place):
    """The coordinator of an open cluster."""
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK) as worker:
        yield worker


async def who() -> str:
    return ag.get_worker_info().name


# ── the invitation ──────────────────────────────────────────────────────────────────────────────


async def test_no_text_of_an_invitation_shows_the_secret(a):
    invitation = a.invitation()
    assert invitation.secret == SECRET
    try:
        raise RpcError(f"{invitation!r} {invitation}")
    except RpcError as error:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        text = "".join(shown.format())
    for each in (text, f"{invitation.secret}"):
        assert "a secret of" not in each
        assert SECRET.hex() not in each


async def test_an_invitation_survives_pickle_and_copy(place):
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK) as a:
        invitation = a.invitation()
    for other in (pickle.loads(pickle.dumps(invitation)), copy.deepcopy(invitation)):
        assert other == invitation
        assert other.secret == SECRET
        assert "a secret of" not in repr(other)


async def test_a_saved_invitation_is_private_and_can_be_joined_by(a, tmp_path):
    path = tmp_path / "invitation"
    path.write_text("an older one")
    a.invitation().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ag.Invitation.load(path) == a.invitation()
    async with await ag.join(f"file:{path}", "b") as b:
        assert await a.agent.call("b", who) == "b"
        assert b.rank == 1


async def test_an_invitation_that_others_can_read_is_refused(place, tmp_path):
    path = tmp_path / "invitation"
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK) as a:
        a.invitation().save(path)
    os.chmod(path, 0o644)
    with pytest.raises(AuthError, match="chmod 600"):
        ag.Invitation.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"addresses": 7, "secret": null}'])
def test_a_file_that_is_no_invitation_is_named(tmp_path, text):
    path = tmp_path / "invitation"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(RpcError, match="is no invitation"):
        ag.Invitation.load(path)
    with pytest.raises(RpcError, match="there is no invitation"):
        ag.Invitation.load(tmp_path / "missing")


async def test_a_static_world_invites_nobody():
    async with ag.Worker("a", rank=0, world_size=1) as a:
        with pytest.raises(RpcError, match="static world of 1"):
            a.invitation()


# ── joining ─────────────────────────────────────────────────────────────────────────────────────


async def test_the_coordinator_gives_name_and_rank(a, place):
    first = await ag.join(a.invitation())
    second = await ag.join(place, options=QUICK)
    third = await ag.join(place, "worker9", options=QUICK)
    try:
        found = [(worker.name, worker.rank) for worker in (first, second, third)]
        assert found == [("worker1", 1), ("worker2", 2), ("worker9", 3)]
        assert await first.agent.call("worker2", who) == "worker2"
    finally:
        for worker in (first, second, third):
            await worker.close()


async def test_a_name_that_looks_like_a_members_is_not_given(place):
    async with ag.Worker("workerl", rank=0, rendezvous=place, options=QUICK) as first:
        second = await ag.join(first.invitation())
        assert (second.name, second.rank) == ("worker2", 2)
        await second.close()


async def test_every_member_leads_to_the_coordinator(a):
    async with await ag.join(a.invitation(), "b") as b:
        only_b = replace(b.invitation(), addresses=b.addresses)
        async with await ag.join(only_b, "c") as c:
            assert {each.name for each in c.workers()} == {"a", "b", "c"}


async def test_variables_of_launchers_are_not_read(a, monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"the secret of another world")
    secret.chmod(0o600)
    for name, text in {
        "AIOGRAD_RANK": "7",
        "AIOGRAD_WORLD_SIZE": "9",
        "AIOGRAD_NAME": "other",
        "AIOGRAD_RENDEZVOUS": "nowhere:1",
        "AIOGRAD_SECRET_FILE": str(secret),
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "RANK": "1",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, text)
    async with await ag.join(a.invitation()) as b:
        assert (b.name, b.rank) == ("worker1", 1)


async def test_labels_and_host_are_known_to_all_and_no_part_of_the_identity(a):
    async with await ag.join(a.invitation(), "b", labels={"gpu": "a=b", "zone": ""}):
        info = a.get_worker_info("b")
        assert info.labels == {"gpu": "a=b", "zone": ""}
        assert info.host == os.uname().nodename
        assert info == ag.WorkerInfo("b", 1)
        assert hash(info) == hash(ag.WorkerInfo("b", 1))
        again = pickle.loads(pickle.dumps(info))
        assert (again.host, again.labels) == (info.host, info.labels)
        assert a.workers()[1].labels == info.labels


@pytest.mark.parametrize("labels", [{"a=b": "c"}, {"": "c"}, {"a": "x" * 2000}])
async def test_labels_that_cannot_be_written_are_refused(labels):
    with pytest.raises(ValueError, match="label"):
        await ag.join("nowhere:1", labels=labels)
    with pytest.raises(TypeError, match="label"):
        await ag.join("nowhere:1", labels={"a": 7})


@pytest.mark.parametrize("where", [None, 7, b"host:1"])
async def test_a_place_that_is_none_is_a_type_error(where):
    with pytest.raises(TypeError, match=r"ag\.Invitation"):
        await ag.join(where)


async def test_a_guest_does_not_take_the_calls_of_the_current_worker_over(a):
    guest = await ag.join(a.invitation())
    assert ag.current_worker() is a
    await guest.close()
    assert ag.current_worker() is a


async def test_a_worker_that_was_killed_can_come_back_under_its_name_at_once(a):
    b = await ag.join(a.invitation(), "b")
    # Its listener stays, as if the kernel had not told anybody yet that it is gone.
    closing = asyncio.create_task(b.close(graceful=False))
    async with await ag.join(a.invitation(), "b") as again:
        assert again.rank == 1
        assert await a.agent.call("b", who) == "b"
    await closing


async def test_a_name_whose_worker_is_alive_is_refused(a):
    async with await ag.join(a.invitation(), "b"):
        with pytest.raises(RpcError, match="names must be unique: 'b'"):
            await ag.join(a.invitation(), "b")


# ── leaving ─────────────────────────────────────────────────────────────────────────────────────


async def test_left_says_why(place):
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK) as a:
        b, c = [await ag.join(a.invitation(), name) for name in "bc"]
        serving, left = asyncio.create_task(c.serve()), c.left
        await b.close()
        assert await b.left == "it was closed"
        assert not left.done()
    assert await serving
    assert await left == "the cluster is closed"


async def test_serve_ends_when_somebody_closes_the_worker(a):
    b = await ag.join(a.invitation(), "b")
    serving = asyncio.create_task(b.serve())
    await asyncio.sleep(0)
    await b.close()
    assert await serving
    assert await b.left == "it was closed"


async def test_left_names_a_coordinator_that_was_lost(place):
    a = await ag.Worker("a", rank=0, rendezvous=place, options=QUICK).start()
    b = await ag.join(a.invitation(), "b")
    serving = asyncio.create_task(b.serve())
    await a.close(graceful=False)
    assert not await serving
    assert "lost the coordinator a" in await b.left


# ── what does not fit ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("package", "version"), [("python", "3.9.1"), ("numpy", "1.26.4"), ("aiograd", "7.1.0")]
)
async def test_versions_that_do_not_fit_are_named_with_the_cure(a, monkeypatch, package, version):
    wrong = {**own_versions(), package: version}
    monkeypatch.setattr("aiograd.cluster.membership.member.own_versions", lambda: wrong)
    with pytest.raises(RpcError) as caught:
        await ag.join(a.invitation(), "b")
    text = str(caught.value)
    assert f"'b' on {os.uname().nodename} has {package} {version}" in text
    assert f"run it with {package}" in text


def test_other_patches_of_a_version_fit():
    ours = {"aiograd": "1.2.3", "python": "3.12.1", "numpy": "2.1.0"}
    theirs = {"aiograd": "1.2.9", "python": "3.12.7", "numpy": "2.4.0"}
    assert check_versions(theirs, "x", ours) is None
    assert check_versions({}, "x", ours) is None


async def test_a_secret_that_does_not_fit_is_an_auth_error_at_once(place):
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK):
        with pytest.raises(AuthError, match="secret"):
            await ag.join(place, options=replace(QUICK, secret=b"another secret of 16"))


async def test_a_network_without_a_secret_says_how_to_give_one():
    with pytest.raises(AuthError, match="secret_file"):
        await ag.join("example.invalid:29500", patience=1)


async def test_an_invitation_of_another_host_without_addresses_for_it_names_the_cure(a):
    elsewhere = replace(a.invitation(), locality="another host")
    with pytest.raises(RpcError, match=r'listen="0.0.0.0:0"'):
        await ag.join(elsewhere, patience=0.2)


async def test_a_newcomer_from_another_host_that_only_has_loopback_is_refused(a, monkeypatch):
    network = type(bootstrap.Runtime().network)
    invitation = replace(a.invitation(), locality="")  # the socket is reached nevertheless
    monkeypatch.setattr(network, "whereabouts", lambda self: ("far", "elsewhere"))
    with pytest.raises(RpcError) as caught:
        await ag.join(invitation, "b")
    for word in ("'b' on far", "unix:", os.uname().nodename, "/etc/hosts", "Options(listen="):
        assert word in str(caught.value)


# ── patience ────────────────────────────────────────────────────────────────────────────────────


async def test_a_late_coordinator_is_waited_for_with_a_line_now_and_then(
    place, monkeypatch, caplog
):
    monkeypatch.setattr(bootstrap, "NOTICE", 0.05)
    joining = asyncio.create_task(ag.join(place, "b", options=QUICK))
    with caplog.at_level(logging.INFO, "aiograd.cluster"):
        await until(lambda: sum("waits for" in line for line in caplog.messages) >= 2)
    assert place.removeprefix("unix:") in caplog.text
    async with ag.Worker("a", rank=0, rendezvous=place, options=QUICK), await joining as b:
        assert b.rank == 1


async def test_patience_ends_with_an_error_that_names_the_place(place):
    began = asyncio.get_running_loop().time()
    with pytest.raises(RpcError, match=r"nobody answered at .*meet in time"):
        await ag.join(place, options=QUICK, patience=0.3)
    assert asyncio.get_running_loop().time() - began < 3


async def test_a_name_that_dns_does_not_know_yet_is_waited_for(monkeypatch):
    known = asyncio.Event()

    async def resolve(name: str) -> list[str]:
        return ["127.0.0.1"] if known.is_set() else []

    monkeypatch.setattr(bootstrap, "resolve_once", resolve)
    plan = replace(ag.Worker("x", rank=0)._plan, join_timeout=10)
    start = bootstrap.Bootstrap(plan, {})
    start._deadline = asyncio.get_running_loop().time() + 10
    asked = asyncio.create_task(start._resolve("service"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not asked.done()
    known.set()
    assert await asked == ["127.0.0.1"]
    known.clear()
    start._deadline = asyncio.get_running_loop().time() + 0.05
    with pytest.raises(RpcError, match="service of the coordinator is not known on"):
        await start._resolve("service")


# ── files ───────────────────────────────────────────────────────────────────────────────────────


async def test_the_secret_of_a_run_that_ended_is_not_used_for_the_next(tmp_path):
    path, options = f"file:{tmp_path}/meet", Options(grace=2.0)
    async with ag.Worker("a", rank=0, rendezvous=path, options=options):
        content = (tmp_path / "meet").read_bytes()
    (tmp_path / "meet").touch(0o600)
    (tmp_path / "meet").write_bytes(content)  # as if rank 0 had been killed
    joining = asyncio.create_task(ag.join(path, "b", options=options))
    for _ in range(50):
        await asyncio.sleep(0)  # it has read the secret, and finds nobody
    async with ag.Worker("a", rank=0, rendezvous=path, options=options), await joining as b:
        assert b.rank == 1


async def test_a_stale_file_is_named_with_its_author(tmp_path):
    path = f"file:{tmp_path}/meet"
    async with ag.Worker("a", rank=0, rendezvous=path, options=QUICK):
        content = (tmp_path / "meet").read_bytes()
    (tmp_path / "meet").touch(0o600)
    (tmp_path / "meet").write_bytes(content)
    with pytest.raises(RpcError, match=f"which a on {os.uname().nodename}, process {os.getpid()}"):
        await ag.join(path, options=QUICK, patience=0.3)


async def test_an_invitation_leads_to_the_cluster_it_is_for_and_to_no_other_one(place):
    secret = ag.Options(secret=b"one secret for two clusters", grace=1.0)
    async with ag.Worker("a", rank=0, rendezvous=place, options=secret) as first:
        invitation = first.invitation()
        assert invitation.cluster == first.agent.cluster.hex()
    # The next cluster of the same name, at the same address.
    async with ag.Worker("a", rank=0, rendezvous=place, options=secret) as second:
        assert second.agent.cluster.hex() != invitation.cluster
        here = replace(invitation, addresses=second.addresses)
        with pytest.raises(ag.errors.AuthError, match=r"another cluster.*invitation"):
            await ag.join(here, "b", patience=3)
        async with await ag.join(second.invitation(), "b") as b:
            assert len(b.workers()) == 2


async def test_an_address_that_another_cluster_has_now_does_not_hide_the_others(place, tmp_path):
    secret = ag.Options(secret=b"one secret for two clusters", grace=1.0)
    async with (
        ag.Worker("a", rank=0, rendezvous=place, options=secret) as a,
        ag.Worker("z", rank=0, rendezvous=f"unix:{tmp_path}/other", options=secret) as z,
    ):
        invitation = replace(a.invitation(), addresses=(*z.addresses, *a.addresses))
        async with await ag.join(invitation, "b") as b:
            assert [worker.name for worker in b.workers()] == ["a", "b"]


async def test_a_damaged_cluster_id_is_named(place):
    async with ag.Worker("a", rank=0, rendezvous=place, options=ag.Options(grace=1.0)) as a:
        with pytest.raises(ag.errors.RpcError, match="cluster id"):
            await ag.join(replace(a.invitation(), cluster="12ab"), "b", patience=2)
