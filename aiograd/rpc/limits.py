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
"""

from __future__ import annotations

from collections import Counter
from typing import Final

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
