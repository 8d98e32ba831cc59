"""Large messages between processes of one host pass through memory, not through the socket."""

from __future__ import annotations

import asyncio
import os
import struct
import threading

import numpy as np
import pytest

from aiograd.errors import ProtocolError
from aiograd.rpc.api import inline, rpc_async
from aiograd.rpc.link.shared_memory import (
    CHUNKS_IN_FLIGHT,
    IDLE_HEARTBEATS,
    PARALLEL_FROM,
    SHARED_FROM,
    ParallelCopier,
    SharedMemory,
)
from aiograd.rpc.options import Options
from aiograd.wire.framing import FrameReader, announce, pack_header
from aiograd.wire.messages import CALL, CHUNK, LARGE, SHARED, SHM_ACCEPT

kept: list[np.ndarray] = []
SIZE = 1 << 20


@inline
def double(x):
    x *= 2  # what arrives is writable
    return x


@inline
def totals(*values):
    return [(each.size, int(each.sum(dtype=int))) for each in values]


@inline
def keep(x):
    kept.append(x)


@inline
def let_go():
    kept.clear()


@inline
def nothing():
    pass


def pattern(size=SIZE):
    return np.arange(size, dtype=np.uint8) % 100


@pytest.fixture
def pair(agents, tmp_path):
    """Two agents over a Unix socket whose memory is lent already."""

    def make(**options):
        return agents(2, address=f"unix:{tmp_path}/{{}}".format, options=Options(**options))

    return make


async def warmed(agent):
    """The first large message over an open link asks, later ones use the memory."""
    await rpc_async("worker1", nothing)
    await rpc_async("worker1", double, (pattern(),))
    await rpc_async("worker1", nothing)
    return agent.link("worker1").shared


def chunks(link):
    return link.outbox._numbers  # large messages that took the socket


async def test_only_the_first_large_message_takes_the_socket(pair):
    async with pair() as (a, b):
        await warmed(a)
        before = chunks(a.link("worker1")), chunks(b.link("worker0"))
        for _ in range(5):
            assert (await rpc_async("worker1", double, (pattern(),)) == pattern() * 2).all()
        assert (chunks(a.link("worker1")), chunks(b.link("worker0"))) == before


async def test_the_sender_may_change_its_array_at_once(pair):
    async with pair() as (a, _):
        await warmed(a)
        mine = pattern()
        call = rpc_async("worker1", double, (mine,))
        mine[:] = 0
        assert (await call == pattern() * 2).all()


async def test_blocks_come_back_when_nobody_looks_at_them(pair):
    async with pair() as (a, b):
        shared = await warmed(a)
        for _ in range(20):
            await rpc_async("worker1", double, (pattern(),))
        await rpc_async("worker1", nothing)  # whose answer brings the last block back
        assert not shared.own.used
        await rpc_async("worker1", nothing)
        assert not b.link("worker0").shared.own.used


async def test_an_array_that_is_kept_keeps_its_values(pair):
    async with pair() as (a, _):
        await warmed(a)
        try:
            await rpc_async("worker1", keep, (pattern(),))
            for _ in range(5):
                await rpc_async("worker1", double, (np.zeros(SIZE, np.uint8),))
            assert (kept[0] == pattern()).all()
        finally:
            kept.clear()


async def test_when_all_blocks_are_kept_messages_take_the_socket(pair):
    async with pair(outbound_buffer=8 << 20) as (a, _):
        await warmed(a)
        link = a.link("worker1")
        before = chunks(link)
        try:
            for _ in range(10):
                await rpc_async("worker1", keep, (pattern(),))
            assert chunks(link) > before
            assert all((each == pattern()).all() for each in kept)
        finally:
            kept.clear()
        await rpc_async("worker1", nothing)
        before = chunks(link)
        await rpc_async("worker1", double, (pattern(),))
        assert chunks(link) == before


async def test_a_peer_that_cannot_open_the_memory_gets_everything_by_the_socket(pair):
    async with pair() as (a, b):
        await rpc_async("worker1", nothing)
        b.link("worker0").shared._pid = 1 << 30  # no such process
        for _ in range(3):
            assert (await rpc_async("worker1", double, (pattern(),)) == pattern() * 2).all()
        assert a.link("worker1").shared.own is None


async def test_memory_nobody_uses_is_given_up_and_made_anew(pair):
    async with pair() as (a, b):
        shared = await warmed(a)
        await rpc_async("worker1", nothing)
        for _ in range(IDLE_HEARTBEATS + 1):
            shared.heartbeat()
        assert shared.own is None
        await rpc_async("worker1", nothing)
        assert b.link("worker0").shared.peer is None
        assert (await rpc_async("worker1", double, (pattern(),)) == pattern() * 2).all()
        await rpc_async("worker1", nothing)
        assert shared.own is not None


async def test_arrays_outlive_the_link_they_came_by(pair):
    async with pair() as (a, _):
        await warmed(a)
        result = await rpc_async("worker1", double, (pattern(),))
    assert (result == pattern() * 2).all()
    result += 1


async def test_memory_is_shared_over_unix_sockets_only(agents):
    async with agents(2, address=lambda i: "tcp:127.0.0.1:0") as (a, _):
        await rpc_async("worker1", nothing)
        assert a.link("worker1").shared is None


async def test_many_calls_at_once_get_blocks_of_their_own(pair):
    async with pair() as (a, _):
        await warmed(a)
        calls = [rpc_async("worker1", double, (np.full(SIZE, i, np.uint8),)) for i in range(60)]
        for i, result in enumerate(await asyncio.gather(*calls)):
            assert (result == 2 * i).all()


# ── messages too large for a block ──────────────────────────────────────────────────────────────

HUGE = 40 << 20


def crossed(*links):
    """Bytes that went through sockets so far."""
    return sum(link.session.sent for link in links)


async def test_a_message_too_large_for_a_block_goes_through_several(pair):
    async with pair() as (a, b):
        await warmed(a)
        await rpc_async("worker1", double, (pattern(),))
        links = a.link("worker1"), b.link("worker0")
        before = crossed(*links)
        for _ in range(3):
            result = await rpc_async("worker1", double, (pattern(HUGE),))
            assert (result == pattern(HUGE) * 2).all()
        assert crossed(*links) - before < HUGE // 100
        await rpc_async("worker1", nothing)
        for link in links:
            assert link.shared.own.chunks == set()


async def test_several_arrays_of_a_huge_message_are_told_apart(pair):
    async with pair() as (a, _):
        await warmed(a)
        await rpc_async("worker1", double, (pattern(),))
        sizes = (HUGE, 33, 0, SHARED_FROM, SHARED_FROM - 1, (9 << 20) + 7)
        arrays = [np.full(size, i, np.uint8) for i, size in enumerate(sizes)]
        assert await rpc_async("worker1", totals, tuple(arrays)) == [
            (each.size, int(each.sum(dtype=int))) for each in arrays
        ]


async def test_few_chunks_are_under_way_at_once_and_small_calls_go_on(pair):
    async with pair() as (a, _):
        shared = await warmed(a)
        await rpc_async("worker1", double, (pattern(),))
        huge, most = rpc_async("worker1", double, (pattern(HUGE),)), 0
        while not huge.done():
            await rpc_async("worker1", nothing)
            most = max(most, len(shared.own.chunks))
        assert 0 < most <= CHUNKS_IN_FLIGHT
        assert (await huge == pattern(HUGE) * 2).all()


async def test_huge_messages_at_once_do_not_mix(pair):
    async with pair() as (a, _):
        await warmed(a)
        calls = [rpc_async("worker1", double, (np.full(HUGE, i, np.uint8),)) for i in range(4)]
        for i, result in enumerate(await asyncio.gather(*calls)):
            assert (result == 2 * i).all()


async def test_without_a_free_block_chunks_take_the_socket(pair):
    async with pair() as (a, _):
        arena = (await warmed(a)).own.arena
        for _, size in list(arena.free_blocks):
            assert arena.take(size) is not None
        link = a.link("worker1")
        before = crossed(link)
        assert (await rpc_async("worker1", double, (pattern(HUGE),)) == pattern(HUGE) * 2).all()
        assert crossed(link) - before > HUGE


async def test_a_huge_message_goes_on_after_a_cut(pair):
    async with pair() as (a, _):
        shared = await warmed(a)
        await rpc_async("worker1", double, (pattern(),))
        link = a.link("worker1")
        huge = rpc_async("worker1", double, (pattern(HUGE),))
        while not shared.own.chunks:
            await asyncio.sleep(0)
        link.connection.transport.abort()
        assert (await huge == pattern(HUGE) * 2).all()
        assert shared.own.chunks == set()


# ── peers that break the rules ──────────────────────────────────────────────────────────────────


def lonely():
    sent = []
    return SharedMemory(os.getpid(), 4 << 20, lambda *m: sent.append(m), np.copyto), sent


def test_a_message_in_memory_that_was_never_offered_is_refused():
    with pytest.raises(ProtocolError, match="never offered"):
        lonely()[0].read(3, memoryview(struct.pack("<QQ", 0, 100)))


def test_a_message_beyond_the_end_is_refused():
    (ours, sent), (theirs, _) = lonely(), lonely()
    ours.write([memoryview(bytes(SHARED_FROM))])
    theirs.offered(sent[0][2])
    with pytest.raises(ProtocolError, match="beyond the end"):
        theirs.read(3, memoryview(struct.pack("<QQ", 4 << 20, 1)))
    with pytest.raises(ProtocolError, match="in 9 bytes"):
        theirs.read(3, memoryview(bytes(9)))


def refuses(offer):
    shared, sent = lonely()
    shared.offered(offer)
    return sent == [(SHM_ACCEPT, 0, b"")]


def offered():
    """An offer that is all right, and who keeps it so."""
    ours, sent = lonely()
    ours.write([memoryview(bytes(SHARED_FROM))])
    return ours, sent[0][2]


def test_memory_that_could_shrink_is_refused():
    file = os.memfd_create("test")
    try:
        os.ftruncate(file, 4096)
        assert refuses(struct.pack("<QQ16s", file, 4096, bytes(16)))
    finally:
        os.close(file)


def test_memory_smaller_than_it_says_is_refused():
    ours, offer = offered()
    number, size, mark = struct.unpack("<QQ16s", offer)
    assert not refuses(offer)
    assert refuses(struct.pack("<QQ16s", number, size + 1, mark))
    ours.close()


def test_memory_of_somebody_else_is_refused():
    ours, offer = offered()
    number, size, _ = struct.unpack("<QQ16s", offer)
    assert refuses(struct.pack("<QQ16s", number, size, bytes(16)))
    ours.close()


def test_a_descriptor_that_is_no_memory_is_refused(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        assert refuses(struct.pack("<QQ16s", file.fileno(), 4096, bytes(16)))


def test_a_chunk_in_memory_must_belong_to_a_message():
    (ours, sent), (theirs, _) = lonely(), lonely()
    ours.write([memoryview(bytes(SHARED_FROM))])
    theirs.offered(sent[0][2])
    for body, number in (
        (struct.pack("<QQ", 0, 100), 7),  # nobody has announced it
        (struct.pack("<QQ", 0, 101), 1),  # more than is missing
        (struct.pack("<QQ", 0, 0), 1),
        (struct.pack("<QQQ", 0, 10, 10), 1),
        (struct.pack("<QQ", 1 << 40, 10), 1),
        (b"", 1),
    ):
        reader = FrameReader(shared=theirs.read)
        announced = announce(1, 3, [100])
        reader.feed(pack_header(CALL, LARGE, len(announced), 1, 1.0, 0) + announced)
        with pytest.raises(ProtocolError):
            reader.feed(pack_header(CHUNK, SHARED, len(body), 0, 0.0, number) + body)
    reader = FrameReader(shared=theirs.read)
    reader.feed(pack_header(CALL, LARGE, len(announced), 1, 1.0, 0) + announced)
    body = struct.pack("<QQ", 0, 100)
    (frame,) = reader.feed(pack_header(CHUNK, SHARED, len(body), 0, 0.0, 1) + body)
    assert frame.body.complete
    with pytest.raises(ProtocolError):
        FrameReader().feed(pack_header(CHUNK, SHARED, len(body), 0, 0.0, 1) + body)


# ── parallel copies ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    "size", [0, 1, PARALLEL_FROM - 1, PARALLEL_FROM, 3 * PARALLEL_FROM + 12_345]
)
def test_every_byte_is_copied(cores, size):
    source = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    memory = np.zeros(size + 2, np.uint8)
    copier = ParallelCopier(cores)
    copier.copy(memory[1:-1], source)
    copier.close()
    assert (memory[1:-1] == source).all()
    assert memory[0] == memory[-1] == 0


def test_a_thread_helps_with_large_ones_only_and_ends():
    copier, before = ParallelCopier(2), threading.active_count()
    copier.copy(np.zeros(100, np.uint8), np.ones(100, np.uint8))
    assert threading.active_count() == before
    copier.copy(np.zeros(PARALLEL_FROM, np.uint8), np.ones(PARALLEL_FROM, np.uint8))
    assert threading.active_count() == before + 1
    copier.close()
    assert threading.active_count() == before
    copier.close()


def test_a_copy_that_cannot_be_made_is_an_error():
    copier = ParallelCopier(2)
    memory = np.zeros(PARALLEL_FROM, np.uint8)
    memory.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copier.copy(memory, np.ones(PARALLEL_FROM, np.uint8))
    copier.close()
