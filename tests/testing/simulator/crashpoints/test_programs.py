"""Programs of crash points: every shape in every variant."""

from __future__ import annotations

from collections import Counter

from aiograd.testing.simulator.crashpoints.programs import PROGRAMS


def test_there_are_two_hundred_programs_of_every_kind() -> None:
    shapes = {name.partition("/")[0] for name in PROGRAMS}
    assert len(PROGRAMS) >= 200
    variants = Counter(name.partition("/")[2] for name in PROGRAMS)
    assert set(variants.values()) == {len(shapes)}
    assert {"once", "twice", "create", "second", "waste", "heavy-first", "rref"} <= set(variants)
    assert {"chain3", "fan2", "diamond", "selfa", "shared"} <= shapes
