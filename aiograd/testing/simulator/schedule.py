"""Which faults come when: drawn from the seed before the run, so that a run can be replayed with
fewer of them.

    crash, vanish, restart     a process is killed, a host loses power, the worker comes back
    replace                    a process is killed and at once started again under its name
    crash, with seconds        … and a child that it forked keeps its connections open; its parent
                               tells of its end after so long
    pause, slow                SIGSTOP for a while; a loop that is busy with something else
    cut, cut_one_way           bytes do not get through, both ends keep their connection
    reset, reset_after, close  a connection ends at once, after so many bytes, or in one direction
    refuse, clog               nobody can connect; everything comes late
    drop, fail, duplicate      a single message vanishes, cannot be sent, or arrives twice
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiograd.rpc.extension import DROP, DUPLICATE, FAIL, SEND, Verdict
from aiograd.testing.simulator.world import World


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, `at` a moment or with the nth message of kind `on` from `a`."""

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


# Faults after which a worker may be taken for lost by somebody.
DEATHS: Final = frozenset({"crash", "restart", "replace"})  # ... because its process has ended
HARMFUL: Final = DEATHS | {
    *("vanish", "cut", "cut_one_way", "reset", "reset_after", "close", "refuse")
}
VERDICTS: Final = {"drop": DROP, "fail": FAIL, "duplicate": DUPLICATE}
RESUMED: Final = frozenset({"reset", "reset_after", "close"})
HINDERING: Final = frozenset({"pause", "cut", "cut_one_way", "clog"})
SHORT: Final = 2.0  # seconds; a cut that ends earlier is not seen
CHANCE: Final = 1.0  # seconds without anything in the way, in which two come back to each other
RESTARTED: Final = 0.5  # seconds in which a worker has started, and everybody knows it
HANDSHAKE: Final = 4.5  # seconds; whoever is away for longer may miss a handshake


def apply(world: World, fault: Fault) -> None:
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
        world.trace("heal", fault.a, fault.b)
        for pair in pairs:
            world.wire.change_cut(*pair, -1)

    _later(world, fault.seconds, heal)


def _clog(world: World, fault: Fault) -> None:
    pairs = [(fault.a, fault.b), (fault.b, fault.a)]
    for pair in pairs:
        world.wire.clogs[pair] = world.wire.clogs.get(pair, 0.0) + fault.amount

    def unclog() -> None:
        for pair in pairs:
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
        end = ours if ours.node.name == fault.b else theirs
        end.broken_off = True
        end.receive_end()


def _refuse(world: World, fault: Fault) -> None:
    refusing = world.wire.refusing
    refusing[fault.a] = refusing.get(fault.a, 0) + 1

    def accept() -> None:
        refusing[fault.a] -= 1

    _later(world, fault.seconds, accept)


def _restart(world: World, fault: Fault) -> None:
    world.loop.create_task(world.restart(fault.a), context=world.context)


def _replace(world: World, fault: Fault) -> None:
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
    """What has gone wrong so far: which errors are justified."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: set[str] = set()  # workers that anybody may have lost
        self.pairs: set[frozenset[str]] = set()  # who may have lost whom
        self.any = False
        self.kinds: set[str] = set()
        self.until = 0.0  # when the last of it is over
        self._everyone = False  # anybody may have lost anybody
        self._away = 0.0  # seconds that somebody was paused or slow, together
        self._in_the_way: list[tuple[frozenset[str], float, float]] = []  # of whom, from, to

    def note(self, fault: Fault) -> None:
        self.any = True
        self.kinds.add(fault.kind)
        self.until = max(self.until, self._world.loop.time() + max(fault.seconds, RESTARTED))
        if fault.kind in ("pause", "slow"):
            self._away += fault.seconds
        if fault.kind == "refuse" or self._away > HANDSHAKE:
            self._everyone = True
        if fault.kind in HINDERING | RESUMED:
            now = self._world.loop.time()
            whom = frozenset({fault.a, fault.b} - {""})
            self._in_the_way.append((whom, now, now + fault.seconds))
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
        """Who had no chance to come back to each other in time, after their connection broke."""
        now, resume = self._world.loop.time(), self._world.options.resume
        return {
            pair
            for at, pair in self._world.wire.breaks
            if at + resume <= now and not self._had_a_chance(pair, at, at + resume)
        }

    def _had_a_chance(self, pair: frozenset[str], begin: float, end: float) -> bool:
        """Whether for `CHANCE` seconds nobody was paused, and nothing was cut, clogged or reset."""
        free = begin
        for whom, since, until in sorted(self._in_the_way, key=lambda each: each[1]):
            if whom <= pair and until > free:
                if min(since, end) - free >= CHANCE:
                    return True
                free = until
        return end - free >= CHANCE

    @property
    def lossy(self) -> bool:
        return self._everyone or bool(self.nodes or self.pairs or self._stranded())

    def may_lose(self, name: str) -> bool:
        """Whether somebody may have lost this worker."""
        pairs = self.pairs | self._stranded()
        return self._everyone or name in self.nodes or any(name in pair for pair in pairs)


class Player:
    """Lets the faults of a schedule happen."""

    def __init__(self, world: World, faults: list[Fault]) -> None:
        self.world = world
        self.harm = Harm(world)
        self._timed = sorted((f for f in faults if not f.on), key=lambda f: f.at)
        self._triggered = [f for f in faults if f.on]
        self.messages: Counter[str] = Counter()  # sent so far, by kind
        self._seen: dict[tuple[str, str], int] = {}

    async def play(self) -> None:
        for fault in self._timed:
            await asyncio.sleep(max(0.0, fault.at - self.world.loop.time()))
            self.happen(fault)

    def happen(self, fault: Fault) -> None:
        self.harm.note(fault)
        apply(self.world, fault)

    def stop(self) -> None:
        """From now on nothing goes wrong any more."""
        self._triggered.clear()

    def message(self, name: str, kind: str) -> Verdict:
        """A message of this kind is about to leave a node: what becomes of it."""
        self.messages[kind] += 1
        if not self._triggered:
            return SEND
        verdict = SEND
        count = self._seen[name, kind] = self._seen.get((name, kind), 0) + 1
        for fault in [f for f in self._triggered if (f.a, f.on, f.at) == (name, kind, count)]:
            self._triggered.remove(fault)
            if fault.kind in VERDICTS:
                self.harm.note(fault)
                self.world.trace("fault", str(fault))
                verdict = VERDICTS[fault.kind]
                continue
            # After the callback that sends it, and sometimes after the bytes have left.
            later = 0.0 if fault.amount else LATER
            self.world.loop.call_later(later, self.happen, fault, context=self.world.context)
        return verdict
