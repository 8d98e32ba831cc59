"""Limits that were run into: how often each was reached, for people and for tests.

    strangers        connections refused because too many had proven nothing yet    (no word)
    handshake        connections that proved nothing, or not in time                AuthError
    protocol         connections ended because a peer broke the rules (max_message) ProtocolError
    inbound_budget   messages beyond the memory for what comes in                   Overloaded
    allocation       messages for which the system had no memory                    Overloaded
    max_inflight     calls refused because the peer had too many under way          Overloaded
    outbound_buffer  calls held back because the peer does not read its answers     –
    window           calls of ours that waited for others until their deadline      Overloaded
    values           values that partners wanted to be kept beyond what is kept     Overloaded
    contexts         contexts and passes that partners opened beyond what may be    Overloaded

What the limits are is in `Options`, or where they are enforced: where the thing happens.

How long the event loop keeps others waiting: a measurement that is off until switched on.

    await rpc_async("worker1", measure_lag)
    await rpc_async("worker1", metrics)         # {"loop_lag_mean": …, "loop_lag_max": …, …}

A timer is set again and again; by how much it is late is what a message, too, would have waited:
for a coroutine that does not await, or for the interpreter held by a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from aiograd.rpc.scope import current

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent


NAMES: Final = (
    "strangers",
    "handshake",
    "protocol",
    "inbound_budget",
    "allocation",
    "max_inflight",
    "outbound_buffer",
    "window",
    "values",
    "contexts",
)


class Limits:
    """Counts, for one worker, which limits were reached."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def reached(self, name: str) -> None:
        self._counts[name] += 1

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> dict[str, int]:
        return dict(self._counts)

    def __repr__(self) -> str:
        return f"Limits({', '.join(f'{k} {v}' for k, v in self._counts.items() if v)})"


EVERY: Final = 0.05  # seconds between two looks: seen soon, and a thousandth of a core at most


class LoopLag:
    """The lateness of one worker's loop since the measurement began, in seconds."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._timer: asyncio.TimerHandle | None = None
        self.samples = 0
        self.total = self.largest = 0.0

    def start(self) -> None:
        due = self._agent.loop.time() + EVERY
        self._timer = self._agent.loop.call_at(due, self._look, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, due: float) -> None:
        if self._agent.closed:
            return
        late = max(0.0, self._agent.loop.time() - due)
        self.samples += 1
        self.total += late
        self.largest = max(self.largest, late)
        self.start()

    def metrics(self) -> dict[str, float]:
        return {
            "loop_lag_mean": self.total / self.samples if self.samples else 0.0,
            "loop_lag_max": self.largest,
            "loop_lag_samples": self.samples,
        }


def measure_lag(on: bool = True) -> None:
    """Begin to measure the lag of the current worker's event loop anew, or end it."""
    agent = current()
    if threading.get_ident() == agent.thread:
        _switch(agent, on)
    else:
        agent.from_thread(_switch, agent, on)


def _switch(agent: Agent, on: bool) -> None:
    before = agent.parts.pop(LoopLag, None)
    if before is not None:
        before.stop()
    if on:
        agent.parts[LoopLag] = lag = LoopLag(agent)
        lag.start()


def metrics() -> dict[str, float]:
    """Return what is measured on the current worker beyond `debug_info`; nothing by default."""
    lag: LoopLag | None = current().parts.get(LoopLag)
    return {} if lag is None else lag.metrics()


measure_lag.__aiograd_inline__ = True  # type: ignore[attr-defined]
metrics.__aiograd_inline__ = metrics.__aiograd_quiet__ = True  # type: ignore[attr-defined]
