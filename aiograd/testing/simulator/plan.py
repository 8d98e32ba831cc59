"""What one seed means: how many workers, which options, what kind of wire, which faults.

Seeds are written down when they find something, so a seed should go on to mean what it meant. A new
kind of plan is therefore drawn by a generator of its own (`random.Random(f"{seed} purpose")`):
an additional draw from the shared one would change every seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from aiograd.rpc.options import Options
from aiograd.testing.simulator.network import WireSettings
from aiograd.testing.simulator.schedule import Fault

# What actors do. One theme alone gives a kind of program more acts per seed than a mixture.
THEMES: Final = (
    ["calls"],
    ["references"],
    ["gradients"],
    ["calls", "references", "gradients"],
)
SPAN: Final = 8.0  # seconds of simulated time in which faults begin
CROWDED: Final = 0.01  # share of seeds with a crowd, which takes as long as three other seeds
FORKED: Final = 0.3  # share of crashes in which a forked child keeps the connections
MESSAGES: Final = (
    "call",
    "reply",
    "remote",
    "gradients",
    "gradients.abort",
    "context.release",
    "rref.fork",
    "rref.release",
)
# Messages with a number of their own, by which the receiver notices a copy. A reply has none, and
# copies of replies do not exist.
NUMBERED: Final = tuple(kind for kind in MESSAGES if kind != "reply")
REPLACED: Final = 0.15  # share of seeds that replace workers while threads compute gradients
SLEEPY: Final = 0.35  # share of seeds in which connections sleep as soon as nobody uses them
# Messages that the library repeats until they are answered: losing one must change nothing.
REPEATED: Final = ("context.release", "rref.fork", "rref.accept", "rref.release")


@dataclass(frozen=True)
class Plan:
    """Everything about a run that is decided before it."""

    seed: int
    names: list[str]
    options: Options
    wire: WireSettings
    profile: str
    faults: list[Fault]
    actors: int
    acts: int
    themes: list[str]  # what the actors do
    crowd: bool = False  # a large call is overtaken by thousands of small ones
    collections: list[float] = field(default_factory=list)  # when garbage is collected

    def with_faults(self, faults: list[Fault]) -> Plan:
        """Copy the plan with other faults, for shrinking; everything else happens as before."""
        return replace(self, faults=faults)


def make_plan(seed: int) -> Plan:
    """Draw everything about a run from its seed."""
    if random.Random(f"{seed} drains").random() < REPLACED:
        return _replaced_plan(seed)
    rng = random.Random(f"{seed} plan")
    names = [f"worker{i}" for i in range(rng.choice((2, 3, 3, 4, 5)))]
    profile = rng.choice(MIXED)
    options, wire = _options(rng), _wire_settings(rng)
    # On a slow wire a few round trips take seconds; calls would be late without any fault.
    if wire.latency > 0.001:
        options = replace(options, timeout=20.0)
    options = _with_sleep(seed, options)
    draw = random.Random(f"{seed} crowd")
    crowd = draw.random() < CROWDED
    if crowd:
        # All calls are under way at once, and have time to cross the narrowest wire.
        options = replace(options, max_inflight=8192, timeout=20.0)
        if draw.random() < 0.7:
            profile = "calm"  # without faults there is no excuse for a lost call
    return Plan(
        seed=seed,
        names=names,
        options=options,
        wire=wire,
        profile=profile,
        faults=_with_forks(seed, PROFILES[profile](rng, names)),
        actors=rng.randint(2, 5),
        acts=rng.randint(3, 8),
        themes=["gradients"] if profile == "backward" else rng.choice(THEMES),
        crowd=crowd,
        collections=sorted(rng.uniform(0.0, SPAN * 2) for _ in range(3)),
    )


def _replaced_plan(seed: int) -> Plan:
    """Draw a plan of the profile `replaced`, with programs to which it matters."""
    rng = random.Random(f"{seed} replaced plan")
    names = [f"worker{i}" for i in range(rng.choice((3, 3, 4)))]
    return Plan(
        seed=seed,
        names=names,
        options=Options(timeout=20.0, secret=None, lease=2.0),
        wire=WireSettings(*rng.choice(((0.0001, 0.0001), (0.0005, 0.001), (0.005, 0.03)))),
        profile="replaced",
        faults=PROFILES["replaced"](rng, names),
        actors=rng.randint(2, 4),
        acts=rng.randint(3, 6),
        themes=["drains"],
        collections=sorted(rng.uniform(0.0, SPAN * 2) for _ in range(3)),
    )


def _options(rng: random.Random) -> Options:
    # The default lease of 10 s would make every check at rest wait for it; some seeds use it.
    options = Options(timeout=rng.choice((3.0, 6.0, 20.0)), secret=None, lease=2.0)
    if rng.random() < 0.3:
        options = replace(options, max_inflight=rng.choice((1, 2, 8)))
    if rng.random() < 0.2:
        options = replace(options, lease=rng.choice((0.1, 10.0)))
    if rng.random() < 0.2:
        options = replace(options, threads=rng.choice((1, 2)))
    return options


def _with_sleep(seed: int, options: Options) -> Options:
    """Let connections sleep between two acts of some seeds, so that faults fall into that time."""
    rng = random.Random(f"{seed} sleep")
    if rng.random() >= SLEEPY:
        return options
    heartbeat = rng.choice((0.02, 0.05, 0.1))
    return replace(options, heartbeat=heartbeat, idle=heartbeat * rng.choice((1.0, 3.0, 8.0)))


def _wire_settings(rng: random.Random) -> WireSettings:
    latency, jitter = rng.choice(((0.0001, 0.0001), (0.0005, 0.001), (0.005, 0.03), (0.02, 0.2)))
    # A small window on a slow wire would take minutes for a large array.
    window = 4 << 20 if latency > 0.001 else rng.choice((4 << 10, 64 << 10, 1 << 20))
    return WireSettings(latency, jitter, window, rng.choice((0.0, 0.1, 0.3)))


def _with_forks(seed: int, faults: list[Fault]) -> list[Fault]:
    """Let some of the crashes leave a forked child, which keeps the connections open.

    No connection ends then, so only the parent of the process knows of its end at first.
    """
    rng = random.Random(f"{seed} forks")
    return [
        replace(fault, seconds=rng.choice((0.01, 0.1, 0.4)))
        if fault.kind == "crash" and rng.random() < FORKED
        else fault
        for fault in faults
    ]


# ── profiles ────────────────────────────────────────────────────────────────────────────────────


def _two(rng: random.Random, names: list[str]) -> tuple[str, str]:
    a, b = rng.sample(names, 2)
    return a, b


def _calm(rng: random.Random, names: list[str]) -> list[Fault]:
    return []


def _lazy(rng: random.Random, names: list[str]) -> list[Fault]:
    """No worker is lost, some are only paused or slow for a while."""
    faults = []
    for _ in range(rng.randint(1, 5)):
        at, name = rng.uniform(0.0, SPAN), rng.choice(names)
        if rng.random() < 0.6:
            faults.append(Fault(at, "pause", name, seconds=rng.uniform(0.01, 4.0)))
        else:
            seconds, cost = rng.uniform(0.1, 3.0), rng.choice((0.001, 0.01, 0.05))
            faults.append(Fault(at, "slow", name, seconds=seconds, amount=cost))
    for _ in range(rng.randint(0, 3)):
        a, b = _two(rng, names)
        seconds, amount = rng.uniform(0.1, 3.0), rng.uniform(0.01, 0.4)
        faults.append(Fault(rng.uniform(0.0, SPAN), "clog", a, b, seconds, amount))
    return faults


def _wire(rng: random.Random, names: list[str]) -> list[Fault]:
    """The wire fails, all processes live."""
    faults = []
    for _ in range(rng.randint(1, 4)):
        a, b = _two(rng, names)
        kind = rng.choice(("cut", "cut_one_way", "reset", "reset_after", "close", "refuse"))
        # Below the two seconds that must not be noticed, around `resume` and `silence`, and beyond.
        seconds = rng.choice((0.05, 1.0, 4.0, 7.0, 12.0))
        # Bytes until a reset: inside a handshake, inside a header, inside a large body.
        amount = float(rng.choice((1, 30, 300, 3000, 200_000)))
        at = rng.uniform(0.0, SPAN)
        if kind in ("cut", "cut_one_way"):
            faults.append(Fault(at, kind, a, b, seconds))
        elif kind == "refuse":
            faults.append(Fault(at, kind, a, "", seconds))
        else:
            faults.append(Fault(at, kind, a, b, 0.0, amount if kind == "reset_after" else 0.0))
    return faults


def _cuts(rng: random.Random, names: list[str]) -> list[Fault]:
    """Connections break again and again, at any byte."""
    faults = []
    for _ in range(rng.randint(4, 16)):
        a, b = _two(rng, names)
        kind = rng.choice(("reset_after", "reset_after", "reset_after", "reset", "close"))
        # Uniform in the exponent: as many resets within 10 bytes as between 1,000 and 10,000.
        amount = float(int(10 ** rng.uniform(0.0, 4.5))) if kind == "reset_after" else 0.0
        faults.append(Fault(rng.uniform(0.0, SPAN), kind, a, b, 0.0, amount))
    return faults


def _deaths(rng: random.Random, names: list[str]) -> list[Fault]:
    """Processes end, and some come back."""
    faults = []
    for name in rng.sample(names, rng.randint(1, max(1, len(names) // 2))):
        at = rng.uniform(0.0, SPAN)
        faults.append(Fault(at, rng.choice(("crash", "crash", "vanish")), name))
        # Some restarts come before others can know of the death, some after everything has ended.
        if rng.random() < 0.6:
            faults.append(Fault(at + rng.choice((0.01, 0.5, 3.0, 9.0)), "restart", name))
    return faults


def _timely(rng: random.Random, names: list[str]) -> list[Fault]:
    """A fault happens just when a certain message is sent."""
    faults = []
    for _ in range(rng.randint(1, 3)):
        a, b = _two(rng, names)
        kind = rng.choice(("crash", "vanish", "reset", "cut", "pause"))
        seconds = rng.uniform(0.5, 8.0) if kind == "cut" else rng.uniform(0.1, 4.0)
        nth, early = float(rng.randint(1, 6)), float(rng.randint(0, 1))
        pair = kind in ("reset", "cut")
        duration = seconds if kind in ("cut", "pause") else 0.0
        faults.append(
            Fault(nth, kind, a, b if pair else "", duration, early, on=rng.choice(MESSAGES))
        )
    return faults


def _backward(rng: random.Random, names: list[str]) -> list[Fault]:
    """A fault happens in the middle of a backward pass, with one of its messages."""
    faults = []
    for _ in range(rng.randint(1, 4)):
        a, b = _two(rng, names)
        kind = rng.choice(("crash", "vanish", "reset", "cut"))
        pair = kind in ("reset", "cut")
        seconds = rng.uniform(0.5, 8.0) if kind == "cut" else 0.0
        nth, early = float(rng.randint(1, 12)), float(rng.randint(0, 1))
        faults.append(Fault(nth, kind, a, b if pair else "", seconds, early, on="gradients"))
    return faults


def _mail(rng: random.Random, names: list[str]) -> list[Fault]:
    """Single messages are lost or doubled: those that the library repeats, or runs only once."""
    faults = []
    for _ in range(rng.randint(2, 12)):
        kind = rng.choice(("drop", "fail", "duplicate", "duplicate"))
        # A lost call is never repeated: dropping one would only test its timeout.
        message = rng.choice(NUMBERED if kind == "duplicate" else REPEATED)
        faults.append(Fault(float(rng.randint(1, 8)), kind, rng.choice(names), on=message))
    return faults


def _swizzle(rng: random.Random, names: list[str]) -> list[Fault]:
    """Clog one host after the other, and unclog them in another order: a "swizzle-clog"."""
    faults = []
    start = rng.uniform(0.0, 2.0)
    for index, name in enumerate(rng.sample(names, len(names))):
        seconds = rng.uniform(0.5, 4.0)
        for other in names:
            if other != name:
                at = start + index * 0.3
                faults.append(Fault(at, "clog", name, other, seconds, rng.uniform(0.05, 0.4)))
    return faults


def _everything(rng: random.Random, names: list[str]) -> list[Fault]:
    return [
        fault
        for profile in (_lazy, _wire, _cuts, _deaths, _timely, _mail)
        for fault in profile(rng, names)
        if rng.random() < 0.5
    ]


def _replaced(rng: random.Random, names: list[str]) -> list[Fault]:
    """Processes end, most of them come back under their name at once, while others compute."""
    faults = []
    for _ in range(rng.randint(2, 5)):
        kind, name = rng.choice(("replace", "replace", "crash")), rng.choice(names)
        if rng.random() < 0.3:
            nth, early = float(rng.randint(1, 12)), float(rng.randint(0, 1))
            faults.append(Fault(nth, kind, name, amount=early, on="gradients"))
            continue
        at = rng.uniform(0.0, SPAN)
        faults.append(Fault(at, kind, name))
        if kind == "crash" and rng.random() < 0.5:
            faults.append(Fault(at + rng.choice((0.01, 0.1, 1.0)), "restart", name))
    return faults


PROFILES: Final[dict[str, Callable[[random.Random, list[str]], list[Fault]]]] = {
    "calm": _calm,
    "lazy": _lazy,
    "wire": _wire,
    "cuts": _cuts,
    "deaths": _deaths,
    "timely": _timely,
    "swizzle": _swizzle,
    "mail": _mail,
    "backward": _backward,
    "everything": _everything,
    "replaced": _replaced,
}
# Profiles of which a plan draws one. Another entry would change the draw of every seed.
MIXED: Final = [name for name in PROFILES if name != "replaced"]
