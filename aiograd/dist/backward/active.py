"""The passes under way on this worker: each with its state machine, its messages and its deadline."""

from __future__ import annotations

import asyncio
from time import perf_counter  # a measurement for people, never a decision
from collections.abc import Callable
from typing import Any

from aiograd.dist.backward.state import Pass, PassKey
from aiograd.dist.context import Context
from aiograd.rpc.observe.tracing import PassTrace
from aiograd.rpc.runtime.deadlines import Bucket


class Late(Exception):
    """A pass did not end in its time."""


class ActivePass:
    """A pass under way: its state machine, and what carries it out.

    Changes on the loop only. While `draining`, a thread computes in `state`: nobody else may touch
    that then, and messages wait in the `inbox`.
    """

    __slots__ = (
        "_bucket",
        "began",
        "context",
        "done",
        "draining",
        "heavy",
        "inbox",
        "key",
        "losses",
        "state",
        "trace",
    )

    context: Context
    state: Pass
    key: tuple[int, int]

    def __init__(
        self, context: Context, state: Pass, done: asyncio.Future[None] | None, losses: int
    ) -> None:
        self.context, self.state, self.key = context, state, state.key
        self.trace: PassTrace | None = None  # if the pass is recorded, counted or part of a trace
        self.done: asyncio.Future[None] | None = done  # at the originator: ends with the pass
        self.began: float = perf_counter()  # for people who look at a pass that does not end
        # How many losses of peers were known when it began: the edges of those count as "none" in it,
        # while a loss that came later fails it.
        self.losses: int = losses
        self.draining: bool = False  # a thread is computing
        self.inbox: list[tuple[Any, ...]] = []  # messages that came meanwhile
        self.heavy: bool = state.topology.heavy
        self._bucket: Bucket | None = None  # where its deadline waits

    @property
    def over(self) -> bool:
        """At the originator: whether all of it is done, even if `backward` has not resumed yet."""
        # Such a pass must not fail any more, even if a loss is seen in the tick of its end.
        done = self.done
        return (
            done is not None and done.done() and not done.cancelled() and done.exception() is None
        )

    @property
    def waits(self) -> bool:
        """Whether the pass has something to do, or to wait for, on this worker."""
        return not self.state.complete or self.draining or self.done is not None

    def limit(self, bucket: Bucket) -> None:
        """Let the pass end with `Late` when the bucket of its deadline is reached."""
        # A bucket of `Deadlines`, since a timer of the loop for each pass would cost more.
        self._bucket = bucket
        bucket[self] = None

    def unlimit(self) -> None:
        """Forget the deadline: the pass has ended."""
        if self._bucket is not None:
            self._bucket.pop(self, None)

    def expire(self) -> None:
        """End the pass with `Late`; called by `Deadlines`."""
        self.fail(Late())

    def fail(self, error: BaseException) -> None:
        """Raise an error in the task that awaits the pass, if one still does."""
        done = self.done
        if done is not None and not done.done():
            done.set_exception(error)
            # Retrieved at once: a cancelled task no longer awaits it, and asyncio would log that.
            done.exception()

    def feed(self) -> None:
        """Give the state machine the messages that came."""
        for message in self.inbox:
            began = 0.0 if self.trace is None else perf_counter()
            self.state.feed(*message)
            if self.trace is not None:
                sender, answers, *_ = message
                key = f"Send({self.state.here.name} -> {sender.name})"
                self._crossed("send", key, answers, began)
        self.inbox.clear()

    def traced(self, function: Callable[..., None], *args: Any) -> None:
        """Run something of the user's own in the trace that the pass is part of, if it is."""
        variables = None if self.trace is None else self.trace.variables
        if variables is None:
            function(*args)
        else:
            # A copy: a context cannot be entered while it is, as it is by the task that drains.
            variables.copy().run(function, *args)

    def computed(self, seconds: float) -> None:
        """Note the duration of a drain, for pictures and recordings."""
        self.context.seconds += seconds
        if self.trace is not None:
            self.trace.note("sweep", f"Sweep({self.state.here.name})", seconds, None)

    def posted(self, peer: str, answers: list[Any], began: float) -> None:
        """Record that gradients were sent to a peer."""
        self._crossed("recv", f"Recv({peer} -> {self.state.here.name})", answers, began)

    def _crossed(self, kind: str, key: str, answers: list[Any], began: float) -> None:
        edges = sum(gradients is not None for _, gradients, _ in answers)
        if edges and self.trace is not None:
            self.trace.note(kind, key, perf_counter() - began, {"edges": edges})


class PassTable:
    """The passes under way on one worker; shared by the engine, the aborts and the reports.

    Found by key for every gradient message, and by context for every context that is left: a worker
    may have thousands of contexts open, each with a pass whose outcome it does not know yet.
    """

    def __init__(self) -> None:
        self._passes: dict[PassKey, ActivePass] = {}
        self._by_context: dict[int, dict[PassKey, ActivePass]] = {}  # contexts with passes only
        # The dict's own method: it is called for every gradient message.
        self.get: Callable[[PassKey], ActivePass | None] = self._passes.get

    def __len__(self) -> int:
        return len(self._passes)

    def add(self, active: ActivePass) -> None:
        """Take in a pass that begins here."""
        key = active.key
        self._passes[key] = active
        siblings = self._by_context.get(key[0])
        if siblings is None:
            self._by_context[key[0]] = {key: active}
        else:
            siblings[key] = active

    def discard(self, key: PassKey) -> None:
        """Forget a pass, if it is still here."""
        if self._passes.pop(key, None) is not None:
            siblings = self._by_context[key[0]]
            if len(siblings) == 1:
                del self._by_context[key[0]]
            else:
                del siblings[key]

    def is_live(self, active: ActivePass) -> bool:
        """Tell whether a pass is still under way: an await or a thread may have outlived it."""
        return self.get(active.key) is active

    def all(self) -> list[ActivePass]:
        """Return all passes, oldest first."""
        return list(self._passes.values())

    def of(self, context_id: int) -> list[ActivePass]:
        """Return the passes of one context, oldest first."""
        return list(self._by_context.get(context_id, {}).values())
