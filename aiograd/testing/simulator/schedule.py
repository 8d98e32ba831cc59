"""Faults: how each of them happens, when, and which errors it justifies.

They are drawn from the seed before the run, so that a run can be replayed with fewer of them.

    crash, vanish, restart     a process is killed, a host loses power, the worker comes back
    replace                    a process is killed and at once started again under its name
    crash, with seconds        a forked child keeps the connections of the killed process open;
                               the cluster layer tells all workers of its end after so long
    pause, slow                SIGSTOP for a while; a loop that is busy with something else
    cut, cut_one_way           bytes do not get through, both ends keep their connection
    reset, reset_after, close  a connection ends at once, after so many bytes, or in one direction
    refuse, clog               a host accepts no connection; every piece is late
    drop, fail, duplicate      a single message vanishes, cannot be sent, or arrives twice
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiograd.rpc.extension import DROP, DUPLICATE, FAIL, SEND, FaultAction
from aiograd.testing.simulator.world import World


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, `at` a moment or with the nth message of kind `on` from `a`.

    `b` is the other host of a path, `seconds` how long it lasts. `amount` depends on the kind:
    bytes until a reset, seconds per callback or of extra delay; with `on`, 1.0 means that the fault
    happens before the bytes of the message have left.
    """

    at: float
    kind: str
    a: str
    b: str = ""
    seconds: float = 0.0
    amount: float = 0.0
    on: str = ""

    def __str__(self) -> str:
        when = f"message {self.at:g} of kind {self.on}" if self.on else f"{self.at:.3f} s"
        facts = [self.a, self.b, f"{self.seconds:.3f} s" if self.seconds else ""]
        more = f"{self.amount:g}" if self.amount else ""
        return " ".join(part for part in (f"{when}:", self.kind, *facts, more) if part)


# Faults after which others may take a worker for lost; `DEATHS`: because its process has ended.
DEATHS: Final = frozenset({"crash", "restart", "replace"})
HARMFUL: Final = DEATHS | {
    *("vanish", "cut", "cut_one_way", "reset", "reset_after", "close", "refuse")
}
MESSAGE_ACTIONS: Final = {"drop": DROP, "fail": FAIL, "duplicate": DUPLICATE}
# Faults after which a session resumes, if its two ends have a chance; and those that take it away.
RESUMED: Final = frozenset({"reset", "reset_after", "close"})
HINDERING: Final = frozenset({"pause", "cut", "cut_one_way", "clog"})
SHORT: Final = 2.0  # seconds; the library promises that a shorter cut changes no outcome
CHANCE: Final = 1.0  # seconds without a hindrance, in which two peers resume their session
RESTARTED: Final = 0.5  # seconds in which a worker has started, and all others know it
HANDSHAKE: Final = 4.5  # seconds; a worker that is away for longer may miss a handshake (5 s)


def apply(world: World, fault: Fault) -> None:
    """Let a fault happen now. Not for those that change a single message."""
    world.trace("fault", str(fault))
    _ACTIONS[fault.kind](world, fault)


def _later(world: World, seconds: float, action: Callable[[], None]) -> None:
    world.loop.call_later(seconds, action, context=world.context)


def _cut(world: World, fault: Fault) -> None:
    pairs = [(fault.a, fault.b)]
    if fault.kind == "cut":
        pairs.append((fault.b, fault.a))
    for pair in pairs:
        world.wire.change_cut(*pair, 1)

    def heal() -> None:
        """Remove this cut; another one on the same path stays."""
        world.trace("heal", fault.a, fault.b)
        for pair in pairs:
            world.wire.change_cut(*pair, -1)

    _later(world, fault.seconds, heal)


def _clog(world: World, fault: Fault) -> None:
    pairs = [(fault.a, fault.b), (fault.b, fault.a)]
    for pair in pairs:
        world.wire.clogs[pair] = world.wire.clogs.get(pair, 0.0) + fault.amount

    def unclog() -> None:
        """Take back the delay of this fault."""
        for pair in pairs:
            # Sums of floats: what is left of the last one may be a little below zero.
            world.wire.clogs[pair] = max(0.0, world.wire.clogs[pair] - fault.amount)

    _later(world, fault.seconds, unclog)


def _reset(world: World, fault: Fault) -> None:
    for ours, theirs in world.wire.between(fault.a, fault.b):
        ours.broken(theirs)


def _reset_after(world: World, fault: Fault) -> None:
    for ours, theirs in world.wire.between(fault.a, fault.b):
        end = ours if ours.node.name == fault.a else theirs
        end.outgoing.left = int(fault.amount)


def _close(world: World, fault: Fault) -> None:
    for ours, theirs in world.wire.between(fault.a, fault.b):
        # Only `b` sees the end of the stream; `a` learns of it from what `b` does then.
        end = ours if ours.node.name == fault.b else theirs
        end.broken_off = True
        end.receive_end()


def _refuse(world: World, fault: Fault) -> None:
    # A count, as for cuts: refusals overlap.
    refusing = world.wire.refusing
    refusing[fault.a] = refusing.get(fault.a, 0) + 1

    def accept() -> None:
        """End this refusal."""
        refusing[fault.a] -= 1

    _later(world, fault.seconds, accept)


def _restart(world: World, fault: Fault) -> None:
    world.loop.create_task(world.restart(fault.a), context=world.context)


def _replace(world: World, fault: Fault) -> None:
    # A dead worker is not replaced: `restart` faults bring it back at their own time.
    if world.nodes[fault.a].alive:
        world.crash(fault.a)
        _restart(world, fault)


_ACTIONS: Final[dict[str, Callable[[World, Fault], None]]] = {
    "crash": lambda world, fault: world.crash(fault.a, told=fault.seconds),
    "vanish": lambda world, fault: world.crash(fault.a, silent=True),
    "restart": _restart,
    "replace": _replace,
    "pause": lambda world, fault: world.pause(fault.a, fault.seconds),
    "slow": lambda world, fault: world.slow(fault.a, fault.amount, fault.seconds),
    "cut": _cut,
    "cut_one_way": _cut,
    "clog": _clog,
    "reset": _reset,
    "reset_after": _reset_after,
    "close": _close,
    "refuse": _refuse,
}


LATER: Final = 0.002  # seconds after a message that triggers a fault, for its bytes to leave


class Harm:
    """What has gone wrong so far, and therefore which errors are justified.

    Too strict, and right runs fail; too lax, and no seed finds anything. An excuse therefore names
    the workers it is for, and a broken connection excuses a loss only if its two ends had no
    `CHANCE` to resume the session in time.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: set[str] = set()  # workers that any other may have lost
        self.pairs: set[frozenset[str]] = set()  # two that may have lost each other
        self.any: bool = False
        self.kinds: set[str] = set()
        self.until: float = 0.0  # when the last of it is over
        self._everyone = False  # any worker may have lost any other
        self._away = 0.0  # seconds for which workers were paused or slow, together
        # (hosts, from, to): while workers were paused, or paths cut, clogged or reset
        self._hindrances: list[tuple[frozenset[str], float, float]] = []

    def note(self, fault: Fault) -> None:
        """Take a fault that happens now into account."""
        self.any = True
        self.kinds.add(fault.kind)
        self.until = max(self.until, self._world.loop.time() + max(fault.seconds, RESTARTED))
        if fault.kind in ("pause", "slow"):
            self._away += fault.seconds
        # Either may keep a first handshake from ending in time, whichever two workers it is
        # between: who dials whom, and when, is not known here.
        if fault.kind == "refuse" or self._away > HANDSHAKE:
            self._everyone = True
        if fault.kind in HINDERING | RESUMED:
            now = self._world.loop.time()
            hosts = frozenset({fault.a, fault.b} - {""})
            self._hindrances.append((hosts, now, now + fault.seconds))
        if fault.kind not in HARMFUL or self._short(fault):
            return
        if fault.b:
            self.pairs.add(frozenset({fault.a, fault.b}))
        else:
            self.nodes.add(fault.a)

    def _short(self, fault: Fault) -> bool:
        """Whether a broken connection should have been made again without a loss."""
        return fault.kind in RESUMED or ("cut" in fault.kind and fault.seconds < SHORT)

    def _stranded(self) -> set[frozenset[str]]:
        """Find pairs that had no chance to resume in time after their connection broke."""
        now, resume = self._world.loop.time(), self._world.options.resume
        return {
            pair
            for at, pair in self._world.wire.breaks
            if at + resume <= now and not self._had_a_chance(pair, at, at + resume)
        }

    def _had_a_chance(self, pair: frozenset[str], begin: float, end: float) -> bool:
        """Tell whether a pair had `CHANCE` seconds in a row without any hindrance."""
        free = begin  # from then on nothing hinders the pair, as far as we have come
        for hosts, since, until in sorted(self._hindrances, key=lambda each: each[1]):
            if hosts <= pair and until > free:
                if min(since, end) - free >= CHANCE:
                    return True
                free = until
        return end - free >= CHANCE

    @property
    def lossy(self) -> bool:
        """Whether any worker may have lost any other."""
        return self._everyone or bool(self.nodes or self.pairs or self._stranded())

    def may_lose(self, name: str) -> bool:
        """Tell whether another worker may have lost this one."""
        pairs = self.pairs | self._stranded()
        return self._everyone or name in self.nodes or any(name in pair for pair in pairs)


class Player:
    """Lets the faults of a schedule happen."""

    def __init__(self, world: World, faults: list[Fault]) -> None:
        self.world = world
        self.harm: Harm = Harm(world)
        self._timed = sorted((f for f in faults if not f.on), key=lambda f: f.at)
        self._triggered = [f for f in faults if f.on]
        self.messages: Counter[str] = Counter()  # sent so far, by kind
        self._seen: dict[tuple[str, str], int] = {}

    async def play(self) -> None:
        """Let the faults that have a moment happen at it."""
        for fault in self._timed:
            await asyncio.sleep(max(0.0, fault.at - self.world.loop.time()))
            self.happen(fault)

    def happen(self, fault: Fault) -> None:
        """Let one fault happen, and note what it justifies."""
        self.harm.note(fault)
        apply(self.world, fault)

    @property
    def waiting(self) -> bool:
        """Whether faults are left that a message is to trigger."""
        return bool(self._triggered)

    def stop(self) -> None:
        """Let no message trigger a fault any more: the checks after a run send messages, too."""
        self._triggered.clear()

    def message(self, name: str, kind: str) -> FaultAction:
        """Decide about a message that is about to leave a node; it may trigger faults."""
        self.messages[kind] += 1
        # The usual case, and every message of a run passes here.
        if not self._triggered:
            return SEND
        action = SEND
        count = self._seen[name, kind] = self._seen.get((name, kind), 0) + 1
        for fault in [f for f in self._triggered if (f.a, f.on, f.at) == (name, kind, count)]:
            self._triggered.remove(fault)
            if fault.kind in MESSAGE_ACTIONS:
                self.harm.note(fault)
                self.world.trace("fault", str(fault))
                action = MESSAGE_ACTIONS[fault.kind]
                continue
            # Never inside the callback that sends: a process ends between two callbacks. Before or
            # after the bytes have left are different bugs, so both are tried.
            later = 0.0 if fault.amount else LATER
            self.world.loop.call_later(later, self.happen, fault, context=self.world.context)
        return action
