"""An interrupted cell leaves the cluster usable, whatever the cell was doing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import jupytext
import pytest
from jupyter_client import BlockingKernelClient, KernelManager

pytestmark = [
    pytest.mark.deadline(60),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "distributed_autograd.py"
PATIENCE = 60.0
NOTICED = 4 * 1.0  # seconds; the driver's loop wakes once a second, and we allow four times


class Kernel:
    """A notebook's kernel: run a cell, or interrupt it as soon as it says that it is under way."""

    def __init__(self, client: BlockingKernelClient, manager: KernelManager) -> None:
        self._client, self._manager = client, manager

    def run(self, code: str) -> str:
        """What the cell printed; an error of the cell is an error here."""
        said, error = self._execute(code, interrupt=False)
        assert error is None, f"{error}\n{said}"
        return said

    def interrupt(self, code: str) -> float:
        """Interrupt a cell once it has printed "under way"; seconds until it was over."""
        _, error = self._execute(code, interrupt=True)
        assert error in ("KeyboardInterrupt", "CancelledError"), error
        return time.monotonic() - self._interrupted

    def _execute(self, code: str, interrupt: bool) -> tuple[str, str | None]:
        request, said, error = self._client.execute(code), "", None
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                message: dict[str, Any] = self._client.get_iopub_msg(timeout=end - time.monotonic())
            except Empty:
                break
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                said += content["text"]
                if interrupt and "under way" in said:
                    interrupt, self._interrupted = False, time.monotonic()
                    self._manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                error = content["ename"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return said, error
        raise TimeoutError(f"the cell did not end:\n{code}\n{said}")


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=dict(os.environ))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        yield Kernel(client, manager)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


START = """
import asyncio, threading, time
import aiograd as ag

async def for_ever():
    await asyncio.Event().wait()

async def running(name):
    return (await ag.rpc_async(name, ag.debug_info))["running_calls"]

cluster = await ag.LocalCluster(2)
"""
CHECK = """
print([await worker.call(max, 1, 2) for worker in cluster])
w = ag.tensor([3.0], requires_grad=True)
async with ag.context() as ctx:
    await ctx.backward((await ag.rpc_async("worker1", ag.mul, args=(w, w))).sum())
    print(ctx.gradients[w].tolist())
"""
END = """
while await running("worker1"):
    await asyncio.sleep(0.01)
print(await cluster.close())
"""
AWAITING = """
call = ag.rpc_async("worker1", for_ever)
while not await running("worker1"):
    await asyncio.sleep(0.01)
print("under way", flush=True)
await call
"""
CELLS = {
    "awaits a call": AWAITING,
    "awaits many": """
print("under way", flush=True)
await asyncio.gather(*[ag.rpc_async(f"worker{i % 2}", for_ever) for i in range(20)])
""",
    "blocks a thread in a call and the loop for the thread": """
answers = []
thread = threading.Thread(
    target=lambda: answers.append(ag.run_sync(ag.rpc_async("worker1", max, args=(1, 2))))
)
thread.start()
print("under way", flush=True)
thread.join()
""",
    "blocks the loop": """
print("under way", flush=True)
time.sleep(1000)
""",
    "computes": """
print("under way", flush=True)
while True:
    pass
""",
    "reads a stream": """
async def count():
    for n in range(10**9):
        yield n
        await asyncio.sleep(0)

async for n in ag.rpc_stream("worker1", count):
    if n == 100:
        print("under way", flush=True)
""",
}


@pytest.mark.parametrize("cell", CELLS)
def test_the_cluster_works_after_an_interrupt_of_a_cell_that(cell: str, kernel: Kernel) -> None:
    kernel.run(START)
    assert kernel.interrupt(CELLS[cell]) < NOTICED
    assert kernel.run(CHECK) == "[2, 2]\n[6.0]\n"
    if "thread" in cell:
        assert kernel.run("thread.join() or print(answers)") == "[2]\n"
    assert kernel.run(END) == "None\n"


def test_a_start_that_was_interrupted_can_be_made_again(kernel: Kernel) -> None:
    kernel.run(START.replace("cluster = await ag.LocalCluster(2)", ""))
    kernel.interrupt("print('under way', flush=True)\ncluster = await ag.LocalCluster(64)")
    kernel.run("cluster = await ag.LocalCluster(2)")
    assert kernel.run(CHECK) == "[2, 2]\n[6.0]\n"
    assert kernel.run(END) == "None\n"


def test_the_autograd_notebook_runs_again_after_an_interrupted_cell(kernel: Kernel) -> None:
    cells = [cell.source for cell in jupytext.read(NOTEBOOK).cells if cell.cell_type == "code"]
    opened = next(i for i, code in enumerate(cells) if "LocalCluster" in code) + 1
    start = time.monotonic()
    for code in cells[:opened]:
        kernel.run(code)
    kernel.run(START.replace("cluster = await ag.LocalCluster(2)", ""))
    kernel.interrupt(AWAITING)
    said = "".join([kernel.run(code) for code in cells[opened:] + cells])
    assert said.count("the same gradient: True") == 2
    assert time.monotonic() - start < 60
