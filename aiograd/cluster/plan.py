"""What a worker is going to be, decided before anything is opened.

A `Plan` is made from arguments and the environment (`plan_worker`), or by a `LocalCluster`, which
knows everything itself. `worker.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiograd.cluster.environment import read_launch
from aiograd.cluster.rendezvous import Place, parse_place
from aiograd.errors import RpcError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.network import Network
from aiograd.wire.names import check_name

# Seconds to wait for the others at the start. Not `Options.timeout`: that one is for calls.
PATIENCE = 60.0
DRIVER = "driver"  # the name of the process that starts a local cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything a worker needs to know to start."""

    name: str
    rank: int | None  # None: the coordinator gives one
    world_size: int | None = None  # None: an open cluster
    options: Options = field(default_factory=Options)
    place: Place | None = None  # where to meet; None: alone, or the coordinator is known already
    coordinator: PeerInfo | None = None  # given by a LocalCluster
    network: Network | None = None  # one that several workers share
    listen: tuple[str, ...] = ()  # where to listen, if that is decided
    # If it is known already; never in `options`, which are shown.
    secret: bytes | None = field(default=None, repr=False)
    spin: float = 0.0
    crowded: bool = False  # there are more workers here than cores
    modules: tuple[str, ...] = ()  # to import first: they expose functions
    patience: float = PATIENCE
    watch: bool = True  # whether to tell who blocks the loop

    @property
    def leads(self) -> bool:
        """Whether this worker is the coordinator."""
        return self.coordinator is None and (self.place is None or self.rank == 0)


def plan_worker(
    name: str | None,
    rank: int | None,
    world_size: int | None,
    rendezvous: str | None,
    options: Options | None,
    environment: Mapping[str, str],
) -> Plan:
    """Put arguments and environment together, and check them."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
    options = options or Options()
    launch = read_launch(environment)
    rank = _count("rank", launch.rank if rank is None else rank)
    world_size = _count("world_size", launch.world_size if world_size is None else world_size)
    rendezvous = launch.rendezvous if rendezvous is None else rendezvous
    name = launch.name if name is None else name
    if name is None and rank is not None:
        name = f"worker{rank}"
    check_name(name)
    assert name is not None
    if world_size is not None and not 0 <= (rank or 0) < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    if options.secret is None and options.secret_file is None and launch.secret_file:
        options = replace(options, secret_file=launch.secret_file)
    if rendezvous is None:
        if (world_size or 1) > 1 or rank:
            raise ValueError(
                "a world of several workers needs a rendezvous: pass rendezvous= "
                '("host:port", "unix:path" or "file:path") or set AIOGRAD_RENDEZVOUS'
            )
        return Plan(name=name, rank=0, world_size=1, options=options)
    if rank is None:
        raise ValueError(
            f"{name!r} has a rendezvous but no rank: pass rank=, "
            "or set AIOGRAD_RANK (or RANK, as torchrun does)"
        )
    place = parse_place(rendezvous)
    return Plan(name=name, rank=rank, world_size=world_size, options=options, place=place)


def _count(what: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} should be an int, not {type(value).__name__}")
    if value < (least := 1 if what == "world_size" else 0):
        raise ValueError(f"{what} should be {least} or more, not {value}")
    return value


def worker_names(n_workers: int, names: Sequence[str] | None) -> list[str]:
    """Name the workers of a local cluster: as asked, or by number."""
    check_count(n_workers)
    if names is None:
        return [f"worker{n}" for n in range(n_workers)]
    if isinstance(names, str) or len(names) != n_workers:
        raise ValueError(f"names should be {n_workers} names, not {names!r}")
    for name in names:
        check_name(name)
    if len({name.lower() for name in (*names, DRIVER)}) <= n_workers:
        raise RpcError(
            f'worker names must differ in more than case, and "{DRIVER}" is taken: {list(names)}'
        )
    return list(names)


def check_count(n: int) -> None:
    """Refuse what is no number of workers."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"the number of workers should be an int, not {type(n).__name__}")
    if n < 0:
        raise ValueError(f"the number of workers should be 0 or more, not {n}")
