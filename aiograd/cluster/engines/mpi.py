"""`from_mpi`: every rank of an MPI communicator becomes a worker.

    rank r > 0                          rank 0
    hello: host ───────── isend ──────▶ irecv from every rank
                                        listens; beyond its host if a rank is elsewhere
    irecv ◀──────────── isend ───────── invitation, or why there is none
    joins rank 0 directly

MPI carries these two messages and nothing else afterwards. They are sent from rank to rank, not by
a broadcast: so rank 0 can name the ranks that are missing, where a collective would block. Requests
are tested now and then, because a blocking call of MPI would block the loop.

Needs mpi4py (`pip install aiograd[mpi]`) in the program that has the communicator; this module
itself imports none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from aiograd.cluster.config import JOIN_TIMEOUT, WorkerPlan
from aiograd.cluster.joining.invitation import Invitation
from aiograd.cluster.joining.rendezvous import read_secret_file
from aiograd.cluster.worker import Worker
from aiograd.errors import RpcError
from aiograd.rpc import scope
from aiograd.rpc.options import Options, check_timeout
from aiograd.rpc.transport.interfaces import host_name, locality
from aiograd.wire.secrets import Secret

__all__ = ["from_mpi"]

TAG: Final = 0x6167  # of our messages; below 32767, which every MPI allows
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two tests of a request
# The part of the patience in which rank 0 waits for the others; in the rest it can tell those who
# came, whose patience ends at about the same time, which ones did not.
HELLO_SHARE: Final = 0.9
SEND_GRACE: Final = 1.0  # seconds for a message of ours, also when the patience is over


async def from_mpi(
    comm: Any, *, options: Options | None = None, patience: float = JOIN_TIMEOUT
) -> Worker:
    """Make a worker of every rank of a communicator, and the worker current; all ranks call it.

    Rank r is worker{r} of a world of fixed size, as with `init_rpc`; `ag.shutdown()` on every rank
    leaves it. Variables of launchers are not read. RpcError on all ranks, within `patience` seconds
    and with the missing ranks, if some do not call it; TypeError or ValueError if `comm` is no
    communicator of one group.

        from mpi4py import MPI
        worker = await ag.cluster.from_mpi(MPI.COMM_WORLD)
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
    options = options or Options()
    if isinstance(options.secret, Mapping) or isinstance(options.secret_file, Mapping):
        raise ValueError("the ranks of MPI are one party, with one secret for all of them")
    rank, size = check_communicator(comm)
    agent = scope.AGENT.get()
    if agent is not None and not agent.closed:
        raise RpcError(f"this context is worker {agent.name!r} already; shut it down first")
    loop = asyncio.get_running_loop()
    mail = Mail(comm, loop.time(), check_timeout(patience))
    plan = WorkerPlan(
        name=f"worker{rank}",
        rank=rank,
        world_size=size,
        options=options,
        join_timeout=patience,
    )
    worker = await (_lead(mail, plan, size) if rank == 0 else _follow(mail, plan))
    worker.make_current()
    return worker


def check_communicator(comm: Any) -> tuple[int, int]:
    """Return rank and size; TypeError or ValueError if it is no communicator of one group."""
    if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "isend", "irecv")):
        raise TypeError(
            f"comm should be a communicator of mpi4py, such as MPI.COMM_WORLD, "
            f"not {type(comm).__name__}"
        )
    if not comm:
        raise ValueError("this is MPI.COMM_NULL: this process is not in that communicator")
    if comm.Is_inter():
        raise ValueError("an intercommunicator has two groups: pass comm.Merge(), or one of them")
    return comm.Get_rank(), comm.Get_size()


@dataclass(frozen=True, slots=True)
class Hello:
    """What rank 0 has to know of another rank."""

    host: str
    locality: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no cluster to join."""

    why: str


class Mail:
    """Messages through the communicator, until a deadline."""

    def __init__(self, comm: Any, begun: float, patience: float) -> None:
        self._comm, self._deadline, self.patience = comm, begun + patience, patience

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(self._deadline - asyncio.get_running_loop().time(), 0.0)

    async def send(self, message: Any, to: int) -> None:
        """Send a message; returns when MPI has taken it over."""
        await _poll({to: self._comm.isend(message, dest=to, tag=TAG)}, max(self.left, SEND_GRACE))

    async def receive(self, sources: Iterable[int], within: float) -> dict[int, Any]:
        """Receive one message from each source; those that sent none in time are missing."""
        requests = {source: self._comm.irecv(source=source, tag=TAG) for source in sources}
        try:
            return await _poll(requests, within)
        finally:
            for request in requests.values():
                # Else MPI would write into the buffer of a request that nobody has any more.
                request.Cancel()
                request.Free()


async def _poll(requests: dict[int, Any], seconds: float) -> dict[int, Any]:
    """Test requests until they are complete, or time is over; removes those that are complete."""
    now = asyncio.get_running_loop().time
    found, pause, end = {}, FIRST_PAUSE, now() + seconds
    while True:
        for number, request in list(requests.items()):
            complete, message = request.test()
            if complete:
                found[number] = message
                del requests[number]
        left = end - now()
        if not requests or left <= 0:
            return found
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 1.5, LONGEST_PAUSE)


async def _lead(mail: Mail, plan: WorkerPlan, size: int) -> Worker:
    """Be rank 0: hear of all others, listen, invite them."""
    others = range(1, size)
    hellos = await mail.receive(others, mail.left * HELLO_SHARE)
    starting: asyncio.Task[Worker] | None = None
    invited = False
    try:
        if missing := [rank for rank in others if rank not in hellos]:
            raise RpcError(
                f"{_ranks(missing)} of {size} did not call from_mpi within {mail.patience:g} s: "
                "every rank of the communicator has to, at about the same time"
            )
        worker = Worker.from_plan(_leading(plan, hellos))
        invitations: asyncio.Future[Invitation] = asyncio.get_running_loop().create_future()
        starting = asyncio.ensure_future(worker.start(invitations.set_result))
        waits: list[asyncio.Future[Any]] = [invitations, starting]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not invitations.done():
            starting.result()  # raises why it cannot listen
        invited = True
        await _send_all(mail, hellos, invitations.result())
        return await starting
    except BaseException as error:
        if not invited:
            # The others are told now, not when their own patience ends.
            await _send_all(mail, hellos, Refusal(f"rank 0 on {host_name()}: {error}"))
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
        raise


def _leading(plan: WorkerPlan, hellos: Mapping[int, Hello]) -> WorkerPlan:
    """Complete the plan of rank 0: its secret, and whether it listens beyond its host."""
    options, here = plan.options, locality()
    secret, file = options.secret, options.secret_file
    assert not isinstance(secret, Mapping)
    if secret is None:
        known = isinstance(file, str | os.PathLike)
        secret = read_secret_file(os.fspath(file)) if known else Secret(os.urandom(32))  # type: ignore[arg-type]
    if options.listen is None and any(hello.locality != here for hello in hellos.values()):
        options = replace(options, listen="0.0.0.0:0")
    return replace(plan, options=options, secret=Secret(secret))


async def _send_all(mail: Mail, to: Mapping[int, Any], message: Any) -> None:
    await asyncio.gather(*(mail.send(message, rank) for rank in to))


async def _follow(mail: Mail, plan: WorkerPlan) -> Worker:
    """Be another rank: say hello, and join by the invitation that comes back."""
    await mail.send(Hello(host_name(), locality()), 0)
    answer = (await mail.receive([0], mail.left)).get(0)
    if answer is None:
        raise RpcError(
            f"rank 0 did not call from_mpi within {mail.patience:g} s: every rank of the "
            "communicator has to, at about the same time"
        )
    if isinstance(answer, Refusal):
        raise RpcError(answer.why)
    joining = replace(plan, invitation=answer, join_timeout=max(mail.left, 1.0))
    return await Worker.from_plan(joining).start()


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(map(str, ranks[:10])) + (", …" if len(ranks) > 10 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
