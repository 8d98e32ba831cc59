"""Instructions per operation, counted by callgrind: the same in each run, also on a busy machine.

    python benchmarks/instructions.py                          # this tree
    python benchmarks/instructions.py --against ../old         # this tree beside another one
    python benchmarks/instructions.py --only reference --keep out   # for callgrind_annotate

Two workers share one process and one loop (uvloop, if it is installed) and talk over a Unix socket,
so that every step of both counts once, and no scheduler has a say. Only the repetitions are
counted: callgrind is switched on and off around them. It slows the process down about fifty times,
so its clock shows a fiftieth of the time that it computes: else timers, which batch what nobody
waits for, would fire fifty times as often per operation as in real programs. Both take a few lines
of C.

Runs of one tree differ by less than 0.5 %. What is not seen: time in the kernel, and work that two
processes do at the same time. Needs valgrind with its headers and a C compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
WARM = 40  # repetitions before those that count: Python specialises what runs often

SHIM = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

enum { SLOWDOWN = 50, CLOCKS = 16, SECOND = 1000000000 };
static long long began[CLOCKS], used;
static int slowed;

static long long read_clock(int clock) {
    struct timespec now;
    syscall(SYS_clock_gettime, clock, &now);
    return now.tv_sec * (long long)SECOND + now.tv_nsec;
}

/* Takes the place of the C library's, which Python and libuv ask for the time. It goes on with the
   time that the process computes, whatever else the machine does. The thread of the watchdog keeps
   the real clock: its waits are of the kernel, which knows no other. */
int clock_gettime(clockid_t clock, struct timespec *now) {
    if (clock < 0 || clock >= CLOCKS)
        return syscall(SYS_clock_gettime, clock, now);
    long long time;
    if (slowed && syscall(SYS_gettid) == getpid())
        time = began[clock] + (read_clock(CLOCK_PROCESS_CPUTIME_ID) - used) / SLOWDOWN;
    else
        time = read_clock(clock);
    now->tv_sec = time / SECOND;
    now->tv_nsec = time % SECOND;
    return 0;
}

void start_counting(void) {
    for (int clock = 0; clock < CLOCKS; clock++)
        began[clock] = read_clock(clock);
    used = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    slowed = 1;
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_TOGGLE_COLLECT;
}

void stop_counting(void) {
    CALLGRIND_TOGGLE_COLLECT;
    CALLGRIND_STOP_INSTRUMENTATION;
}
"""


# ── operations ──────────────────────────────────────────────────────────────────────────────────

Step = Callable[[], Awaitable[Any]]


def _inline(x: int) -> int:
    return x


async def _coroutine(x: int) -> int:
    return x


async def inline_call() -> Step:
    """Await one call of a function that runs on the callee's loop."""
    import aiograd as ag

    function = ag.inline(_inline)

    async def step() -> None:
        await ag.rpc_async("worker", function, args=(1,))

    return step


async def tensor_call() -> Step:
    """Await one call of an operation with two tensors."""
    import aiograd as ag

    x = ag.ones(3, 3)

    async def step() -> None:
        await ag.rpc_async("worker", ag.add, args=(x, x))

    return step


async def inline_calls() -> Step:
    """Keep 256 calls of an inline function in flight."""
    import aiograd as ag

    function = ag.inline(_inline)
    return _window(lambda: ag.rpc_async("worker", function, args=(1,)), 256)


async def coroutine_calls() -> Step:
    """Keep 32 calls of a coroutine function in flight."""
    import aiograd as ag

    return _window(lambda: ag.rpc_async("worker", _coroutine, args=(1,)), 32)


def _window(start: Callable[[], Awaitable[Any]], size: int) -> Step:
    calls = deque([start() for _ in range(size)])

    async def step() -> None:
        for _ in range(size):
            await calls.popleft()
            calls.append(start())

    return step


async def reference() -> Step:
    """Make a value on the other worker, fetch it, and drop the reference."""
    import aiograd as ag

    x = ag.ones(3, 3)

    async def step() -> None:
        rref = ag.remote("worker", ag.add, args=(x, x))
        await rref.to_here()

    return step


async def references() -> Step:
    """Make 200 values on the other worker, fetch them, and drop the references."""
    import aiograd as ag

    x = ag.ones(3, 3)

    async def step() -> None:
        rrefs = [ag.remote("worker", ag.add, args=(x, x)) for _ in range(200)]
        await asyncio.gather(*[rref.to_here() for rref in rrefs])

    return step


async def end_to_end() -> Step:
    """Make six calls and a reference in a context, and run a backward pass through all of them."""
    import aiograd as ag

    a, b = ag.ones(3, 3, requires_grad=True), ag.ones(3, 3, requires_grad=True)

    async def step() -> None:
        async with ag.context() as ctx:
            x = a
            for _ in range(6):
                x = await ag.rpc_async("worker", ag.add, args=(x, b))
            y = await ag.remote("worker", ag.add, args=(x, b)).to_here()
            await ctx.backward(y.sum())
            assert ctx.gradients[b].numpy()[0, 0] == 7

    return step


async def retained_pass() -> Step:
    """Run one backward pass through two calls again and again."""
    import aiograd as ag

    a, b = ag.ones(3, 3, requires_grad=True), ag.ones(3, 3, requires_grad=True)
    ctx = await ag.context().__aenter__()  # left by the end of the process
    y = await ag.rpc_async("worker", ag.add, args=(a, b))
    loss = (y * await ag.rpc_async("worker", ag.add, args=(a, b))).sum()

    async def step() -> None:
        await ctx.backward(loss, retain_graph=True)

    return step


async def torch_retained_pass() -> Step:
    """Run one backward pass through two calls with torch tensors again and again."""
    import torch

    import aiograd as ag

    torch.set_num_threads(1)
    a, b = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    ctx = await ag.context().__aenter__()
    y = await ag.rpc_async("worker", torch.add, args=(a, b))
    loss = (y * await ag.rpc_async("worker", torch.add, args=(a, b))).sum()

    async def step() -> None:
        await ctx.backward(loss, retain_graph=True)

    return step


class Operation(NamedTuple):
    """What is measured: `prepare` gives one step, which does the operation `size` times."""

    name: str
    prepare: Callable[[], Awaitable[Step]]
    repetitions: int  # of the step
    size: int = 1


OPERATIONS = [
    Operation("a lone inline call", inline_call, 600),
    Operation("a lone call with tensors", tensor_call, 600),
    Operation("an inline call of 256 in flight", inline_calls, 12, 256),
    Operation("a coroutine call of 32 in flight", coroutine_calls, 60, 32),
    Operation("a reference made, fetched, dropped", reference, 400),
    Operation("the same of 200 references at once", references, 10, 200),
    Operation("six calls, a reference and a pass", end_to_end, 80),
    Operation("a retained pass", retained_pass, 300),
]
if find_spec("torch") is not None:
    OPERATIONS.append(Operation("a retained pass of torch tensors", torch_retained_pass, 100))


# ── the process that is counted ─────────────────────────────────────────────────────────────────


async def _run(operation: Operation, shim: str) -> None:
    import aiograd as ag

    place = f"unix:{Path(shim).parent}/meeting-{os.getpid()}"
    options = ag.Options(secret=b"of this measurement alone")

    async def join(name: str, rank: int) -> None:
        await ag.init_rpc(name, rank=rank, world_size=2, rendezvous=place, options=options)

    # In a task, so in a context, of its own: each worker is current where it was started.
    worker = asyncio.create_task(join("worker", 1))
    await join("driver", 0)
    await worker
    step = await operation.prepare()
    counter = ctypes.PyDLL(shim)
    for _ in range(WARM):
        await step()
    gc.collect()
    gc.freeze()  # else collections would count what the imports left behind
    counter.start_counting()
    for _ in range(operation.repetitions):
        await step()
    counter.stop_counting()
    os._exit(0)


def _run_here(name: str, shim: str) -> None:
    (operation,) = [each for each in OPERATIONS if each.name == name]
    if find_spec("uvloop") is None:
        asyncio.run(_run(operation, shim))
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(operation, shim))


# ── measuring ───────────────────────────────────────────────────────────────────────────────────


def build(folder: str) -> str:
    """Compile the few lines of C; SystemExit says what is missing."""
    if shutil.which("valgrind") is None:
        raise SystemExit("instructions.py needs valgrind, which is not installed")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("instructions.py needs a C compiler: install one, or set CC")
    source, shim = Path(folder, "shim.c"), str(Path(folder, "shim.so"))
    source.write_text(SHIM)
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", shim, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"instructions.py needs the headers of valgrind:\n{done.stderr}")
    return shim


def measure(tree: Path, operation: Operation, shim: str, profile: str = "/dev/null") -> float:
    """Return the instructions that one operation takes on the library in `tree`."""
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no"]
    command += [f"--callgrind-out-file={profile}", sys.executable, "-P", str(HERE)]
    command += ["--run", operation.name, shim]
    settings = {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "LD_PRELOAD": shim}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None or not int(found[1]):
        raise SystemExit(f"{operation.name} on {tree} failed:\n{done.stdout}{done.stderr}")
    return int(found[1]) / operation.repetitions / operation.size


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, help="another tree to compare with")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--keep", type=Path, help="folder for profiles of this tree")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        _run_here(*given.run)
        return
    here = HERE.parent.parent
    with tempfile.TemporaryDirectory() as folder:
        shim = build(folder)
        for operation in OPERATIONS:
            if given.only not in operation.name:
                continue
            profile = "/dev/null"
            if given.keep is not None:
                given.keep.mkdir(parents=True, exist_ok=True)
                profile = str(given.keep / f"{operation.prepare.__name__}.callgrind")
            new = measure(here, operation, shim, profile)
            line = f"{operation.name:36} {new / 1000:9.1f} k"
            if given.against is not None:
                old = measure(given.against.resolve(), operation, shim)
                line += f"   there {old / 1000:9.1f} k   {(new / old - 1) * 100:+5.1f} %"
            print(line, flush=True)


if __name__ == "__main__":
    main()
