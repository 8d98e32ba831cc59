"""What a worker is going to be, decided before anything is opened.

A `Plan` is made from arguments and the environment (`plan_worker`), or by a `LocalCluster`, which
knows everything itself. `worker.py` carries it out.

The launch contract: who am I, and where do we meet, as a pure function of environment variables.

`aiograd run`, torchrun, Slurm, Open MPI, PMI (MPICH, Intel MPI) and Kubernetes indexed jobs all
tell a process its rank in their own words. This module reads them; it opens and starts nothing.

    our own AIOGRAD_* variables come first, one by one;
    the first launcher that names a rank fills in the rest.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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


Environment = Mapping[str, str]

DEFAULT_PORT = 29500  # what torchrun and its users expect


@dataclass(frozen=True, slots=True)
class Launch:
    """What the environment says about this process; None where it says nothing."""

    name: str | None = None
    rank: int | None = None
    world_size: int | None = None
    rendezvous: str | None = None
    secret_file: str | None = None
    launcher: str | None = None  # the row of the table that gave the rank


def read_launch(environment: Environment) -> Launch:
    """Read the launch contract from `environment`, usually `os.environ`."""
    given = Launch(
        name=environment.get("AIOGRAD_NAME") or None,
        rank=_number(environment, "AIOGRAD_RANK"),
        world_size=_number(environment, "AIOGRAD_WORLD_SIZE"),
        rendezvous=environment.get("AIOGRAD_RENDEZVOUS") or None,
        secret_file=environment.get("AIOGRAD_SECRET_FILE") or None,
        launcher="aiograd" if environment.get("AIOGRAD_RANK") else None,
    )
    if given.rank is not None:
        # `aiograd run` said who we are; a launcher around it speaks of its own processes, not ours.
        return given
    for launcher in LAUNCHERS:
        rank = _number(environment, launcher.rank)
        if rank is None:
            continue
        sizes = (_number(environment, name) for name in launcher.world_size)
        size = next((size for size in sizes if size is not None), None)
        return Launch(
            name=given.name,
            rank=rank,
            world_size=size if given.world_size is None else given.world_size,
            rendezvous=given.rendezvous or _master(environment) or launcher.meet(environment),
            secret_file=given.secret_file,
            launcher=launcher.name,
        )
    return given


# ── launchers ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Launcher:
    """How one launcher says rank and size, and where its rank 0 can be met."""

    name: str
    rank: str
    meet: Callable[[Environment], str | None]
    world_size: tuple[str, ...]  # the first one that is set counts


def _master(environment: Environment) -> str | None:
    host = environment.get("MASTER_ADDR")
    if not host:
        return None
    return _address(host, environment.get("MASTER_PORT") or DEFAULT_PORT)


def _meet_slurm(environment: Environment) -> str | None:
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST")
    hosts = hosts or environment.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    job = environment.get("SLURM_JOB_ID", "0") + "." + environment.get("SLURM_STEP_ID", "0")
    return _address(next(expand_hosts(hosts)), _port_of(job))


def _meet_open_mpi(environment: Environment) -> str | None:
    # Open MPI does not tell the other hosts' names; on one host we need none.
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environment.get("OMPI_COMM_WORLD_SIZE"):
        return None
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    return _address("127.0.0.1", _port_of(job)) if job else None


def _meet_kubernetes(environment: Environment) -> str | None:
    # The pods of an indexed job are called <job>-<index>, and found through a headless service.
    own, index = environment.get("HOSTNAME", ""), environment["JOB_COMPLETION_INDEX"]
    if not own.endswith(f"-{index}"):
        return None
    first = own.removesuffix(index) + "0"
    service = environment.get("AIOGRAD_SERVICE")
    return _address(f"{first}.{service}" if service else first, DEFAULT_PORT)


def _nowhere(environment: Environment) -> str | None:
    return None


# fmt: off
LAUNCHERS = (
    #        name          rank                    where             world size
    Launcher("torchrun",   "RANK",                 _nowhere,         ("WORLD_SIZE",)),
    Launcher("slurm",      "SLURM_PROCID",         _meet_slurm,      ("SLURM_STEP_NUM_TASKS",
                                                                      "SLURM_NTASKS")),
    Launcher("open-mpi",   "OMPI_COMM_WORLD_RANK", _meet_open_mpi,   ("OMPI_COMM_WORLD_SIZE",)),
    Launcher("pmi",        "PMI_RANK",             _nowhere,         ("PMI_SIZE",)),
    Launcher("kubernetes", "JOB_COMPLETION_INDEX", _meet_kubernetes, ()),
)
# fmt: on


# ── words ───────────────────────────────────────────────────────────────────────────────────────


def _number(environment: Environment, name: str) -> int | None:
    text = environment.get(name)
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} should be a number of 0 or more, not {text!r}")
    return number


def _address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _port_of(job: str) -> int:
    """Give each job a port of its own, the same one in all its processes.

    Two jobs on one host should not meet each other, and the kernel gives out none below 32768.
    """
    return 20000 + zlib.crc32(job.encode()) % 10000


_HOST = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> Iterator[str]:
    """Expand Slurm's short form lazily: `gpu[01-03,7]-ib,login` is gpu01-ib … gpu7-ib, login."""
    for host in _HOST.findall(text.replace(" ", "")):
        yield from _expand([(match[1], match[2]) for match in _PIECE.finditer(host)])


def _expand(pieces: list[tuple[str | None, str | None]]) -> Iterator[str]:
    if not pieces:
        yield ""
        return
    (ranges, plain), rest = pieces[0], pieces[1:]
    for head in [plain or ""] if ranges is None else _numbers(ranges):
        for tail in _expand(rest):
            yield head + tail


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"cannot read the host range [{ranges}]")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}d}"  # as many leading zeros as the first one has
