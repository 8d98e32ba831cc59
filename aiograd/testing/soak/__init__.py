"""A soak: real workers call each other for a long time, while one after the other is killed.

    python -m aiograd.testing.soak 900

Every result is compared with what this process computes itself: it is right, or it is a typed error
that a recent kill explains. No call ends late, memory does not grow, and at rest every counter of
every worker is 0 again.

    jobs       what actors do, the functions they call, and how each answer is checked
    run        actors, killer, memory and the report; imports `jobs`
"""

from aiograd.testing.soak.run import Report, soak

__all__ = ["Report", "soak"]
