"""Somebody on the path of a plain TCP connection: nothing that it writes is believed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from aiograd.errors import WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.transport.sealed_stream import SealedStream
from aiograd.wire.handshake import HELLO_SIZE, PROOF_SIZE
from aiograd.wire.messages import CALL, DEFINE
from aiograd.wire.records import Protection, best_protection
from tests.security.rogue import frame
from tests.support.agents import SECRET
from tests.support.waiting import until


class Relay:
    """Passes bytes on between two workers; `change` sees those that follow the handshake."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.change: Callable[[str, bytes], bytes] = lambda way, data: data
        self.writers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, out = await asyncio.open_connection("127.0.0.1", self._target)
        self.writers = {"up": out, "down": writer}
        await asyncio.gather(self._pass(reader, out, "up"), self._pass(there, writer, "down"))

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: str
    ) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for size in (HELLO_SIZE, PROOF_SIZE):
                sink.write(await source.readexactly(size))
            while data := await source.read(1 << 16):
                sink.write(self.change(way, data))
        sink.close()

    async def close(self) -> None:
        self._server.close()
        for writer in self.writers.values():
            writer.transport.abort()
        await asyncio.wait(self._tasks)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Agent, Agent, Relay]]:
    """Two agents in trusted mode, connected over a relay."""
    options = Options(resume=0.5, lease=0.1)
    a, b = (Agent(name, i, secret=SECRET, options=options) for i, name in enumerate("ab"))
    await b.start("tcp:127.0.0.1:0")
    relay = Relay(int(b.info.addresses[0].rpartition(":")[2]))
    port = await relay.open()
    await a.start()
    a.directory.add(await a.connect(f"tcp:127.0.0.1:{port}"))
    b.directory.add(a.info)
    assert await a.call("b", abs, (-1,)) == 1
    yield a, b, relay
    await relay.close()
    for agent in (a, b):
        await agent.close()


def poison(marker: Path) -> bytes:
    """Frames that make this folder in a worker that believes them."""
    # Not a list in this module: it would be pickled by value, and the copy filled.
    code = cloudpickle.dumps(partial(os.mkdir, str(marker)))
    call = frame(CALL, cloudpickle.dumps(((), {})), id=1 << 40, to=999)
    # Again and again: longer than the record that the first bytes would announce.
    return (frame(DEFINE, code, to=999) + call) * 8


@pytest.mark.parametrize("way", ["up", "down"])
async def test_code_that_a_relay_injects_runs_nowhere(pair, way, caplog, tmp_path):
    """Another local user was first to bind the rendezvous port, and passed the handshake on."""
    a, b, relay = pair
    caplog.set_level(logging.ERROR, "aiograd.link")
    victim = b if way == "up" else a
    marker = tmp_path / "ran"
    relay.writers[way].write(poison(marker))
    await until(lambda: victim.limits["protocol"] == 1 or marker.exists())
    assert not marker.exists()
    assert "authenticated frames" in caplog.text
    name = "a" if way == "up" else "b"
    assert f"closing the connection to {name}" in caplog.text


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def headless(data: bytes) -> bytes:
    return data[1:]


def doubled(data: bytes) -> bytes:
    return data + data


@pytest.mark.parametrize("change", [flipped, headless, doubled])
@pytest.mark.parametrize("way", ["up", "down"])
async def test_what_a_relay_changes_ends_the_link_with_a_typed_error(pair, way, change):
    a, b, relay = pair
    relay.change = lambda way_, data: change(data) if way_ == way else data
    call = a.call("b", abs, (-2,), timeout=10)
    with contextlib.suppress(WorkerLost):  # of a repeated record the first one is good
        assert await call == 2
    await until(lambda: a.limits["protocol"] + b.limits["protocol"] >= 1)


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_relay_changes_no_bit_of_an_argument_or_a_result(pair, way):
    a, b, relay = pair

    def altered(way_: str, data: bytes) -> bytes:
        middle = len(data) // 2
        if way_ != way or len(data) < 1000:
            return data
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    relay.change = altered
    with pytest.raises(WorkerLost):
        await a.call("b", str.swapcase, ("a" * 2000,), timeout=10)
    assert a.limits["protocol"] + b.limits["protocol"] == 1


async def test_records_that_change_places_end_the_link(pair):
    a, b, relay = pair
    kept: list[bytes] = []

    def later(way: str, data: bytes) -> bytes:
        if way == "down":
            return data
        kept.append(data)
        return b"".join(reversed(kept[-2:])) if len(kept) == 2 else b""

    relay.change = later
    calls = [a.call("b", abs, (-3,), timeout=10)]
    await until(lambda: len(kept) == 1)
    calls.append(a.call("b", abs, (-3,), timeout=10))
    for call in calls:
        with pytest.raises(WorkerLost):
            await call
    assert b.limits["protocol"] == 1


async def test_a_connection_that_is_cut_is_resumed_with_other_keys(pair):
    a, b, relay = pair
    seen: list[bytes] = []
    relay.change = lambda way, data: seen.append(data) or data  # type: ignore[func-returns-value]
    assert await a.call("b", abs, (-4,)) == 4
    sessions = a.links.get(b.incarnation).session
    number = sessions.number
    for writer in list(relay.writers.values()):
        writer.transport.abort()
    assert await a.call("b", abs, (-5,), timeout=10) == 5
    assert sessions.number > number
    # What was recorded of the last connection is nothing to this one.
    relay.writers["up"].write(seen[0])
    await until(lambda: b.limits["protocol"] == 1)


async def test_large_arrays_cross_authenticated(pair):
    a, _, _ = pair
    data = bytes(range(256)) * 20_000
    assert await a.call("b", len, (data,), timeout=20) == len(data)
    assert await a.call("b", bytes.upper, (data,), timeout=20) == data.upper()


@pytest.mark.parametrize("best", [*itertools.product(Protection, Protection)], ids=str)
async def test_workers_with_and_without_the_extra_meet(best, monkeypatch):
    """They take the best way of protection that both have."""
    if max(best) > best_protection():
        pytest.skip("not on this machine")
    monkeypatch.setattr("aiograd.rpc.link.handshaking.best_protection", iter(best).__next__)
    chosen: list[Protection] = []
    made = SealedStream.__init__

    def noted(self: SealedStream, *args: Any) -> None:
        chosen.append(args[-1])
        made(self, *args)

    monkeypatch.setattr(SealedStream, "__init__", noted)
    a, b = (Agent(name, i, secret=SECRET) for i, name in enumerate("ab"))
    try:
        await b.start("tcp:127.0.0.1:0")
        a.directory.add(await a.connect(b.info.addresses[0]))
        assert await a.call("b", abs, (-1,)) == 1
        data = bytes(range(256)) * 2000
        assert await a.call("b", bytes.upper, (data,), timeout=20) == data.upper()
        assert chosen == [min(best)] * 2
    finally:
        for agent in (a, b):
            await agent.close()


async def test_a_folder_that_others_can_enter_needs_authenticated_frames(tmp_path):
    tmp_path.chmod(0o755)
    runtime = Runtime()
    a, b = (Agent(n, i, secret=SECRET, runtime=runtime) for i, n in enumerate("ab"))
    try:
        await b.start(f"unix:{tmp_path}/b")
        await a.start()
        a.directory.add(await a.connect(f"unix:{tmp_path}/b"))
        assert await a.call("b", abs, (-1,)) == 1
        transport = a.links.get(b.incarnation).connection.transport
        assert type(transport).__name__ == "SealedStream"
    finally:
        for agent in (a, b):
            await agent.close()
