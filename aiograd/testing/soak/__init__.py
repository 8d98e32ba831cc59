"""A soak: workers that call each other for a long time while one after the other is killed.

    python -m aiograd.testing.soak 900

Everything that comes back is compared with what this process computes itself: it is right, or it is
a typed error that a recent kill explains. Nothing ends late, memory does not grow, and when all is
quiet every counter of every worker is 0 again.

    run ─▶ actors, each doing one job after the other     jobs, functions
        ─▶ a killer                                        run
        ─▶ a look at memory now and then                   report
"""

from aiograd.testing.soak.report import Report
from aiograd.testing.soak.run import soak

__all__ = ["Report", "soak"]
