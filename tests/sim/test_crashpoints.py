"""Small programs with one fault at one of their boundaries; `make crashpoints` runs all cases.

AIOGRAD_CRASHPOINTS=20000 runs more of them here.
"""

from __future__ import annotations

import os

import pytest

from aiograd.testing.simulator.crashpoints.cases import (
    describe,
    run_portion,
    sample,
)
from aiograd.testing.simulator.crashpoints.programs import PROGRAMS

CASES = int(os.environ.get("AIOGRAD_CRASHPOINTS", "600"))
SHAPES = list(dict.fromkeys(name.partition("/")[0] for name in PROGRAMS))


@pytest.mark.parametrize("shape", SHAPES)
def test_workers_agree_on_every_outcome_wherever_a_fault_falls(shape: str) -> None:
    programs = [name for name in PROGRAMS if name.startswith(f"{shape}/")]
    for portion in sample(CASES, 0, programs):
        tally = run_portion(portion)
        assert tally.points > 0
        assert not tally.failed, "\n".join(map(describe, tally.failed[:5]))
