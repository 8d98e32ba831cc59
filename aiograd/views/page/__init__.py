"""The page: a cluster in a browser, read-only and live.

    dashboard   `Dashboard`: serves the page while somebody looks, and writes reports
    source      where snapshots come from: a worker of this process, or a guest
    digest      a snapshot made small enough to be sent every second
    security    who may see the page: token, host name, headers
    report      the page with frozen data, as one file

`assets/` has the page itself: HTML, style and script without a build step, and htm with preact,
which is vendored with its licence and hash.
"""

from __future__ import annotations

from typing import Any

__all__ = ["load_dashboard"]


def load_dashboard() -> Any:
    """Return the class `Dashboard`; ImportError with what to install if that is missing."""
    try:
        from aiograd.views.page.dashboard import Dashboard
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ImportError("the page needs aiohttp: pip install 'aiograd[dashboard]'") from None
    return Dashboard
