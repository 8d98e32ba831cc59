"""The configuration of a worker: arguments and the launcher's environment become a `WorkerPlan`.

Nothing is opened or started here; `worker.py` carries a plan out. A `LocalCluster` makes its plans
itself, because it knows names, ranks and addresses.

    arguments ──────────────┐
    AIOGRAD_* variables ────┼──▶ plan_worker ──▶ WorkerPlan
    a launcher's variables ─┘    (first one that says something counts)

`aiograd run`, torchrun, Slurm, Open MPI, PMI (MPICH, Intel MPI) and Kubernetes indexed jobs each
name the rank of a process in variables of their own; `LAUNCHERS` lists them. The first launcher
that names a rank fills in what our own variables leave open.
"""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiograd.cluster.joining.invitation import Invitation
from aiograd.cluster.joining.rendezvous import Rendezvous, parse_rendezvous
from aiograd.errors import DuplicateName
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options, check_timeout
from aiograd.rpc.transport.network import Network
from aiograd.rpc.transport.tls import TLS
from aiograd.wire.names import appearance, check_name, check_rank

__all__ = [
    "DRIVER",
    "JOIN_TIMEOUT",
    "THREAD_VARIABLES",
    "Launch",
    "WorkerPlan",
    "check_count",
    "check_labels",
    "expand_hosts",
    "plan_join",
    "plan_worker",
    "read_launch",
    "worker_names",
]

# Seconds until all workers have joined. Not `Options.timeout`, which is for calls: a job of many
# hosts may take long to start, however fast its calls are.
JOIN_TIMEOUT = 60.0
# Array libraries read these when they are loaded: on how many threads they compute.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
DRIVER = "driver"  # the name of the process that starts a local cluster
MAX_LABELS = 64  # of one worker
MAX_LABEL = 1000  # characters of one label
DEFAULT_PORT = 29500  # torchrun's default, which its users expect

Environment = Mapping[str, str]


# ── the plan ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """Everything a worker needs to know to start; it travels to worker processes by pickle."""

    name: str  # "": the coordinator assigns one
    rank: int | None  # None: the coordinator assigns one
    world_size: int | None = None  # None: an open cluster
    options: Options = field(default_factory=Options)
    rendezvous: Rendezvous | None = None  # None: alone, or `coordinator` is known
    invitation: Invitation | None = None  # given by a member, instead of a rendezvous
    coordinator: PeerInfo | None = None  # given by a LocalCluster
    # What an engine calls this process, for the coordinator to give it the name it had before.
    key: str = ""
    labels: tuple[str, ...] = ()  # "key=value", for people and for `cluster.where`
    network: Network | None = None  # in-process, shared by several workers; None: the host's
    listen: tuple[str, ...] = ()  # addresses to listen at; empty: chosen by `bootstrap.py`
    # A secret that is known already. Not in `options`: their repr is shown to users.
    secret: bytes | None = field(default=None, repr=False)
    spin: float = 0.0  # seconds that the loop polls after traffic
    crowded: bool = False  # more workers than cores on this host
    threads: int = 0  # for array libraries to compute on; 0: what the environment says
    modules: tuple[str, ...] = ()  # to import before joining: they expose functions
    join_timeout: float = JOIN_TIMEOUT
    watch: bool = True  # whether to run a watchdog that reports what blocks the loop
    background: bool = False  # a process for this worker alone: it may sleep while nobody calls it

    @property
    def leads(self) -> bool:
        """Tell whether this worker is the coordinator."""
        if self.coordinator is not None or self.invitation is not None:
            return False
        return self.rendezvous is None or self.rank == 0


def plan_worker(
    name: str | None,
    rank: int | None,
    world_size: int | None,
    rendezvous: str | None,
    options: Options | None,
    environment: Mapping[str, str],
) -> WorkerPlan:
    """Merge arguments and environment into a plan; ValueError or TypeError if they do not fit."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
    options = options or Options()
    launch = read_launch(environment)
    in_pod = launch.launcher == "kubernetes" and rank is None
    if rendezvous is not None and rank is not None and rank != launch.rank:
        # Another place than the launcher has for this process, as for one that joins late from
        # inside a job of Slurm: the size of the launcher's world is not that of this cluster.
        launch = replace(launch, world_size=None)
    rank = _count("rank", launch.rank if rank is None else rank)
    world_size = _count("world_size", launch.world_size if world_size is None else world_size)
    rendezvous = launch.rendezvous if rendezvous is None else rendezvous
    name = launch.name if name is None else name
    if name is None and rank is not None:
        name = f"worker{rank}"  # as `aiograd run` and LocalCluster name them
    check_name(name)
    assert name is not None
    if in_pod and world_size is None:
        # Not an open cluster: rank 0 would begin its work before the others are there.
        raise ValueError(
            "a Job of Kubernetes does not tell its pods how many they are: set AIOGRAD_WORLD_SIZE "
            "to its spec.completions, or pass world_size="
        )
    # Here, not at the rendezvous: such a rank would end the start of all others.
    if world_size is not None and not 0 <= (rank or 0) < world_size:
        raise ValueError(f"rank {rank} is not in a world of {world_size}")
    # Options come first, as all arguments do.
    if options.secret is None and options.secret_file is None and launch.secret_file:
        options = replace(options, secret_file=launch.secret_file)
    if rendezvous is None:
        if (world_size or 1) > 1 and in_pod:
            raise ValueError(
                "this pod has no name that others could dial: give the pods a subdomain and a "
                "headless Service of that name, or pass rendezvous="
            )
        if (world_size or 1) > 1 or rank:
            raise ValueError(
                "a world of several workers needs a rendezvous: pass rendezvous= "
                '("host:port", "unix:path" or "file:path") or set AIOGRAD_RENDEZVOUS'
            )
        return WorkerPlan(name=name, rank=0, world_size=1, options=options)
    # Only `aiograd worker` lets the coordinator assign a rank. Here a missing one is more likely a
    # mistake of the launch.
    if rank is None:
        raise ValueError(
            f"{name!r} has a rendezvous but no rank: pass rank=, "
            "or set AIOGRAD_RANK (or RANK, as torchrun does)"
        )
    meeting = parse_rendezvous(rendezvous)
    if meeting.kind == "file" and rank == 0 and (launch.hosts or 1) > 1 and not options.listen:
        # Others of this job are elsewhere, whatever kind of file system the folder is on.
        options = replace(options, listen="0.0.0.0:0")
    return WorkerPlan(
        name=name, rank=rank, world_size=world_size, options=options, rendezvous=meeting
    )


def plan_join(
    where: Invitation | str,
    name: str | None,
    labels: Mapping[str, str] | None,
    options: Options | None,
    patience: float,
    environment: Mapping[str, str],
) -> WorkerPlan:
    """Make the plan of a worker that enters a running open cluster; see `ag.join`."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
    options = options or Options()
    if not isinstance(where, Invitation | str):
        raise TypeError(
            f'where should be an ag.Invitation, "host:port" or "file:path", not '
            f"{type(where).__name__}"
        )
    if name is not None:
        check_name(name)
    elif isinstance(options.tls, TLS):
        raise ValueError("a worker with a certificate needs the name that is in it: give name=")
    invitation = where if isinstance(where, Invitation) else None
    if invitation is None and options.secret is None and options.secret_file is None:
        # That of `aiograd run` is the secret of another world, which this process is a rank of.
        file = environment.get("AIOGRAD_SECRET_FILE")
        if file and not environment.get("AIOGRAD_RANK"):
            options = replace(options, secret_file=file)
    return WorkerPlan(
        name=name or "",
        rank=None,
        options=options,
        invitation=invitation,
        rendezvous=parse_rendezvous(where) if isinstance(where, str) else None,
        labels=check_labels(labels or {}),
        join_timeout=check_timeout(patience),
    )


def check_labels(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return labels as "key=value"; TypeError or ValueError if they cannot be written so."""
    if not isinstance(labels, Mapping):
        raise TypeError(f"labels are a mapping of texts, not {type(labels).__name__}")
    if len(labels) > MAX_LABELS:
        raise ValueError(f"a worker has at most {MAX_LABELS} labels, not {len(labels)}")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"labels are texts, not {key!r}: {value!r}")
        if not key or "=" in key or len(key) + len(value) > MAX_LABEL:
            raise ValueError(f"{key[:80]!r} is no label: it has no =, and {MAX_LABEL} characters")
    return tuple(f"{key}={value}" for key, value in labels.items())


def _count(what: str, value: Any) -> int | None:
    """Check a number that a user has given; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):  # True would pass as rank 1
        raise TypeError(f"{what} should be an int, not {type(value).__name__}")
    if value < (least := 1 if what == "world_size" else 0):
        raise ValueError(f"{what} should be {least} or more, not {value}")
    check_rank(value - least)  # the highest rank of a world is one less than its size
    return value


def worker_names(n_workers: int, names: Sequence[str] | None) -> list[str]:
    """Name the workers of a local cluster: as given, or by number; DuplicateName if they clash."""
    check_count(n_workers)
    if names is None:
        return [f"worker{n}" for n in range(n_workers)]
    if isinstance(names, str) or len(names) != n_workers:
        raise ValueError(f"names should be {n_workers} names, not {names!r}")
    for name in names:
        check_name(name)
    # Modes and secrets are looked up by exact name; names that look alike invite mistakes.
    forms = [appearance(name) for name in (*names, DRIVER)]
    if any(len(set(form)) <= n_workers for form in zip(*forms, strict=True)):
        raise DuplicateName(
            f"worker names must differ in more than case and characters that look alike, and "
            f'"{DRIVER}" is taken: {list(names)}'
        )
    return list(names)


def check_count(n: int) -> None:
    """Raise TypeError or ValueError for an invalid number of workers."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"the number of workers should be an int, not {type(n).__name__}")
    if n < 0:
        raise ValueError(f"the number of workers should be 0 or more, not {n}")


# ── the environment ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Launch:
    """What the environment says about this process; None for what it does not say."""

    name: str | None = None
    rank: int | None = None
    world_size: int | None = None
    rendezvous: str | None = None
    secret_file: str | None = None
    launcher: str | None = None  # the entry of `LAUNCHERS` that gave the rank
    hosts: int | None = None  # on which the launcher has started processes


def read_launch(environment: Environment, own_name: Callable[[], str] = socket.getfqdn) -> Launch:
    """Read rank, size and rendezvous from `environment`, usually `os.environ`.

    `own_name` gives the name of this host with its domain; only Kubernetes is asked. ValueError if
    a variable that should be a number is none.
    """
    given = Launch(
        name=environment.get("AIOGRAD_NAME") or None,
        rank=_number(environment, "AIOGRAD_RANK"),
        world_size=_number(environment, "AIOGRAD_WORLD_SIZE"),
        rendezvous=environment.get("AIOGRAD_RENDEZVOUS") or None,
        secret_file=environment.get("AIOGRAD_SECRET_FILE") or None,
        launcher="aiograd" if environment.get("AIOGRAD_RANK") else None,
    )
    if given.rank is not None:
        # `aiograd run` inside a job of Slurm, say: the variables of Slurm then describe the process
        # of `aiograd run`, not the ranks that it started.
        return given
    for launcher in LAUNCHERS:
        rank = _number(environment, launcher.rank)
        if rank is None or (launcher.name == "slurm" and _is_batch_script(environment)):
            continue
        # A launcher may count its tasks in several variables; a step's own count comes first.
        sizes = (_number(environment, name) for name in launcher.world_size)
        size = next((size for size in sizes if size is not None), None)
        return Launch(
            name=given.name,
            rank=rank,
            world_size=size if given.world_size is None else given.world_size,
            rendezvous=given.rendezvous
            or _master(environment)
            or launcher.address(environment, own_name),
            secret_file=given.secret_file,
            launcher=launcher.name,
            hosts=_slurm_hosts(environment) if launcher.name == "slurm" else None,
        )
    return given


# ── launchers ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables of one launcher, and how the address of its rank 0 follows from them."""

    name: str
    rank: str
    address: Callable[[Environment, Callable[[], str]], str | None]
    world_size: tuple[str, ...]  # the first one that is set counts


def _master(environment: Environment) -> str | None:
    host = environment.get("MASTER_ADDR")
    if not host:
        return None
    return _address(host, environment.get("MASTER_PORT") or DEFAULT_PORT)


def _slurm_address(environment: Environment, own_name: Callable[[], str]) -> str | None:
    # The step first: `srun` inside a job may use some of its hosts, and counts ranks of its own.
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST")
    hosts = hosts or environment.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    job = environment.get("SLURM_JOB_ID", "0") + "." + environment.get("SLURM_STEP_ID", "0")
    return _address(next(expand_hosts(hosts)), _port_of(job))


def _is_batch_script(environment: Environment) -> bool:
    """Whether this is the script of `sbatch` itself, and not a task that `srun` has started.

    Slurm calls it process 0 of all tasks of the job, but it is alone.
    """
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID")
    return environment.get("ENVIRONMENT") == "BATCH" and not step


def _slurm_hosts(environment: Environment) -> int | None:
    names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    counts = (_number(environment, name) for name in names)
    return next((count for count in counts if count is not None), None)


def _slurm_job_address(environment: Environment, own_name: Callable[[], str]) -> str | None:
    """Return where rank 0 of an `mpirun` inside a job of Slurm is: on its first host."""
    hosts = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not hosts:
        return None
    # Not by the step: those on the first host are in none, others in that of `mpirun`'s daemons.
    return _address(next(expand_hosts(hosts)), _port_of(environment.get("SLURM_JOB_ID", "0")))


def _open_mpi_address(environment: Environment, own_name: Callable[[], str]) -> str | None:
    # Open MPI has no variable with the names of the other hosts; on one host none is needed.
    if environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environment.get("OMPI_COMM_WORLD_SIZE"):
        return _slurm_job_address(environment, own_name)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    return _address("127.0.0.1", _port_of(job)) if job else None


def _kubernetes_address(environment: Environment, own_name: Callable[[], str]) -> str | None:
    # The pods of an indexed job are named <job>-<index>, and resolved by a headless service: it is
    # the domain of each pod, so each knows it by its own full name.
    index = environment["JOB_COMPLETION_INDEX"]
    own, _, domain = environment.get("HOSTNAME", "").partition(".")
    if not own.endswith(f"-{index}"):
        return None
    domain = environment.get("AIOGRAD_SERVICE") or domain
    if not domain:
        name, _, found = own_name().partition(".")
        domain = found if name == own else ""
    first = own.removesuffix(index) + "0"
    return _address(f"{first}.{domain}", DEFAULT_PORT) if domain else None


def _no_address(environment: Environment, own_name: Callable[[], str]) -> str | None:
    return None


# fmt: off
# In this order: torchrun and `mpirun` are often started inside a job of Slurm or Kubernetes, and
# the innermost launcher knows the ranks of its processes.
LAUNCHERS = (
    #        name          rank                    rank 0 is at         world size
    Launcher("torchrun",   "RANK",                 _no_address,         ("WORLD_SIZE",)),
    Launcher("open-mpi",   "OMPI_COMM_WORLD_RANK", _open_mpi_address,   ("OMPI_COMM_WORLD_SIZE",)),
    Launcher("pmi",        "PMI_RANK",             _slurm_job_address,  ("PMI_SIZE",)),
    Launcher("slurm",      "SLURM_PROCID",         _slurm_address,      ("SLURM_STEP_NUM_TASKS",
                                                                         "SLURM_NTASKS")),
    Launcher("kubernetes", "JOB_COMPLETION_INDEX", _kubernetes_address, ()),
)
# fmt: on


# ── parsing ─────────────────────────────────────────────────────────────────────────────────────


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
    """Derive a port from a job's id: the same in all its processes, another for another job.

    Two jobs on one host must not share a port.
    """
    # Linux gives out ephemeral ports from 32768 up, so none of these is taken by chance.
    return 20000 + zlib.crc32(job.encode()) % 10000


_HOST = re.compile(r"(?:[^,\[\]]+|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> Iterator[str]:
    """Expand Slurm's host list lazily: `gpu[01-03,7]-ib,login` is gpu01-ib … gpu7-ib, login.

    Lazily, because only the first host is needed, and a range may be long.
    """
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
