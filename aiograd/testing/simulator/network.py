"""A network of byte streams between simulated hosts, with every fault that TCP lets through.

Inside a connection bytes neither vanish nor change order. What can happen: they come in other
pieces, late, or no more; a connection is reset or half closed at any byte; a path is cut in one
direction or both, so that both ends keep a connection on which nothing arrives. As with a real
kernel, bytes that are not acknowledged for `USER_TIMEOUT` end the connection at the sender.

Which faults come when is `schedule`'s business; the network only knows how they feel.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aiograd.rpc.transport.network import Network
from aiograd.testing.simulator.transport import Factory, SimTransport, Stream

if TYPE_CHECKING:
    from aiograd.testing.simulator.world import Node

SYN_TIMEOUT: Final = 127.0  # seconds after which a kernel gives up connecting

Record = Callable[..., None]


@dataclass
class Manner:
    """How the wire behaves when nothing is wrong; drawn from the seed."""

    latency: float = 0.0005
    jitter: float = 0.0005
    window: int = 1 << 18  # bytes that may be in flight or unread
    crumbs: float = 0.3  # how often a piece is tiny

    def delay(self, rng: random.Random) -> float:
        return self.latency + rng.random() * self.jitter


class Wire:
    """All hosts, the paths between them, and what is wrong with each path."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: random.Random, manner: Manner, record: Record
    ) -> None:
        self.loop, self.random, self.manner, self.record = loop, rng, manner, record
        self.listeners: dict[str, tuple[Node, Factory]] = {}
        self.connections: list[tuple[SimTransport, SimTransport]] = []
        self.cuts: dict[tuple[str, str], int] = {}  # (from, to) → how many cuts are in effect
        self.clogs: dict[tuple[str, str], float] = {}  # (from, to) → extra seconds
        self.refusing: dict[str, int] = {}
        self.on_write: Callable[[Node], None] | None = None  # called before each write of a node
        # When an end noticed that its connection was broken off, and between whom that was.
        self.breaks: list[tuple[float, frozenset[str]]] = []
        self.healed = asyncio.Event()
        self._numbers = 0

    def open_path(self, sender: str, to: str) -> bool:
        return not self.cuts.get((sender, to))

    def change_cut(self, sender: str, to: str, by: int) -> None:
        self.cuts[sender, to] = self.cuts.get((sender, to), 0) + by
        if by < 0:
            for pair in list(self.connections):
                for end in pair:
                    end.outgoing.retransmit()
            healed, self.healed = self.healed, asyncio.Event()
            healed.set()

    def delay(self, sender: str, to: str) -> float:
        return self.manner.delay(self.random) + self.clogs.get((sender, to), 0.0)

    def between(self, a: str, b: str) -> list[tuple[SimTransport, SimTransport]]:
        return [
            pair for pair in self.connections if {pair[0].node.name, pair[1].node.name} == {a, b}
        ]

    def of(self, node: Node) -> list[SimTransport]:
        return [end for pair in self.connections for end in pair if end.node is node]

    # ── connecting ──────────────────────────────────────────────────────────────────────────────

    async def connect(self, node: Node, address: str, factory: Factory) -> asyncio.BufferedProtocol:
        found = self.listeners.get(address)
        host = found[0].name if found is not None else address.rpartition(":")[2].partition(".")[0]
        await self._reach(node.name, host)
        found = self.listeners.get(address)
        if found is None or self.refusing.get(host):
            self.record("refused", node.name, host)
            raise ConnectionRefusedError(f"nobody listens at {address}")
        server, accept = found
        self._numbers += 1
        ours = SimTransport(self, node, self._numbers, "client")
        theirs = SimTransport(self, server, self._numbers, "server")
        ours.outgoing, theirs.outgoing = Stream(self, ours, theirs), Stream(self, theirs, ours)
        self.connections.append((ours, theirs))
        self.record("connect", node.name, host, self._numbers)
        # The kernel over there accepts at once; its process when it comes to it.
        self.loop.call_soon(theirs.accept, accept, context=server.context)
        protocol = factory()
        ours.attach(protocol)
        return protocol

    async def _reach(self, name: str, host: str) -> None:
        """Wait for a round trip; OSError when there is none for too long."""
        await asyncio.sleep(self.delay(name, host) + self.delay(host, name))
        try:
            async with asyncio.timeout(SYN_TIMEOUT):
                while not (self.open_path(name, host) and self.open_path(host, name)):
                    await self.healed.wait()
                    await asyncio.sleep(self.random.uniform(0.0, 1.0))  # the next SYN
        except TimeoutError:
            raise TimeoutError(110, f"{host} does not answer") from None

    def note_break(self, here: str, there: str) -> None:
        self.breaks.append((self.loop.time(), frozenset({here, there})))

    def forget(self, end: SimTransport) -> None:
        for pair in self.connections:
            if end in pair and all(each.gone for each in pair):
                self.connections.remove(pair)
                return


class HostNetwork(Network):
    """The network as one host sees it: what a simulated worker's `Runtime` offers."""

    def __init__(self, wire: Wire, node: Node) -> None:
        super().__init__()
        self._wire, self._node = wire, node

    async def listen(
        self, address: str, factory: Factory, *, allow_plaintext: bool = False, tls: Any = None
    ) -> HostListener:
        if address in self._wire.listeners:
            raise OSError(98, f"{address} is in use")
        self._wire.listeners[address] = (self._node, factory)
        return HostListener(self._wire, address, self._node)

    async def connect(
        self, address: str, factory: Factory, *, tls: Any = None
    ) -> asyncio.BufferedProtocol:
        return await self._wire.connect(self._node, address, factory)


class HostListener:
    """An address of a simulated host."""

    def __init__(self, wire: Wire, address: str, node: Node) -> None:
        self._wire, self.address, self._node = wire, address, node

    def descriptors(self) -> list[int]:
        return []

    def close(self) -> None:
        found = self._wire.listeners.get(self.address)
        if found is not None and found[0] is self._node:
            del self._wire.listeners[self.address]
