"""A pass under way on this worker: its state machine, and what the shell needs to know of it."""

from __future__ import annotations

import asyncio
from time import perf_counter  # a measurement for people, never a decision
from typing import Any

from aiograd.dist.context import Context
from aiograd.dist.backward.state import Pass
from aiograd.rpc.runtime.deadlines import Bucket
from aiograd.rpc.observe.tracing import PassTrace


class Late(Exception):
    """A pass did not end in its time."""


class Running:
    """A pass and what the shell needs to know of it."""

    __slots__ = (
        "_bucket",
        "context",
        "done",
        "draining",
        "heavy",
        "inbox",
        "losses",
        "play",
        "trace",
    )

    def __init__(self, context: Context, play: Pass, done: asyncio.Future[None] | None) -> None:
        self.context, self.play = context, play
        self.trace: PassTrace | None = None  # if somebody records it
        self.done = done  # at the originator: ends with the pass
        self.losses = context.home.losses  # of peers that were known when it began
        self.draining = False  # a thread is computing
        self.inbox: list[tuple[Any, ...]] = []  # messages that came meanwhile
        self.heavy = play.topology.heavy
        self._bucket: Bucket | None = None  # where its deadline waits

    @property
    def over(self) -> bool:
        """At the originator: whether all of it is done, even if `backward` has not resumed yet."""
        done = self.done
        return (
            done is not None and done.done() and not done.cancelled() and done.exception() is None
        )

    def limit(self, bucket: Bucket) -> None:
        """Let it end with `Late` at a deadline."""
        self._bucket = bucket
        bucket[self] = None

    def unlimit(self) -> None:
        if self._bucket is not None:
            self._bucket.pop(self, None)

    def expire(self) -> None:
        """Its deadline has come (called by `Deadlines`)."""
        if self.done is not None and not self.done.done():
            self.done.set_exception(Late())

    def feed(self) -> None:
        """Give the pass the messages that came."""
        for message in self.inbox:
            began = perf_counter()
            self.play.feed(*message)
            if self.trace is not None:
                sender, answers, *_ = message
                self._crossed("send", f"Send({self.play.here.name} -> {sender.name})", answers, began)
        self.inbox.clear()

    def computed(self, seconds: float) -> None:
        """Some of the pass's arithmetic is done."""
        self.context.seconds += seconds
        if self.trace is not None:
            self.trace.note("sweep", f"Sweep({self.play.here.name})", seconds, None)

    def posted(self, peer: str, answers: list[Any], began: float) -> None:
        """Gradients are on their way to a peer, and somebody records that."""
        self._crossed("recv", f"Recv({peer} -> {self.play.here.name})", answers, began)

    def _crossed(self, kind: str, key: str, answers: list[Any], began: float) -> None:
        edges = sum(gradients is not None for _, gradients, _ in answers)
        if edges and self.trace is not None:
            self.trace.note(kind, key, perf_counter() - began, {"edges": edges})
