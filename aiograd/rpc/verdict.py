"""What may be done to a message on purpose: the seam for fault injection.

`agent.faults` is None, or an object whose `on_send(kind, to)` gives a `Verdict` for every message:
`kind` is "call", "op", "remote", "reply", or a service's name, `to` the receiving worker's name.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol


class Verdict(NamedTuple):
    """`action` is "send", "fail", "drop", "delay" (by `seconds`) or "duplicate"."""

    action: str = "send"
    seconds: float = 0.0


SEND: Final = Verdict()
FAIL: Final = Verdict("fail")
DROP: Final = Verdict("drop")
DUPLICATE: Final = Verdict("duplicate")


class Faults(Protocol):
    def on_send(self, kind: str, to: str) -> Verdict: ...
