"""One of two workers whose cable is pulled: python partition_member.py RANK PLACE SECRET LOOP.

Says "ready", answers "check" with how many calls went well and how many failed, and says when and
how a call to the other one was lost.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time

import aiograd as ag
from aiograd.cluster.processes.worker_main import new_event_loop
from tests.failures.work import echo, linger
from tests.support.waiting import until


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def commands() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def main(rank: int, place: str, secret: str) -> None:
    options = ag.Options(
        secret_file=secret, allow_plaintext=True, transport="tcp", timeout=math.inf
    )
    other = f"worker{1 - rank}"
    went, failed = 0, 0

    async def go_on() -> None:
        nonlocal went, failed
        while True:
            try:
                assert await ag.rpc_async(other, echo, (went,)) == went
                went += 1
            except ag.errors.WorkerLost:
                failed += 1
            await asyncio.sleep(0.02)

    worker = ag.Worker(f"worker{rank}", rank=rank, world_size=2, rendezvous=place, options=options)
    async with worker, asyncio.TaskGroup() as group:
        group.create_task(go_on())
        pending = ag.rpc_async(other, linger)
        await ag.barrier()
        say("ready")
        await (await commands()).readline()
        before = went
        await until(lambda: went > before + 1, 60.0)
        say("went", went, "failed", failed)
        try:
            await pending
        except ag.errors.WorkerLost as error:
            say("lost", time.monotonic(), type(error).__name__, error.worker, error.executed)
        os._exit(0)  # the peer is unreachable, so a graceful shutdown would only wait


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=lambda: new_event_loop(sys.argv[4])) as runner:
        runner.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
