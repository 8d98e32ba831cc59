"""TLS over a connection, without sockets: two streams whose records the test carries itself."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import trustme

from aiograd.rpc.transport.tls_stream import TLSStream

LARGE = bytes(range(256)) * 4096  # 1 MiB


class Below:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.records = b""
        self.closed = self.aborted = False
        self.paused = False

    def write(self, data):
        self.records += data

    def take(self):
        records, self.records = self.records, b""
        return records

    def is_closing(self):
        return self.closed or self.aborted

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True

    def get_extra_info(self, name, default=None):
        return name


class Above(asyncio.BufferedProtocol):
    """A protocol that keeps what arrives, taken in windows of one size."""

    def __init__(self, window=1000) -> None:
        self.got = b""
        self.window = bytearray(window)
        self.transport = None
        self.lost = None
        self.most = None  # bytes after which it wants no more

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return memoryview(self.window)

    def buffer_updated(self, nbytes):
        self.got += self.window[:nbytes]
        if self.most is not None and len(self.got) >= self.most:
            self.transport.pause_reading()

    def connection_lost(self, exc):
        self.lost = (exc,)

    def pause_writing(self):
        self.got += b"<pause>"

    def resume_writing(self):
        self.got += b"<resume>"


class Side:
    def __init__(self, context, server, window=1000) -> None:
        self.above, self.below = Above(window), Below()
        self.stream = TLSStream(context, self.above, server=server)

    def feed(self, records, piece=1 << 20):
        while records:
            buffer = self.stream.get_buffer(-1)
            count = min(len(buffer), len(records), piece)
            buffer[:count] = records[:count]
            records = records[count:]
            self.stream.buffer_updated(count)


@pytest.fixture(scope="module")
def contexts():
    authority = trustme.CA()
    client, server = (
        ssl.SSLContext(each) for each in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
    )
    authority.issue_cert("worker0").configure_cert(server)
    authority.configure_trust(client)
    client.check_hostname = False
    return client, server


def shake_hands(client, server, piece=1 << 20):
    client.stream.connection_made(client.below)
    server.stream.connection_made(server.below)
    while client.below.records or server.below.records:
        server.feed(client.below.take(), piece)
        client.feed(server.below.take(), piece)


async def joined(contexts, window=1000, piece=1 << 20):
    client, server = Side(contexts[0], False, window), Side(contexts[1], True, window)
    shake_hands(client, server, piece)
    await client.stream.ready
    await server.stream.ready
    return client, server


@pytest.mark.parametrize("piece", [1, 77, 1 << 20])
@pytest.mark.parametrize("window", [1, 1000, 100_000])
async def test_bytes_arrive_however_records_are_cut(contexts, piece, window):
    client, server = await joined(contexts, window, piece)
    large = LARGE if piece == 1 << 20 and window > 1 else LARGE[:20_000]
    sent = [b"small", large, b"", memoryview(b"view")]
    for data in sent:
        client.stream.write(data)
    records = client.below.take()
    assert b"small" not in records
    server.feed(records, piece)
    assert server.above.got == b"".join(sent)
    server.stream.write(b"back")
    client.feed(server.below.take())
    assert client.above.got == b"back"


async def test_who_wants_no_more_gets_no_more(contexts):
    client, server = await joined(contexts, window=100)
    server.above.most = 250
    client.stream.write(LARGE[:1000])
    server.feed(client.below.take())
    assert len(server.above.got) == 300
    assert server.below.paused
    assert not server.stream.is_reading()
    server.above.most = None
    server.stream.resume_reading()
    while len(server.above.got) < 1000:
        await asyncio.sleep(0)
    assert server.above.got == LARGE[:1000]
    assert not server.below.paused


async def test_a_record_that_was_changed_ends_the_connection(contexts):
    client, server = await joined(contexts)
    client.stream.write(b"first")
    server.feed(client.below.take())
    client.stream.write(b"second")
    records = bytearray(client.below.take())
    records[-1] ^= 1
    server.feed(bytes(records))
    assert server.above.got == b"first"
    assert server.below.aborted
    assert isinstance(server.above.lost[0], ssl.SSLError)
    server.stream.connection_lost(None)  # what is below notices too, and it is told once
    assert isinstance(server.above.lost[0], ssl.SSLError)
    server.stream.write(b"too late")
    assert server.below.records == b""


async def test_records_come_in_order_and_once(contexts):
    for order in ((1, 0), (0, 0)):
        client, server = await joined(contexts)
        records = []
        for data in (b"one", b"two"):
            client.stream.write(data)
            records.append(client.below.take())
        for number in order:
            server.feed(records[number])
        assert server.above.got == (b"one" if order[0] == 0 else b"")
        assert server.below.aborted


async def test_a_close_is_told_after_everything_written(contexts):
    client, server = await joined(contexts)
    client.stream.write(b"last words")
    client.stream.close()
    assert client.below.closed
    server.feed(client.below.take())
    assert server.above.got == b"last words"
    assert server.below.closed
    client.stream.write(b"too late")
    assert client.below.records == b""


async def test_pauses_are_passed_on(contexts):
    client, _ = await joined(contexts)
    client.stream.pause_writing()
    client.stream.resume_writing()
    assert client.above.got == b"<pause><resume>"
    assert client.stream.get_extra_info("peername") == "peername"
    assert client.stream.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_what_is_no_tls_is_refused(contexts):
    server = Side(contexts[1], True)
    server.stream.connection_made(server.below)
    server.feed(b"GET / HTTP/1.1\r\n\r\n" * 4)
    with pytest.raises(ssl.SSLError):
        await server.stream.ready
    assert server.below.closed
    assert server.above.transport is None
    server.feed(b"more")
    server.stream.connection_lost(None)
    assert server.above.lost is None


async def test_an_end_before_the_agreement_is_an_error(contexts):
    client = Side(contexts[0], False)
    client.stream.connection_made(client.below)
    client.stream.connection_lost(None)
    with pytest.raises(ConnectionResetError):
        await client.stream.ready


async def test_who_gives_up_leaves_nothing_behind(contexts):
    for made in (False, True):
        client = Side(contexts[0], False)
        if made:
            client.stream.connection_made(client.below)
        client.stream.discard()
        assert client.below.aborted == made
        assert client.stream.ready.cancelled()
