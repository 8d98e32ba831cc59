"""The numbers of one worker: counters, bytes, limits that were reached, the lag of its loop.

`metrics()` gives them all at any time, read from what is counted anyway.

`Limits` counts, from the start of the worker, how often each limit was reached:

    strangers        connections refused: too many were not authenticated yet        (closed)
    descriptors      looks, every few seconds, at which no file descriptor was left  –
    handshake        connections that failed to authenticate, or not in time        AuthError
    protocol         connections ended because a peer broke the protocol            ProtocolError
    inbound_budget   messages beyond the memory for incoming ones                   Overloaded
    partner_memory   messages and arguments beyond the memory for one partner       Overloaded
    partner_links    connections beyond those of one partner                        AuthError
    partner_sessions sessions that one partner began too fast                       AuthError
    partner_rate     large messages of a partner that came too slowly               Overloaded
    refused          what a partner asked for and may not have, or in a wrong form NotAllowed, …
    allocation       messages for which the system had no memory                    Overloaded
    max_inflight     calls refused because the peer had too many in flight          Overloaded
    outbound_buffer  calls deferred because the peer does not read its replies      –
    window           our calls that waited in the window until their deadline       Overloaded
    values           values and forks beyond what is stored for a partner           Overloaded
    references       references to a partner's own values beyond what is kept       Overloaded
    contexts         contexts beyond what a partner may open                        Overloaded
    passes           passes beyond what a partner may invite to                     Overloaded
    aborts           marks of ended passes beyond what a partner may leave          Overloaded
    edges            tensors on the tape beyond what a partner may send             Overloaded
    gathers          values of a partner beyond what waits in gathers               Overloaded

The limits themselves are in `Options`, or beside the code that enforces them and counts here.

The watchdog says how long the event loop kept its last question waiting, four times a second.
`LoopLag` measures that twenty times a second. It is off until switched on:

    await rpc_async("worker1", measure_lag)
    await rpc_async("worker1", metrics)         # {"loop_lag_mean": …, "loop_lag_max": …, …}

A timer is set again and again. A message would wait for as long as the timer is late: for a
coroutine that does not await, or for a thread that holds the interpreter.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any, Final, Protocol

from aiograd.rpc.observe.host import memory, processor_time
from aiograd.rpc.observe.watchdog import Watchdog
from aiograd.rpc.scope import current

# ── limits ──────────────────────────────────────────────────────────────────────────────────────

# Documented for users (docs/security.md), who read `agent.limits`: they do not change.
NAMES: Final = (
    "strangers",
    "descriptors",
    "handshake",
    "protocol",
    "inbound_budget",
    "partner_memory",
    "partner_links",
    "partner_sessions",
    "partner_rate",
    "refused",
    "allocation",
    "max_inflight",
    "outbound_buffer",
    "window",
    "values",
    "references",
    "contexts",
    "passes",
    "aborts",
    "edges",
    "gathers",
)


class Limits:
    """Counts, for one worker, how often each limit was reached."""

    def __init__(self) -> None:
        # Every name from the start: a reader sees a 0 where nothing happened, not a missing key.
        self._counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def reached(self, name: str) -> None:
        """Count one event."""
        self._counts[name] += 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        """Return all counts by name."""
        return dict(self._counts)

    def __repr__(self) -> str:
        return f"Limits({', '.join(f'{k} {v}' for k, v in self._counts.items() if v)})"


# ── the lag of the loop ─────────────────────────────────────────────────────────────────────────

# Seconds between two samples: a blocked loop is seen soon, and the timer costs a thousandth of a
# core at most.
EVERY: Final = 0.05


class MeasuredWorker(Protocol):
    """What the measurement needs of a worker."""

    loop: asyncio.AbstractEventLoop
    closed: bool
    parts: dict[type, Any]


class LoopLag:
    """The lateness of one worker's loop since the measurement began, in seconds."""

    def __init__(self, worker: MeasuredWorker) -> None:
        self._worker = worker
        self._timer: asyncio.TimerHandle | None = None
        self.samples: int = 0
        self.total: float = 0.0
        self.largest: float = 0.0

    def start(self) -> None:
        """Set the timer of the next sample."""
        due = self._worker.loop.time() + EVERY
        self._timer = self._worker.loop.call_at(due, self._sample, due)

    def stop(self) -> None:
        """Take no more samples."""
        if self._timer is not None:
            self._timer.cancel()

    def _sample(self, due: float) -> None:
        # A closed worker is not told to stop its parts. The timer ends itself, so that it does not
        # keep the worker alive for as long as its loop runs.
        if self._worker.closed:
            return
        # Not negative: loops call a timer up to their clock's resolution early.
        late = max(0.0, self._worker.loop.time() - due)
        self.samples += 1
        self.total += late
        self.largest = max(self.largest, late)
        self.start()

    def metrics(self) -> dict[str, float]:
        """Return the mean, the maximum and the number of samples."""
        return {
            "loop_lag_mean": self.total / self.samples if self.samples else 0.0,
            "loop_lag_max": self.largest,
            "loop_lag_samples": self.samples,
        }


def measure_lag(on: bool = True) -> None:
    """Begin to measure the lag of the current worker's event loop anew, or end it.

    May be called in any thread.

        >>> await ag.rpc_async("worker1", ag.measure_lag)
        >>> found = await ag.rpc_async("worker1", ag.metrics)
        >>> found["loop_lag_mean"] <= found["loop_lag_max"]
        True
    """
    agent = current()
    if threading.get_ident() == agent.thread:
        _switch(agent, on)
    else:
        agent.from_thread(_switch, agent, on)


def _switch(worker: MeasuredWorker, on: bool) -> None:
    before = worker.parts.pop(LoopLag, None)
    if before is not None:
        before.stop()
    if on:
        worker.parts[LoopLag] = lag = LoopLag(worker)
        lag.start()


def metrics() -> dict[str, float]:
    """Return the numbers of the current worker: those of `debug_info`, and many more.

    Totals grow from the start of the worker: `calls_started`, `bytes_sent`, `bytes_received`,
    `cpu_seconds`, and `limit_reached_…` for each limit. The others are of this moment.
    `measure_lag` adds `loop_lag_mean` and `loop_lag_samples`. Calls pay nothing for them.

        >>> numbers = ag.metrics()
        >>> numbers["pending_calls"], numbers["links_open"] > 0, numbers["memory_bytes"] > 0
        (0, True, True)
        >>> (await ag.rpc_async("worker1", ag.metrics))["limit_reached_window"]
        0
    """
    agent = current()
    found: dict[str, float] = dict(agent.links.counters())
    for part in list(agent.parts.values()):
        counters = getattr(part, "counters", None)
        if counters is not None:
            found.update(counters())
    links = [link for link in agent.links.all() if link.peer.incarnation != agent.incarnation]
    found["calls_started"] = agent.started
    found["links_open"] = sum(link.is_open for link in links)
    found["links_suspect"] = sum(link.suspect for link in links)
    found["bytes_sent"] = sum(link.session.sent for link in links)
    found["bytes_received"] = sum(link.session.received for link in links)
    found["threads"] = threading.active_count()
    found["memory_bytes"] = memory() or 0
    found["cpu_seconds"] = processor_time()
    watchdog: Watchdog | None = agent.parts.get(Watchdog)
    if watchdog is not None:
        found["loop_lag"], found["loop_lag_max"] = watchdog.lag, watchdog.largest_lag
    lag: LoopLag | None = agent.parts.get(LoopLag)
    if lag is not None:
        found.update(lag.metrics())
    for name, count in agent.limits.as_dict().items():
        found[f"limit_reached_{name}"] = count
    return found


# Quiet, as `debug_info` is: a call that reads the numbers must not change them.
measure_lag.__aiograd_inline__ = True  # type: ignore[attr-defined]
metrics.__aiograd_inline__ = metrics.__aiograd_quiet__ = True  # type: ignore[attr-defined]
