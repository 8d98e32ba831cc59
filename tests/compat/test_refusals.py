"""What the drop-in does not support says so when it is used: `programs/refusals.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REFUSALS = Path(__file__).parent / "programs" / "refusals.py"


def test_what_is_not_supported_is_refused_in_one_sentence() -> None:
    command = ("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(REFUSALS))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count(".") >= REFUSALS.read_text().count("def test_")
