"""What the two halves of a link, caller and callee, know of the world around them.

Channel   the link: messages to one peer. How it is connected, resumed or lost is `link`'s
Host      the worker: its loop, limits and codecs, and what other layers plugged in
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from aiograd.rpc.callee.functions import Shipment
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.envelope import Packer, Route
from aiograd.rpc.extension import FaultInjector
from aiograd.rpc.future import Future
from aiograd.rpc.link.inbound_budget import Budget
from aiograd.rpc.link.ledger import Account
from aiograd.rpc.link.send import Outbox
from aiograd.rpc.observe.metrics import Limits
from aiograd.rpc.options import Options
from aiograd.rpc.runtime.deadlines import Deadlines
from aiograd.wire.codec import Payload
from aiograd.wire.framing import Frame


class Channel(Route, Protocol):
    """Messages to one peer."""

    outbox: Outbox
    error: Exception | None  # why it is lost or closed
    ready: bool  # open: small messages may go straight to the outbox
    restricted: bool  # only plain data may cross it
    budget: Budget  # the memory for what comes over it
    account: Account | None  # the share of a partner
    host: str  # from where the peer speaks

    @property
    def peer(self) -> PeerInfo:
        """The worker at the other end."""

    @property
    def numbers(self) -> Mapping[Shipment, int]:
        """The functions that the peer knows by number."""

    def may_log(self) -> bool:
        """Whether a line about the peer may be written now: a partner causes a bounded number."""

    def number(self, shipment: Shipment) -> int:
        """Return the number of a function at the peer; define it there first if it has none."""

    def is_direct(self, payload: Payload) -> bool:
        """Whether a message goes straight to the outbox: connected, small, no fault injection."""

    def send(
        self,
        frame: Frame,
        name: str,
        undo: list[Any] | None = None,
        future: Future[Any] | None = None,
    ) -> bool:
        """Queue a message whose body is a `Payload`; False if it will not be sent.

        Fault injection knows it by `name`. If it is not sent, `undo` is run, and `future` fails in
        the next tick."""

    def send_control(self, kind: int, id: int, target: int = 0) -> None:
        """Queue a message without a body."""


class Host(Packer, Protocol):
    """The worker at this end of the channel."""

    fault_injector: FaultInjector | None

    @property
    def name(self) -> str:
        """The worker's name, for errors and logs."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns the worker's state."""

    @property
    def options(self) -> Options:
        """The limits and timeouts of this worker."""

    @property
    def deadlines(self) -> Deadlines:
        """The timers of calls, in buckets."""

    @property
    def limits(self) -> Limits:
        """Counts how often each limit was reached."""

    @property
    def budget(self) -> Budget:
        """The memory that incoming messages of all peers share."""

    def spawn(
        self, work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a task that is cancelled when the worker closes."""
