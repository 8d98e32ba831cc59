"""F21: a start that cannot succeed is refused on every rank, with the reason."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.failures.conftest import loop_kind

RANK = """
import asyncio, json, sys, time
from aiograd.cluster.processes.worker_main import new_event_loop
import aiograd as ag

async def main(name, rank, world_size, rendezvous):
    began = time.monotonic()
    try:
        await ag.init_rpc(name, rank=rank, world_size=world_size, rendezvous=rendezvous)
        found = ["none", "", 0.0]
    except Exception as error:
        found = [type(error).__name__, str(error), time.monotonic() - began]
    print(json.dumps(found), flush=True)

sys.stdin.readline()  # until it is told to come
with asyncio.Runner(loop_factory=lambda: new_event_loop(sys.argv[1])) as runner:
    runner.run(main(*json.loads(sys.argv[2])))
"""


class Rank:
    """A process that is going to join as one rank."""

    def __init__(self, name: str, rank: int, world_size: int, rendezvous: str) -> None:
        self.rank = rank
        given = json.dumps([name, rank, world_size, rendezvous])
        self._process = subprocess.Popen(
            [sys.executable, "-c", RANK, loop_kind(), given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def come(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    async def outcome(self) -> tuple[str, str, float]:
        """The type and text of its error, and after how many seconds."""
        output, _ = await asyncio.to_thread(self._process.communicate)
        kind, text, seconds = json.loads(output)
        return kind, text, seconds

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


@pytest.fixture
def rendezvous(kind: str, tmp_path: Any) -> str:
    if kind == "tcp":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"
    return f"{kind}:{tmp_path}/meet"


# Names and world sizes in order of rank, and what everybody has to be told. Without the last rank
# it is clear already that the start cannot succeed.
WRONG = {
    "one name for all": ([("x", 3), ("x", 3), ("x", 3)], ["'x'", "ranks 0 and"]),
    "two world sizes": ([("x", 2), ("y", 3), ("z", 3)], ["'x'", "of 2", "of 3"]),
}


@pytest.mark.deadline(60)
@pytest.mark.parametrize(("kind", "late"), [("file", False), ("file", True), ("tcp", True)])
@pytest.mark.parametrize("what", WRONG)
async def test_f21_every_rank_gets_the_reason_of_a_refused_start(
    figure, rendezvous, kind, what, late
):
    given, words = WRONG[what]
    ranks = [Rank(name, rank, size, rendezvous) for rank, (name, size) in enumerate(given)]
    try:
        *others, last = ranks
        for rank in others:
            rank.come()
        found = []
        if late:  # after rank 0 has gone, or while it stays for those who are late
            first = others if kind == "file" else others[1:]
            found = await asyncio.gather(*(rank.outcome() for rank in first))
        last.come()
        rest = [last, *others] if not late else [last] if kind == "file" else [last, others[0]]
        found += await asyncio.gather(*(rank.outcome() for rank in rest))
        assert len(found) == len(ranks)
        for error, text, _ in found:
            assert error == "RpcError", text
            for word in words:
                assert word in text
        slowest = max(seconds for _, _, seconds in found)
        when = "one of them late" if late else "all at once"
        figure("F21", f"{what}: every rank is told, {when}", 1.0, slowest)
    finally:
        for rank in ranks:
            rank.end()
