"""How recorded calls travel: what a recording adds to a message, on either side.

    caller                                        callee
    Trace ── call, extra {"record": details} ──▶  Visit: runs it under a recording of its own
          ◀── reply or fault, extra {"spans"} ──  its span first, then what happened inside

Agents, callers and callees keep a `Trace` or `Visit` where they find somebody recording, and None
otherwise. Partners (see `Options.mode`) are neither asked nor told: spans name workers and
functions that are none of their business.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from aiograd.rpc.envelope import open_head
from aiograd.rpc.observe.profile import Profile, Scope, Span, key
from aiograd.rpc.scope import SCOPE, record
from aiograd.wire.messages import METADATA

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.callee.invocation import Invocation
    from aiograd.rpc.directory import PeerInfo
    from aiograd.rpc.future import Future

BAGGAGE: Final = 10_000  # spans in one reply: about a megabyte, less than most results worth timing


class Trace:
    """A call under way that somebody records, at its caller. Lives in the call's future."""

    __slots__ = ("_agent", "_kind", "_peer", "_scope", "_start")

    def __init__(self, scope: Scope, agent: Agent, peer: PeerInfo, kind: str) -> None:
        self._scope, self._agent, self._peer, self._kind = scope, agent, peer, kind
        self._start = agent.runtime.time()

    def ask(self, extra: dict[str, Any] | None) -> dict[str, Any] | None:
        """What rides along with the call."""
        if self._agent.restricts(self._peer):
            return extra
        return {**(extra or {}), "record": self._scope.profile.details}

    def answered(self, future: Future[Any], flags: int, body: Any) -> None:
        """A reply or fault came; take the callee's spans from it."""
        spans: list[Span] = []
        if flags & METADATA and not self._agent.restricts(self._peer):
            # Whatever is wrong with the message is told when it is unpacked.
            with contextlib.suppress(Exception):
                head = open_head(flags, body, self._agent.codec_for(self._peer))
                spans = [Span(*each) for each in head.metadata.get("spans", ())]
        self._end(future, spans[0].error if spans else "", spans)

    def end(self, future: Future[Any], error: BaseException | None = None) -> None:
        """The call ended without an answer."""
        self._end(future, "" if error is None else type(error).__name__, ())

    def _end(self, future: Future[Any], error: str, spans: Iterable[Span]) -> None:
        future.info.trace = None
        agent, (recording, parent) = self._agent, self._scope
        name = key(self._kind, future.info.name, agent.name, self._peer.name)
        start, end, id = self._start, agent.runtime.time(), recording.number()
        call = Span(name, self._kind, agent.name, start, end, id, parent, error)
        recording.add(call)
        for each in adopt(spans, call, recording.number):
            recording.add(each)


def trace(agent: Agent, peer: PeerInfo, kind: str) -> Trace | None:
    """What records a call made here and now."""
    scope = SCOPE.get().recording
    return None if scope is None else Trace(scope, agent, peer, kind)


def adopt(spans: Iterable[Span], call: Span, number: Callable[[], int]) -> list[Span]:
    """The callee's spans as the caller's: under new ids, after the call's key, inside its time.

    The first one is the callee's whole part. If it does not lie inside the call, it was another
    clock's time: all are moved so that it lies in the middle.
    """
    spans = list(spans)
    if not spans:
        return []
    first, shift = spans[0], 0.0
    if not call.start <= first.start <= first.end <= call.end:
        shift = (call.start + call.end - first.start - first.end) / 2
    ids = {each.id: number() for each in spans}
    return [
        each._replace(
            key=f"{call.key}/{each.key}",
            start=each.start + shift,
            end=each.end + shift,
            id=ids[each.id],
            parent=ids.get(each.parent, call.id),
        )
        for each in spans
    ]


class Visit:
    """A call being served that somebody records: its caller, or this worker as a whole."""

    __slots__ = ("_agent", "_asked", "_func", "_id", "_inputs", "_name", "_stream", "_times")

    def __init__(self, invocation: Invocation, agent: Any) -> None:
        assert invocation.context is not None
        self._agent, self._name, self._func = agent, invocation.target.name, invocation.func
        self._stream = invocation.stream is not None
        whole = agent.profiles[-1] if agent.profiles else None
        self._asked = Profile(bool(invocation.record), whole, BAGGAGE)
        self._id = self._asked.number()
        self._inputs: list[tuple[int, ...]] = []
        self._times: list[float] = []  # when the function began and, if that is known, ended
        invocation.context.run(record, Scope(self._asked, self._id))
        invocation.func = self.run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the function, wherever it runs."""
        clock = self._agent.runtime.time
        if self._asked.details:
            self._inputs = [each.shape for each in (*args, *kwargs.values()) if _is_array(each)]
        self._times.append(clock())
        value = self._func(*args, **kwargs)
        if not self._stream and not inspect.iscoroutine(value) and not asyncio.isfuture(value):
            self._times.append(clock())
        return value

    def end(self, value: Any, error: BaseException | None) -> list[tuple[Any, ...]]:
        """It is about to be answered; what the caller gets to know."""
        agent, recording = self._agent, self._asked
        now = agent.runtime.time()
        start, end, *_ = (*self._times, now, now)
        detail: dict[str, Any] | None = None
        if recording.details:
            detail = {"inputs": [tuple(map(int, shape)) for shape in self._inputs]}
            detail["bytes"] = int(value.nbytes) if _is_array(value) else 0
        failure = "" if error is None else type(error).__name__
        span = Span(self._name, "run", agent.name, start, end, self._id, 0, failure, detail)
        inside = [tuple(each) for each in recording.events]
        recording.add(span)
        return [tuple(span), *inside]


def visit(invocation: Invocation, agent: Any) -> Visit | None:
    """What records a call that starts to run here."""
    return None if invocation.target.quiet else Visit(invocation, agent)


def _is_array(value: Any) -> bool:
    """Whether it is numpy's, or something like it."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "nbytes")


class PassTrace:
    """A backward pass that somebody records: `dist` tells what happens in it."""

    __slots__ = ("_agent", "_id", "_key", "_scope", "_start")

    def __init__(self, scope: Scope, agent: Agent, key: str) -> None:
        self._scope, self._agent, self._key = scope, agent, key
        self._id = scope.profile.number()
        self._start = agent.runtime.time()

    def note(self, kind: str, key: str, seconds: float, detail: dict[str, Any] | None) -> None:
        """Something in the pass has just ended."""
        recording, agent = self._scope.profile, self._agent
        end, id = agent.runtime.time(), recording.number()
        start = max(self._start, end - seconds)
        recording.add(Span(key, kind, agent.name, start, end, id, self._id, "", detail))

    def end(self, error: BaseException | None) -> None:
        recording, agent = self._scope.profile, self._agent
        end, failure = agent.runtime.time(), "" if error is None else type(error).__name__
        whole = Span(self._key, "backward", agent.name, self._start, end, self._id)
        recording.add(whole._replace(parent=self._scope.parent, error=failure))


def trace_pass(agent: Agent) -> PassTrace | None:
    """What records a pass that starts, or is joined, here and now."""
    scope = SCOPE.get().recording
    if scope is None and agent.profiles:
        scope = Scope(agent.profiles[-1], 0)
    return None if scope is None else PassTrace(scope, agent, f"backward({agent.name})")
