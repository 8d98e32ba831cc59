"""Ask pyright how much of the public interface has types, and fail below a bound."""

from __future__ import annotations

import re
import subprocess
import sys

BOUND = 95.0  # percent

command = [sys.executable, "-m", "pyright", "--verifytypes", "aiograd", "--ignoreexternal"]
report = subprocess.run(command, capture_output=True, text=True).stdout
found = re.search(r"Type completeness score: ([\d.]+)%", report)
score = float(found.group(1)) if found else 0.0
if score < BOUND:
    # One attribute without a type makes the type of everything that holds its class unknown, so
    # these few are the cause of the rest.
    roots = "\n".join(sorted({line for line in report.splitlines() if "missing type anno" in line}))
    sys.exit(f"{roots}\n{score} % of the public interface has types; {BOUND} % is the bound")
