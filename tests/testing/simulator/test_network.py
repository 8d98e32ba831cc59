"""The simulated wire: streams keep their order and their bytes, whatever happens to the pieces."""

from __future__ import annotations

import asyncio
import random

import pytest

from aiograd.testing.simulator.network import USER_TIMEOUT, HostNetwork, WireSettings
from aiograd.testing.simulator.world import Node, World


class Reader(asyncio.BufferedProtocol):
    """Collects the bytes that arrive."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.buffer = bytearray(1000)
        self.pieces = 0
        self.paused = False
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.data += self.buffer[:nbytes]
        self.pieces += 1

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


class Bench:
    """Two hosts and a connection between them."""

    def __init__(self, seed: int = 1, **settings) -> None:
        self.world = World(seed, wire=WireSettings(**settings))
        self.wire = self.world.wire
        self.a, self.b = (Node(self.world, name, rank, 0) for rank, name in enumerate("ab"))
        self.world.nodes = {"a": self.a, "b": self.b}
        self.accepted: list[Reader] = []

    def accept(self) -> Reader:
        self.accepted.append(Reader())
        return self.accepted[-1]

    async def connect(self) -> tuple[Reader, Reader]:
        if not self.wire.listeners:
            await HostNetwork(self.wire, self.b).listen("memory:b.0", self.accept)
        client = await HostNetwork(self.wire, self.a).connect("memory:b.0", Reader)
        await asyncio.sleep(0.001)
        return client, self.accepted[-1]

    def run(self, work) -> None:
        loop = self.world.loop
        try:
            loop.run_until_complete(loop.create_task(work, context=self.world.context))
            assert not loop.troubles
        finally:
            self.world.dispose()
            loop.close()


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_in_order_whatever_their_pieces(seed):
    bench = Bench(seed, latency=0.001, jitter=0.05, window=3000, tiny=0.5)
    sent = random.Random(seed).randbytes(20_000)

    async def work() -> None:
        client, server = await bench.connect()
        for start in range(0, len(sent), 777):
            client.transport.write(sent[start : start + 777])
            await asyncio.sleep(0.001)
        await asyncio.sleep(30)
        assert bytes(server.data) == sent
        assert server.pieces != len(range(0, len(sent), 777))

    bench.run(work())


def test_a_slow_reader_makes_the_writer_pause():
    bench = Bench(window=1000)

    async def work() -> None:
        client, server = await bench.connect()
        client.transport.set_write_buffer_limits(high=5000)
        server.transport.pause_reading()
        client.transport.write(bytes(10_000))
        await asyncio.sleep(1)
        assert client.paused
        assert client.transport.get_write_buffer_size() == 9000
        assert not server.data
        server.transport.resume_reading()
        await asyncio.sleep(1)
        assert not client.paused
        assert len(server.data) == 10_000

    bench.run(work())


def test_closing_delivers_what_was_written_and_then_the_end():
    bench = Bench(window=100)

    async def work() -> None:
        client, server = await bench.connect()
        client.transport.write(bytes(1000))
        client.transport.close()
        assert await server.lost is None
        assert len(server.data) == 1000
        assert await client.lost is None

    bench.run(work())


def test_aborting_resets_the_other_end():
    bench = Bench()

    async def work() -> None:
        client, server = await bench.connect()
        client.transport.abort()
        assert isinstance(await server.lost, ConnectionResetError)

    bench.run(work())


def test_a_short_cut_only_delays():
    bench = Bench()

    async def work() -> None:
        client, server = await bench.connect()
        bench.wire.change_cut("a", "b", 1)
        client.transport.write(b"late")
        await asyncio.sleep(3)
        assert not server.data
        bench.wire.change_cut("a", "b", -1)
        await asyncio.sleep(1)
        assert server.data == b"late"
        await asyncio.sleep(60)
        assert not client.lost.done()

    bench.run(work())


@pytest.mark.parametrize("path", [("a", "b"), ("b", "a")])
def test_a_long_cut_in_either_direction_ends_the_connection_at_the_writer(path):
    bench = Bench()

    async def work() -> None:
        client, server = await bench.connect()
        bench.wire.change_cut(*path, 1)
        begin = asyncio.get_running_loop().time()
        client.transport.write(b"unacknowledged")
        assert isinstance(await client.lost, TimeoutError)
        assert asyncio.get_running_loop().time() - begin == pytest.approx(USER_TIMEOUT, abs=0.6)
        assert not server.lost.done()  # half open

    bench.run(work())


def test_a_crashed_process_sends_its_last_bytes_or_some_of_them():
    bench = Bench()

    async def work() -> None:
        client, server = await bench.connect()
        client.transport.write(b"last words")
        client.transport.crash(silent=False, keep=0)
        await server.lost
        assert b"last words".startswith(bytes(server.data))

    bench.run(work())


def test_connecting_to_an_address_without_a_listener_is_refused():
    bench = Bench()

    async def work() -> None:
        with pytest.raises(ConnectionRefusedError):
            await HostNetwork(bench.wire, bench.a).connect("memory:b.7", Reader)

    bench.run(work())


def test_connecting_over_a_cut_waits_for_the_path():
    bench = Bench()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        bench.wire.change_cut("b", "a", 1)
        loop.call_later(9, bench.wire.change_cut, "b", "a", -1)
        await bench.connect()
        assert 9 < loop.time() < 11

    bench.run(work())
