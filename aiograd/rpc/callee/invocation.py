"""`Invocation`: one call, request or post of a peer, from its frame to its answer."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any, Protocol

from aiograd.rpc.callee.functions import Target, Turn
from aiograd.rpc.runtime.deadlines import Bucket


class Expiry(Protocol):
    """What has to know that the deadline of an invocation has come."""

    def expired(self, invocation: Invocation) -> None: ...


class Invocation:
    """One call, request or post that a peer has made here."""

    kind: int
    flags: int
    id: int

    # Defaults live in the class, because most invocations need few of these fields.
    size = 0  # bytes of its share in a batch
    charged = 0  # bytes that its arguments take of a partner's memory
    args: Any = ()
    kwargs: Any = None
    context: contextvars.Context | None = None  # in which it runs
    carried: Any = None  # the baggage it came with
    token: bytes | None = None  # its result stays here, under this token
    announced = False  # the result store knows that
    execution: Expiry | None = None  # while it is tracked
    bucket: Bucket | None = None  # where its deadline waits
    came = 0.0  # loop time at which it came, if it has no deadline: else that says it
    task: asyncio.Task[Any] | None = None
    answered = False
    refused = False  # its function or service never began
    abandoned = False  # nobody waits for the answer any more
    in_thread = False
    begun = False  # a thread runs it
    stream: Any = None  # the writer's end, if it gives items
    record: bool | None = None  # the caller wants to know what it does; True: in detail
    visit: Any = None  # while that is recorded
    turn: Turn | None = None  # its place among calls that must not run at the same time

    def __init__(
        self, kind: int, flags: int, id: int, budget: float, target: Target, body: Any
    ) -> None:
        self.kind, self.flags, self.id = kind, flags, id
        self.budget = budget  # seconds it may take
        self.target = target
        self.func: Any = target.func
        self.body = body  # a view, a `Transfer`, or its entry in a batch

    def expire(self) -> None:
        """Let the execution know that the deadline has come (called by `Deadlines`)."""
        if self.execution is not None:
            self.execution.expired(self)
