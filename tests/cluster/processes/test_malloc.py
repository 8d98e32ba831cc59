"""Arrays that come and go find the memory of the last one, in our processes and in the user's."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from aiograd.cluster.processes import malloc

COUNT = """
import resource
import runpy
import numpy as np
# The module alone: the rest of the package, compiled on import, may leave free memory behind that
# is large enough for the arrays.
module = runpy.run_path({path!r})
free_one_large_array, keep_freed_memory = (
    module[name] for name in ("free_one_large_array", "keep_freed_memory")
)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        np.ones(65_536, np.float32) + 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{first}
faults()
print(faults())
"""


def _faults(first: str) -> int:
    """Page faults of 200 sums of a quarter of a megabyte each, in a fresh process."""
    script = [sys.executable, "-c", COUNT.format(first=first, path=malloc.__file__)]
    return int(subprocess.run(script, capture_output=True, check=True, text=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize("first", ["free_one_large_array()", "keep_freed_memory()"])
def test_arrays_that_come_and_go_fault_no_pages(first):
    assert _faults(first) < 200
    if (without := _faults("")) < 200:
        pytest.skip("this C library keeps freed memory by itself")
    assert without > 5_000


@pytest.mark.parametrize(
    ("before", "after"), [("", "20000"), ("gc.set_threshold(5); ", "5")], ids=["default", "own"]
)
def test_the_collector_of_our_processes_runs_less_often_unless_the_user_has_set_it(before, after):
    script = (
        f"import gc, runpy; {before}"
        f"runpy.run_path({malloc.__file__!r})['collect_less_often']();"
        "print(gc.get_threshold()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == after
