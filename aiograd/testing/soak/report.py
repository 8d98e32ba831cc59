"""What a soak has seen, and whether that is good enough."""

from __future__ import annotations

import ctypes
import os
import statistics
from collections import Counter
from dataclasses import dataclass, field

LATE = 4 * 0.25  # seconds past a deadline: four times what is promised, for a busy machine
DRIFT = 0.05  # by how much memory may have grown at the end
SETTLED = 300.0  # seconds; in a shorter run memory is still finding its level


def held() -> int:
    """Bytes of memory that this process uses, without what glibc keeps for the next arrays; or 0.

    How much that is depends on the order in which arrays came and went, and changes all the time.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # another system
        return 0


@dataclass
class Report:
    """The figures of one soak."""

    seconds: float
    workers: int
    seed: int
    jobs: Counter[str] = field(default_factory=Counter)
    calls: int = 0  # made by this process; workers make more of their own
    kills: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # typed, and explained by a kill
    unexplained: Counter[str] = field(default_factory=Counter)  # nobody was killed at that time
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    starved: float = 0.0  # seconds in which the machine had no core for us; nobody is late in them
    memory: dict[str, list[int]] = field(default_factory=dict)  # of those that were never killed
    left: dict[str, dict[str, int]] = field(default_factory=dict)  # counters that are not 0
    resting: float = 0.0  # seconds until all counters were 0
    closing: float = 0.0  # seconds until all processes had ended

    def drift(self, name: str) -> float:
        """How much more memory at the end than after the warm-up, as a fraction."""
        samples = [each for each in self.memory[name] if each]
        if len(samples) < 10:
            return 0.0
        fifth = len(samples) // 5
        before, after = samples[fifth : 2 * fifth], samples[-fifth:]
        return statistics.median(after) / statistics.median(before) - 1.0

    def faults(self) -> list[str]:
        """Everything that breaks a promise; empty when all is well."""
        found = [f"wrong: {each}" for each in self.wrong]
        found += [f"late: {each}" for each in self.late]
        found += [
            f"{count} × {kind}, but nobody was killed" for kind, count in self.unexplained.items()
        ]
        found += [f"{name} is not at rest: {counters}" for name, counters in self.left.items()]
        if self.seconds >= SETTLED:
            found += [
                f"{name} has grown by {self.drift(name):.1%}"
                for name in self.memory
                if self.drift(name) > DRIFT
            ]
        return found

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {count:,}" for name, count in counts.most_common()) or "none"

        def megabytes(name: str) -> str:
            samples = self.memory[name]
            steps = [samples[(len(samples) - 1) * tenth // 10] for tenth in range(11)]
            levels = " ".join(f"{step / 2**20:.0f}" for step in steps)
            return f"{name} {levels} MiB ({self.drift(name):+.1%} after warm-up)"

        lines = {
            "soak": f"{self.seconds:g} s, {self.workers} workers, seed {self.seed}",
            "calls": f"{self.calls:,} ({self.calls / self.seconds:,.0f} per second)",
            "jobs": listed(self.jobs),
            "kills": f"{self.kills}",
            "errors": f"{listed(self.errors)}; without a kill: {listed(self.unexplained)}",
            "wrong": f"{len(self.wrong)}",
            "late": f"{len(self.late)} (without {self.starved:.1f} s in which there was no core)",
            "memory": "; ".join(map(megabytes, self.memory)),
            "at rest": f"after {self.resting:.1f} s" if not self.left else f"never: {self.left}",
            "closed": f"in {self.closing:.1f} s",
        }
        text = "\n".join(f"{name:<9}{value}" for name, value in lines.items())
        faults = self.faults()
        return text + "\n" + ("\n".join(f"FAULT    {each}" for each in faults[:20]) or "all well")
