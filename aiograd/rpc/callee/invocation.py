"""`Invocation`: one call, request or post of a peer, from its frame to its answer."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, Final, Protocol

from aiograd.rpc.callee.functions import Target, Turn
from aiograd.rpc.runtime.deadlines import Bucket

CARRIED: Final = "carried"  # the trace of the caller goes on here, and nothing is recorded


class Expiry(Protocol):
    """What has to know that the deadline of an invocation has come."""

    def expired(self, invocation: Invocation) -> None:
        """End an invocation whose time is up."""


class Invocation:
    """One call, request or post that a peer has made here."""

    # What few invocations need has its default in the class. What every one reads is set in
    # `__init__`: to read a default of the class takes several times as long.
    size: int = 0  # bytes of its share in a batch
    announced: bool = False  # the result store knows that its result stays here
    came: float = 0.0  # loop time at which it came, if it has no deadline: else that says it
    task: asyncio.Task[Any] | None = None
    refused: bool = False  # its function or service never began
    abandoned: bool = False  # nobody waits for the answer any more
    in_thread: bool = False
    begun: bool = False  # a thread runs it
    traceparent: str = ""  # of the OpenTelemetry trace that the call is part of, as W3C has it

    def __init__(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        self.kind: int = kind
        self.flags: int = flags
        self.id: int = id
        self.budget: float = budget  # seconds it may take
        self.target: Target = target
        self.func: Any = target.func
        self.args: Any = ()
        self.kwargs: Any = None
        self.body: Any = body  # a view, a `Transfer`, or its entry in a batch
        self.charged: int = 0  # bytes that its arguments take of a partner's memory
        self.context: contextvars.Context | None = None  # in which it runs
        self.carried: Any = None  # the baggage it came with
        self.token: bytes | None = None  # its result stays here, under this token
        self.execution: Expiry | None = None  # while it is tracked
        self.bucket: Bucket | None = None  # where its deadline waits
        self.answered: bool = False
        self.stream: Any = None  # the writer's end, if it gives items
        self.record: Any = None  # the caller wants to know what it does; True: in detail
        self.visit: Any = None  # while that is recorded
        self.turn: Turn | None = None  # its place among calls that must not run at the same time

    def expire(self) -> None:
        """Let the execution know that the deadline has come (called by `Deadlines`)."""
        if self.execution is not None:
            self.execution.expired(self)
