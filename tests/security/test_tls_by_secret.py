"""TLS by the secret alone: the default beyond this host, and nobody in between."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiograd.errors import AuthError, InsecureTransport, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.transport.ephemeral import load_ephemeral_certificate
from aiograd.rpc.transport.network import Network
from tests.support.agents import SECRET
from tests.support.waiting import until

EVERYWHERE = "tcp:0.0.0.0:0"  # beyond this host; from here, 0.0.0.0 leads to this host


@contextlib.asynccontextmanager
async def pair(
    address: str = EVERYWHERE, secrets: tuple[bytes, bytes] = (SECRET, SECRET), **settings: Any
) -> AsyncIterator[tuple[Agent, Agent]]:
    options = Options(resume=0.5, handshake_timeout=2.0, **settings)
    a, b = (Agent(n, i, secret=secrets[i], options=options) for i, n in enumerate("ab"))
    try:
        await b.start(address)
        await a.start()
        yield a, b
    finally:
        for agent in (a, b):
            await agent.close()


def transport_of(agent: Agent, peer: Agent) -> Any:
    link = agent.links.get(peer.incarnation)
    assert link is not None
    assert link.connection is not None
    return link.connection.transport


async def meet(a: Agent, b: Agent, address: str | None = None) -> None:
    a.directory.add(await a.connect(address or b.info.addresses[0]))


@pytest.mark.parametrize(
    ("address", "settings"), [(EVERYWHERE, {}), ("tcp:127.0.0.1:0", {"tls": "secret"})]
)
async def test_connections_are_tls_beyond_this_host_and_wherever_it_is_asked_for(address, settings):
    async with pair(address, **settings) as (a, b):
        await meet(a, b)
        assert await a.call("b", abs, (-3,)) == 3
        data = bytes(range(256)) * 20_000
        assert await a.call("b", bytes.upper, (data,), timeout=20) == data.upper()
        for one, other in ((a, b), (b, a)):
            found = transport_of(one, other).get_extra_info("ssl_object")
            assert found.version() == "TLSv1.3"


async def test_allow_plaintext_keeps_authenticated_frames():
    async with pair(allow_plaintext=True) as (a, b):
        await meet(a, b)
        assert await a.call("b", abs, (-3,)) == 3
        assert type(transport_of(a, b)).__name__ == "SealedStream"


class Spy:
    """Passes bytes on and remembers them; `ends` are TLS contexts of a man in the middle."""

    def __init__(self, port: int, ends: tuple[ssl.SSLContext, ssl.SSLContext] | None) -> None:
        self._port, self._ends = port, ends
        self.seen = b""
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        server = self._ends[0] if self._ends else None
        self._server = await asyncio.start_server(self._accept, "0.0.0.0", 0, ssl=server)
        return f"tcp:0.0.0.0:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client = self._ends[1] if self._ends else None
        there, out = await asyncio.open_connection("127.0.0.1", self._port, ssl=client)
        await asyncio.gather(self._pass(reader, out), self._pass(there, writer))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                self.seen += data
                sink.write(data)
        sink.close()

    async def close(self) -> None:
        self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks)


async def test_who_is_on_the_path_reads_nothing():
    async with pair() as (a, b):
        spy = Spy(int(b.info.addresses[0].rpartition(":")[2]), None)
        await meet(a, b, await spy.open())
        marker = b"nobody may read this" * 3
        assert await a.call("b", bytes.upper, (marker,)) == marker.upper()
        assert len(spy.seen) > 1000
        for text in (marker, b"aiograd", a.incarnation, b.incarnation):
            assert text not in spy.seen
        await a.close()
        await b.close()
        await spy.close()


async def test_a_man_in_the_middle_is_refused_on_both_sides(caplog):
    """It ends TLS on one side with a certificate of its own, and begins it on the other."""
    caplog.set_level(logging.INFO, "aiograd.security")
    server, client = (
        ssl.SSLContext(side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    load_ephemeral_certificate(server)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    async with pair() as (a, b):
        spy = Spy(int(b.info.addresses[0].rpartition(":")[2]), (server, client))
        with pytest.raises(AuthError):
            await meet(a, b, await spy.open())
        await until(lambda: b.limits["handshake"] >= 1)
        assert spy.seen.startswith(b"aiograd\0")  # it did read what the two said to each other
        assert not a.links.table
        assert not b.links.table
        for text in (b"\1a\0", a.incarnation, b.incarnation):
            assert text not in spy.seen
        await a.close()
        await b.close()
        await spy.close()


async def test_another_secret_is_refused_inside_tls():
    async with pair(secrets=(SECRET, b"x" * 32)) as (a, b):
        with pytest.raises(AuthError, match="secret"):
            await meet(a, b)
        assert b.limits["handshake"] == 1


async def test_one_that_allows_plaintext_and_one_that_does_not_do_not_meet():
    async with pair() as (_, b):
        plain = Agent("c", 2, secret=SECRET, options=Options(allow_plaintext=True))
        try:
            with pytest.raises((AuthError, WorkerLost, OSError)):
                await plain.connect(b.info.addresses[0])
        finally:
            await plain.close()


async def test_the_network_itself_never_listens_for_other_hosts_in_plain():
    with pytest.raises(InsecureTransport):
        await Network().listen(EVERYWHERE, asyncio.BufferedProtocol)


def test_wrong_settings_say_what_is_right():
    with pytest.raises(ValueError, match="secret"):
        Options(tls="certificates")
    with pytest.raises(ValueError, match="which of the two"):
        Options(tls="secret", allow_plaintext=True)
    with pytest.raises(TypeError, match="TLS"):
        Options(tls=3)  # type: ignore[arg-type]
