"""Instructions per operation, counted by callgrind: the same in each run, also on a busy machine.

    python benchmarks/instructions.py                    # this tree
    python benchmarks/instructions.py --against ../old   # this tree beside another one

Each operation runs in one process, on workers that share its loop, with two counts of repetitions;
the difference between both runs is what the repetitions cost. Needs valgrind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

HERE = Path(__file__).resolve()
SMALL, LARGE = 100, 300  # repetitions, in multiples of 50 and of 4


async def _call(count: int) -> None:
    import aiograd as ag

    for _ in range(count):
        await ag.rpc_async("worker0", ag.add, args=(1.0, 2.0))


async def _many_calls(count: int) -> None:
    import aiograd as ag

    for _ in range(count // 50):
        calls = [ag.rpc_async("worker0", ag.add, args=(1.0, 2.0)) for _ in range(50)]
        await asyncio.gather(*calls)


async def _reference(count: int) -> None:
    import aiograd as ag

    for _ in range(count):
        await ag.remote("worker0", ag.add, args=(1.0, 2.0)).to_here()


async def _end_to_end(count: int) -> None:
    import aiograd as ag

    x, y = ag.ones(3, 3, requires_grad=True), ag.ones(3, 3, requires_grad=True)
    for _ in range(count // 4):
        async with ag.context() as ctx:
            z = x
            for _ in range(3):
                z = await ag.rpc_async("worker0", ag.add, args=(z, y))
            await ctx.backward(z.sum())


async def _retained(count: int) -> None:
    import aiograd as ag

    x = ag.ones(3, 3, requires_grad=True)
    async with ag.context() as ctx:
        loss = (await ag.rpc_async("worker0", ag.add, args=(x, x))).sum()
        for _ in range(count):
            await ctx.backward(loss, retain_graph=True)


async def _chain(count: int) -> None:
    import aiograd as ag

    x = ag.ones(3, 3, requires_grad=True)
    for _ in range(count // 4):
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker0", _through, args=(x, ["worker1"]))
            await ctx.backward(y.sum())


async def _through(x, path):  # type: ignore[no-untyped-def]
    import aiograd as ag

    return await ag.rpc_async(path[0], _through, args=(x, path[1:])) if path else x * 2.0


OPERATIONS: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {
    "a call": (_call, 1),
    "a call of 50 at once": (_many_calls, 1),
    "a reference made and fetched": (_reference, 1),
    "three calls and a pass": (_end_to_end, 4),
    "a retained pass": (_retained, 1),
    "two nested calls and a pass": (_chain, 4),
}


async def _run(name: str, count: int) -> None:
    import aiograd as ag

    # callgrind slows the process down 50 times: timers must not come 50 times as often as else.
    for module in list(sys.modules.values()):
        if module.__name__.startswith("aiograd.dist") and isinstance(
            getattr(module, "LAZY", None), float
        ):
            module.LAZY *= 50  # type: ignore[attr-defined]
    async with ag.LocalCluster(2, processes=False):
        await OPERATIONS[name][0](count)


def measure(tree: Path, name: str) -> float:
    """Instructions that one operation takes on the library in `tree`."""
    totals = [_instructions(tree, name, count) for count in (SMALL, LARGE)]
    return (totals[1] - totals[0]) / (LARGE - SMALL) * OPERATIONS[name][1]


def _instructions(tree: Path, name: str, count: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [sys.executable, str(HERE), "--run", name, "--count", str(count)]
        environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another tree to compare with")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=SMALL, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        asyncio.run(_run(given.run, given.count))
        return
    here = HERE.parent.parent
    for name in OPERATIONS:
        if given.only in name:
            new = measure(here, name)
            line = f"{name:30} {new / 1000:9.1f} k"
            if given.against is not None:
                old = measure(given.against.resolve(), name)
                line += f"   before {old / 1000:9.1f} k   {(new / old - 1) * 100:+.1f} %"
            print(line, flush=True)


if __name__ == "__main__":
    main()
