"""The ranks of MPI as workers: with a communicator of this process, and with `make cluster-mpi`."""

from __future__ import annotations

import asyncio
import contextvars
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from aiograd.cluster.engines.mpi import TAG
from aiograd.errors import RpcError

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.deadline(90)


# ── with a communicator of this process ─────────────────────────────────────────────────────────


class Request:
    def __init__(self, test: Callable[[], tuple[bool, Any]]) -> None:
        self.test = test
        self.calls: list[str] = []

    def Cancel(self) -> None:  # noqa: N802
        self.calls.append("cancel")

    def Free(self) -> None:  # noqa: N802
        self.calls.append("free")


class Comm:
    """One rank of a communicator whose messages are queues of this process."""

    def __init__(
        self, rank: int, size: int, mail: dict[tuple[int, int, int], deque[bytes]]
    ) -> None:
        self._rank, self._size, self._mail = rank, size, mail
        self.requests: list[Request] = []
        self.null, self.inter = False, False

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._size

    def Is_inter(self) -> bool:  # noqa: N802
        return self.inter

    def __bool__(self) -> bool:
        return not self.null

    def isend(self, message: Any, dest: int, tag: int) -> Request:
        self._mail[self._rank, dest, tag].append(pickle.dumps(message))
        return Request(lambda: (True, None))

    def irecv(self, source: int, tag: int) -> Request:
        queue = self._mail[source, self._rank, tag]

        def test() -> tuple[bool, Any]:
            return (True, pickle.loads(queue.popleft())) if queue else (False, None)

        self.requests.append(Request(test))
        return self.requests[-1]


def communicator(size: int) -> list[Comm]:
    mail: dict[tuple[int, int, int], deque[bytes]] = defaultdict(deque)
    return [Comm(rank, size, mail) for rank in range(size)]


async def on_all(comms: list[Comm], work: Callable[[Comm], Awaitable[Any]]) -> list[Any]:
    """Run the program of every rank, each in a context of its own; gives results and errors."""
    loop = asyncio.get_running_loop()

    async def program(comm: Comm) -> Any:
        return await work(comm)

    tasks = [loop.create_task(program(comm), context=contextvars.Context()) for comm in comms]
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_every_rank_gets_its_worker_and_they_leave_together():
    async def program(comm: Comm) -> Any:
        worker = await ag.cluster.from_mpi(comm)
        try:
            assert ag.current_worker() is worker
            return worker.name, worker.rank, await ag.all_gather(worker.rank)
        finally:
            await ag.shutdown()

    everyone = {"worker0": 0, "worker1": 1, "worker2": 2}
    found = await on_all(communicator(3), program)
    assert found == [(f"worker{rank}", rank, everyone) for rank in range(3)]


async def test_a_communicator_of_one_is_a_world_of_one():
    (comm,) = communicator(1)
    worker = await ag.cluster.from_mpi(comm)
    assert (worker.name, await ag.rpc_async("worker0", abs, args=(-1,))) == ("worker0", 1)
    with pytest.raises(RpcError, match="is worker 'worker0' already"):
        await ag.cluster.from_mpi(comm)
    await ag.shutdown()


async def test_variables_of_launchers_are_not_read(monkeypatch):
    for name, value in {"SLURM_PROCID": "5", "SLURM_NTASKS": "9", "AIOGRAD_RANK": "7"}.items():
        monkeypatch.setenv(name, value)

    async def program(comm: Comm) -> Any:
        async with await ag.cluster.from_mpi(comm) as worker:
            return worker.name, len(await ag.all_gather(None))

    assert await on_all(communicator(2), program) == [("worker0", 2), ("worker1", 2)]


async def test_ranks_that_do_not_come_are_named_on_all_others_within_the_patience():
    comms = communicator(4)
    begun = time.monotonic()
    errors = await on_all(comms[:2], lambda comm: ag.cluster.from_mpi(comm, patience=1.0))
    assert time.monotonic() - begun < 2.0
    for error in errors:
        assert isinstance(error, RpcError)
        assert "ranks 2, 3 of 4 did not call from_mpi within 1 s" in str(error)
    # What MPI would have received into is given back.
    left = [each for each in comms[0].requests if each.calls]
    assert [each.calls for each in left] == [["cancel", "free"]] * 2


async def test_a_rank_0_that_does_not_come_is_an_error_within_the_patience():
    comms = communicator(2)
    (error,) = await on_all(comms[1:], lambda comm: ag.cluster.from_mpi(comm, patience=0.3))
    assert "rank 0 did not call from_mpi within 0.3 s" in str(error)


async def test_a_rank_0_that_cannot_listen_tells_all_others_why():
    async def program(comm: Comm) -> Any:
        options = ag.Options(listen="eth99" if not comm.Get_rank() else None)
        return await ag.cluster.from_mpi(comm, options=options)

    begun = time.monotonic()
    errors = await on_all(communicator(3), program)
    assert time.monotonic() - begun < 10
    for error in errors:
        assert isinstance(error, RpcError)
        assert "no interface eth99" in str(error)


async def test_a_start_that_is_cancelled_leaves_nothing():
    comms = communicator(2)

    async def program(comm: Comm) -> Any:
        async with asyncio.timeout(0.2):
            await ag.cluster.from_mpi(comm)

    (error,) = await on_all(comms[:1], program)
    assert isinstance(error, TimeoutError)
    assert [each.calls for each in comms[0].requests] == [["cancel", "free"]]


async def test_the_secret_of_the_options_or_of_their_file_is_used(tmp_path):
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("a secret of 24 bytes....")
    for options in (ag.Options(secret_file=file), ag.Options(secret=b"a secret of 24 bytes....")):
        for given in (options, None):  # the other rank gets it with the invitation

            async def program(comm: Comm, other=given, own=options) -> Any:
                used = other if comm.Get_rank() else own
                async with await ag.cluster.from_mpi(comm, options=used):
                    return len(await ag.all_gather(None))

            assert await on_all(communicator(2), program) == [2, 2]


@pytest.mark.parametrize("comm", [None, 3, "COMM_WORLD", object()])
async def test_what_is_no_communicator_is_a_type_error(comm):
    with pytest.raises(TypeError, match=r"MPI\.COMM_WORLD"):
        await ag.cluster.from_mpi(comm)


async def test_communicators_without_one_group_are_value_errors():
    (comm,) = communicator(1)
    comm.null = True
    with pytest.raises(ValueError, match="COMM_NULL"):
        await ag.cluster.from_mpi(comm)
    comm.null, comm.inter = False, True
    with pytest.raises(ValueError, match="Merge"):
        await ag.cluster.from_mpi(comm)


async def test_options_that_make_no_sense_are_refused_before_anything_is_sent():
    comms = communicator(2)
    with pytest.raises(TypeError, match="Options"):
        await ag.cluster.from_mpi(comms[1], options={})
    with pytest.raises(ValueError, match="one party"):
        await ag.cluster.from_mpi(comms[1], options=ag.Options(secret={"a": b"0" * 16}))
    with pytest.raises(ValueError, match="timeout"):
        await ag.cluster.from_mpi(comms[1], patience=0)
    assert not comms[1].requests


def test_the_tag_is_one_that_every_mpi_allows():
    assert 0 <= TAG <= 32767


# ── with a real MPI ─────────────────────────────────────────────────────────────────────────────

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")


def _has_mpi() -> bool:
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return False
    return MPIEXEC is not None


real = pytest.mark.skipif(not _has_mpi(), reason="needs mpi4py and mpiexec: `make cluster-mpi`")


def mpiexec(tmp_path: Path, ranks: int, program: str, *words: str) -> subprocess.CompletedProcess:
    """Run a program as ranks of MPI; `words` are for mpiexec."""
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    assert MPIEXEC is not None
    # What Open MPI asks for where root and few cores are: containers.
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PYTHONPATH": str(ROOT),
    }
    command = [MPIEXEC, "-n", str(ranks), *words, sys.executable, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=80)


@real
def test_gradients_flow_through_ranks(tmp_path):
    done = mpiexec(
        tmp_path,
        3,
        """
        import asyncio
        import aiograd as ag
        from mpi4py import MPI

        def dense(x, w):
            return ag.tanh(x @ w)

        async def main():
            worker = await ag.cluster.from_mpi(MPI.COMM_WORLD)
            assert (worker.rank, worker.name) == (MPI.COMM_WORLD.rank, f"worker{worker.rank}")
            everyone = await ag.all_gather(MPI.COMM_WORLD.rank)
            if worker.rank == 0:
                w = ag.ones(3, 2, requires_grad=True)
                async with ag.context() as ctx:
                    calls = [ag.rpc_async(f"worker{r}", dense, (ag.zeros(4, 3), w)) for r in (1, 2)]
                    total = sum(await asyncio.gather(*calls)).sum()
                    await ctx.backward(total)
                    print(everyone, ctx.gradients[w].shape, flush=True)
            await ag.shutdown()

        asyncio.run(main())
        """,
    )
    assert done.stdout == "{'worker0': 0, 'worker1': 1, 'worker2': 2} (3, 2)\n", done.stderr
    assert done.returncode == 0


@real
def test_a_rank_that_dies_is_lost_to_the_others_and_ends_the_job(tmp_path):
    done = mpiexec(
        tmp_path,
        3,
        """
        import asyncio, os, signal, time
        import aiograd as ag
        from mpi4py import MPI

        async def main():
            worker = await ag.cluster.from_mpi(MPI.COMM_WORLD)
            await ag.barrier()
            if worker.rank == 0:
                begun = time.monotonic()
                try:
                    await ag.rpc_async("worker2", os.kill, (0, signal.SIGKILL))
                except ag.errors.WorkerLost as error:
                    print("lost", error.worker, time.monotonic() - begun < 1, flush=True)
                    # The others go on.
                    print(await ag.rpc_async("worker1", abs, (-1,)), flush=True)
                    os._exit(3)
            await asyncio.Event().wait()

        # A group of its own: the signal is for this rank alone.
        os.setpgid(0, 0)
        asyncio.run(main())
        """,
        "--enable-recovery",
    )
    assert "lost worker2 True\n1\n" in done.stdout, done.stderr
    assert done.returncode != 0


@real
def test_parts_of_a_communicator_are_clusters_of_their_own(tmp_path):
    done = mpiexec(
        tmp_path,
        3,
        """
        import asyncio
        import aiograd as ag
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        part = world.Split(color=0 if world.rank < 2 else MPI.UNDEFINED)

        async def main():
            if world.rank == 2:
                try:
                    await ag.cluster.from_mpi(part)
                except ValueError as error:
                    print(error, flush=True)
                return
            worker = await ag.cluster.from_mpi(part)
            assert len(await ag.all_gather(None)) == 2
            await ag.shutdown()
            # Not every rank of the world: named within the patience, on each that came.
            try:
                await ag.cluster.from_mpi(world, patience=2)
            except ag.errors.RpcError as error:
                print(error, flush=True)

        asyncio.run(main())
        world.Barrier()
        """,
    )
    lines = sorted(done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert len(lines) == 3
    assert "rank 2 of 3 did not call from_mpi within 2 s" in lines[0]
    assert "rank 2 of 3 did not call from_mpi within 2 s" in lines[1]
    assert lines[2].startswith("this is MPI.COMM_NULL")


@real
def test_the_program_of_the_page_runs_as_written(tmp_path):
    page = (ROOT / "docs" / "mpi.md").read_text()
    (program,) = re.findall(r"```python\n(import.*?)```", page, re.DOTALL)
    done = mpiexec(tmp_path, 3, program)
    assert done.stdout == "3 (3, 2)\n", done.stderr
    assert done.returncode == 0
