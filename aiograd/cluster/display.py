"""A cluster as a small HTML table, for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiograd._html import BLUE, GREEN, GREY, card, code, dot, table
from aiograd.rpc.directory import WorkerInfo

__all__ = ["as_html"]

COLOURS = {"running": GREEN, "starting": "#d9a21b", "dead": "#cc3d3d", "closed": GREY}


class Member(Protocol):
    """One worker of the cluster."""

    name: str
    rank: int

    @property
    def info(self) -> WorkerInfo:
        """The worker as other members see it."""


class Shown(Protocol):
    """What is shown of a cluster."""

    @property
    def workers(self) -> Sequence[Member]:
        """Its workers, in order of rank."""

    def state(self, name: str) -> str:
        """Give the state of a worker."""

    def pid(self, name: str) -> int | None:
        """Give the process id of a worker."""


def as_html(cluster: Shown, here: str) -> str:
    """Give a cluster as a small HTML table; `here` is the name of this host."""
    workers = cluster.workers
    elsewhere = any(worker.info.host not in ("", here) for worker in workers)
    titles: tuple[str, ...] = ("worker", "rank", "state", "process")
    if elsewhere:
        titles = ("worker", "rank", "state", "host", "process")
    rows = [_row(cluster, worker, elsewhere) for worker in workers]
    title = f"<b>{type(cluster).__name__}</b> · {len(workers)} worker{'s' * (len(workers) != 1)}"
    return card(BLUE, title, table(rows, titles) if rows else "")


def _row(cluster: Shown, worker: Member, elsewhere: bool) -> tuple[str, ...]:
    state, pid = cluster.state(worker.name), cluster.pid(worker.name)
    host = (code(worker.info.host),) if elsewhere else ()
    return (
        code(worker.name),
        str(worker.rank),
        f"{dot(COLOURS[state])} {state}",
        *host,
        str(pid) if pid is not None else "this one",
    )
