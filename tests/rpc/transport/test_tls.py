"""TLS between workers, with certificates made for the test."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import math
import os
import pickle
import re
import ssl
import sys
from typing import Any

import numpy as np
import pytest
import trustme

from aiograd.cluster import TLS
from aiograd.cluster.worker import Worker
from aiograd.errors import AuthError, InsecureTransport, SecurityError, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import Network, split_tcp
from aiograd.rpc.transport.tls import check_own_certificate
from tests.support.agents import SECRET, introduce
from tests.support.waiting import until


def triple(x):
    return x * 3


@contextlib.asynccontextmanager
async def pair(first: TLS | None, second: TLS | None, **settings: Any):
    """Two agents over loopback TCP that know each other."""
    agents = [
        Agent(f"worker{i}", i, secret=SECRET, options=Options(tls=tls, **settings))
        for i, tls in enumerate((first, second))
    ]
    try:
        for agent in agents:
            await agent.start("tcp:127.0.0.1:0")
        introduce(agents)
        yield agents
    finally:
        for agent in agents:
            await agent.close()


@pytest.mark.parametrize("mutual", [True, False])
async def test_calls_and_large_arrays_go_over_tls(papers, mutual):
    first, second = (papers(f"worker{i}", mutual=mutual) for i in range(2))
    async with pair(first, second) as (a, b):
        assert await a.call("worker1", triple, (14,)) == 42
        large = np.arange(2_000_000.0)
        np.testing.assert_array_equal(await b.call("worker0", triple, (large,)), large * 3)
        transport = a.link("worker1").connection.transport
        assert transport.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_many_calls_both_ways_at_once_go_over_tls(papers):
    async with pair(papers("worker0"), papers("worker1")) as (a, b):
        calls = [x.call(to, triple, (i,)) for i in range(100) for x, to in ((a, 1), (b, 0))]
        assert await asyncio.gather(*calls) == [i * 3 for i in range(100) for _ in range(2)]


async def test_a_certificate_for_another_name_is_refused(papers):
    async with pair(papers("worker0"), papers("impostor")) as (a, _):
        with pytest.raises(AuthError, match="impostor"):
            await a.call("worker1", triple, (1,))
    async with pair(papers("impostor"), papers("worker1")) as (a, b):
        with pytest.raises((AuthError, WorkerLost)):
            await a.call("worker1", triple, (1,))
        assert not b.links.counters()["running_calls"]


@pytest.mark.parametrize("name", ["BANK", "Bank"])
@pytest.mark.parametrize("dials", ["bank", "registry"])
async def test_a_certificate_does_not_cover_its_name_in_other_letters(papers, name, dials):
    """The mode of `bank` must hold for whoever shows its certificate."""
    registry = Agent("registry", 0, secret=SECRET, options=Options(tls=papers("registry")))
    bank = Agent(name, 1, secret=SECRET, options=Options(tls=papers("bank")))
    try:
        for agent in (registry, bank):
            await agent.start("tcp:127.0.0.1:0")
        registry.directory.add(bank.info)
        bank.directory.add(registry.info)
        caller, to = (registry, name) if dials == "registry" else (bank, "registry")
        with pytest.raises(AuthError):
            await caller.call(to, triple, (1,))
        assert registry.limits["handshake"] or dials == "registry"
    finally:
        for agent in (registry, bank):
            await agent.close()


async def test_certificates_of_another_authority_are_refused(papers):
    other = trustme.CA()
    async with pair(papers("worker0"), papers("worker1", other)) as (a, b):
        with pytest.raises(AuthError):
            await a.call("worker1", triple, (1,))
        with pytest.raises(AuthError):
            await b.call("worker0", triple, (1,))


async def test_one_without_a_certificate_is_refused_where_both_must_show_one(papers, authority):
    async with pair(papers("worker0", mutual=False), papers("worker1")) as (a, _):
        with pytest.raises((AuthError, WorkerLost)):
            await a.call("worker1", triple, (1,))


async def test_plain_and_tls_do_not_meet(papers):
    async with pair(None, papers("worker1"), handshake_timeout=0.5) as (a, b):
        with pytest.raises((AuthError, WorkerLost)):
            await a.call("worker1", triple, (1,))
        with pytest.raises((AuthError, WorkerLost)):
            await b.call("worker0", triple, (1,))


# Which side refused, and why: at the worker that dials, and in the log of the one that listens.
FAILURES = {
    "no TLS here": (
        lambda papers, _: (None, papers("worker1")),
        "another secret, TLS there and none here, or too many",
        "no TLS: it does not speak TLS",
    ),
    "no TLS there": (
        lambda papers, _: (papers("worker0"), None),
        "closed during the TLS handshake; does the other side speak TLS?",
        "the other side does not speak aiograd",
    ),
    "another authority there": (
        lambda papers, other: (papers("worker0"), papers("worker1", other)),
        "its certificate is refused here: self-signed certificate in certificate chain",
        "no TLS: it refuses this worker's certificate: unknown ca",
    ),
    "another authority here": (
        lambda papers, other: (papers("worker0"), papers("worker1", trust=other)),
        "no TLS: it refuses this worker's certificate: unknown ca",
        "no TLS: its certificate is refused here: self-signed certificate in certificate chain",
    ),
    "no certificate here": (
        lambda papers, _: (papers("worker0", mutual=False), papers("worker1")),
        "no TLS: it refuses this worker's certificate: certificate required",
        "no TLS: it shows no certificate, and TLS(mutual=True) asks for one",
    ),
    "another name here": (
        lambda papers, _: (papers("impostor"), papers("worker1")),
        "another secret, a certificate that is not for this worker's name, or too many",
        "the certificate is for impostor, not for worker0",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_failed_handshake_says_on_both_sides_who_refused_and_why(papers, caplog, case):
    certificates, told, logged = FAILURES[case]
    async with pair(*certificates(papers, trustme.CA()), handshake_timeout=0.5) as (a, _):
        with caplog.at_level(logging.WARNING, "aiograd.security"):
            with pytest.raises((AuthError, WorkerLost), match=re.escape(told)):
                await a.call("worker1", triple, (1,))
            # A client may know before the server that it refuses it.
            await until(lambda: [r for r in caplog.records if r.name == "aiograd.security"])
            # However often the worker dials, a warning comes once in a while, with the address.
            (line,) = [r.getMessage() for r in caplog.records if r.name == "aiograd.security"]
        assert line.startswith("worker1 refused a connection of ")
        assert " from tcp:127.0.0.1" in line
        assert logged in line


def test_the_own_certificate_is_compared_with_the_own_name(papers, authority, tmp_path):
    mine = papers("worker0")
    check_own_certificate(mine, "worker0")
    with pytest.raises(AuthError, match=r"is a certificate for worker0, and this worker is boss"):
        check_own_certificate(mine, "boss")
    # Whom the others trust is not known here.
    check_own_certificate(papers("worker0", trust=trustme.CA()), "worker0")
    leaf = authority.issue_cert("late", not_after=datetime.datetime(2020, 1, 1))
    leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / "late.pem")
    with pytest.raises(AuthError, match="certificate has expired"):
        check_own_certificate(TLS(tmp_path / "late.pem", tmp_path / "late.pem"), "late")


async def test_a_worker_with_the_certificate_of_another_does_not_even_start(papers):
    worker = Worker("boss", options=Options(tls=papers("helper")))
    with pytest.raises(AuthError, match="must have boss among its DNS names"):
        await worker.start()


async def test_the_secret_is_needed_all_the_same(papers):
    async with pair(papers("worker0"), papers("worker1")) as (a, b):
        stranger = Agent(
            "worker0", 0, secret=b"another secret, of 32 bytes too.", options=a.options
        )
        try:
            await stranger.start()
            stranger.directory.add(b.info)
            with pytest.raises(AuthError):
                await stranger.call("worker1", triple, (1,))
        finally:
            await stranger.close()


async def test_older_tls_is_refused(papers):
    async with pair(papers("worker0"), papers("worker1")) as (_, b):
        host, port = split_tcp(b.info.addresses[0])
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, OSError)):
            await asyncio.open_connection(host, port, ssl=old)


async def test_a_relay_with_a_certificate_of_its_own_fails_the_proof(papers):
    """Somebody between two workers, with a valid certificate in worker1's name, gets nowhere."""
    middle = papers("worker1")
    async with pair(papers("worker0"), papers("worker1")) as (a, b):
        relay = Relay(middle, b.info.addresses[0])
        address = await relay.start()
        try:
            a.directory.add(dataclasses.replace(b.info, addresses=(address,)))
            with pytest.raises(AuthError):
                await a.call("worker1", triple, (1,))
            assert relay.carried
        finally:
            await relay.close()


class Relay:
    """Ends TLS on both sides and carries what is inside."""

    def __init__(self, tls: TLS, to: str) -> None:
        self._tls, self._to = tls, to
        self._tasks: set[asyncio.Task[None]] = set()
        self.carried = 0

    async def start(self) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls.cert, self._tls.key)
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0, ssl=context)
        return f"tcp:127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(self._tls.cert, self._tls.key)
        host, port = split_tcp(self._to)
        there, back = await asyncio.open_connection(host, port, ssl=context)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, back))
                group.create_task(self._copy(there, writer))
        finally:
            back.transport.abort()
            writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                self.carried += len(data)
                writer.write(data)
        writer.transport.abort()

    async def close(self) -> None:
        self._server.close()


async def test_strangers_that_never_speak_tls_are_counted_and_let_go(papers):
    async with pair(papers("worker0"), papers("worker1"), handshake_timeout=0.3) as (_, b):
        host, port = split_tcp(b.info.addresses[0])
        silent = [await asyncio.open_connection(host, port) for _ in range(20)]
        ends = [reader.read() for reader, _ in silent]
        async with asyncio.timeout(3):
            await asyncio.gather(*ends, return_exceptions=True)
        assert not b.listener.unauthenticated
        for _, writer in silent:
            writer.close()


async def test_listening_everywhere_needs_tls_or_a_word(papers):
    with pytest.raises(InsecureTransport):
        await Network().listen("tcp:0.0.0.0:0", asyncio.BufferedProtocol)
    agent = Agent("worker0", 0, secret=SECRET, options=Options(tls=papers("worker0")))
    await agent.start("tcp:0.0.0.0:0")
    await agent.close()


def test_files_that_are_no_certificates_are_named(tmp_path):
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(TypeError):
        TLS(3, "k")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TLS"):
        Options(tls=object())  # type: ignore[arg-type]
    tls = TLS(tmp_path / "x", tmp_path / "x")
    assert pickle.loads(pickle.dumps(Options(tls=tls))).tls == tls
    from aiograd.rpc.transport.tls import CertificateCredentials

    for wrong in (tls, TLS(os.fspath(tmp_path / "missing"), "k")):
        with pytest.raises(SecurityError, match="certificates"):
            CertificateCredentials(wrong, 1.0)


@pytest.mark.deadline(60)
async def test_a_worker_joins_by_hand_over_tls(papers, tmp_path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a secret that both have, 32 bytes")
    mine, theirs = papers("boss"), papers("helper")
    options = Options(tls=mine, transport="tcp", secret_file=secret)
    async with Worker("boss", rank=0, rendezvous="127.0.0.1:0", options=options) as boss:
        (place,) = [a.removeprefix("tcp:") for a in boss.agent.info.addresses]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiograd", "worker", "--join", place, "--name", "helper"),
            *("--secret-file", str(secret), "--transport", "tcp"),
            *("--cert", str(theirs.cert), "--key", str(theirs.key), "--ca", str(theirs.ca)),
        )
        await boss.coordinator.wait_until_known(["helper"])
        assert await boss.agent.call("helper", math.sqrt, (49.0,)) == 7.0
        link = boss.agent.link("helper")
        assert link.connection.transport.get_extra_info("ssl_object") is not None
    assert await process.wait() == 0
