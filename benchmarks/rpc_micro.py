"""Small calls and large arrays between two processes over one Unix socket.

    python benchmarks/rpc_micro.py [--spin] [--tcp] [--asyncio] [--seconds 1.0] [names …]

Everything a real cluster has is on: authentication, deadlines, heartbeats, flow control. Beside the
figures stands the round trip of a bare blocking socket in the same run, because an idle machine
wakes slowly and a busy one quickly.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import uvloop

from aiograd.rpc.agent import Agent
from aiograd.rpc.api import inline
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.runtime.runtime import Runtime

SECRET = b"only for this benchmark, loopback"


async def async_noop() -> None:
    pass


@inline
def inline_noop() -> None:
    pass


def plain_noop() -> None:
    pass


@inline
def echo(x: Any) -> Any:
    return x


@inline
def total(x: Any) -> float:
    return float(x.sum())


def add_op(x: Any, y: Any) -> Any:
    return x + y


add_op.op_name = "add"  # type: ignore[attr-defined]
OPS = {"add": add_op}


def make_agent(name: str, rank: int, spin: float) -> Agent:
    return Agent(name, rank, secret=SECRET, runtime=Runtime(spin=spin), ops=OPS)


async def serve(address: str, spin: float) -> None:
    agent = make_agent("b", 1, spin)
    await agent.start(address)
    sys.stdout.write(agent.info.addresses[0] + "\n")
    sys.stdout.flush()
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    pipe.close()
    await agent.close()


async def round_trips(call: Callable[[], Any], seconds: float) -> str:
    for _ in range(200):
        await call()
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    times.sort()
    middle, late = statistics.median(times), times[int(len(times) * 0.99)]
    return f"RTT {middle * 1e6:8.1f} us   p99 {late * 1e6:8.1f} us"


async def in_flight(
    call: Callable[[], Any], seconds: float, clock: Callable[[], Any], width: int = 256
) -> str:
    """Calls per second, and the CPU time of each side, which depends little on other processes."""
    count = 0
    here, there = time.process_time(), await clock()
    end = time.perf_counter() + seconds

    async def lane() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await call()
            count += 1

    start = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(width)))
    rate = count / (time.perf_counter() - start) / 1e3
    here, there = time.process_time() - here, await clock() - there
    return (
        f"{rate:8.1f} k calls/s with {width} in flight; "
        f"CPU {here / count * 1e6:5.1f} + {there / count * 1e6:5.1f} us"
    )


async def array(call: Callable[[], Any], repeats: int, clock: Callable[[], Any]) -> str:
    await call()
    times = []
    here, there = time.process_time(), await clock()
    for _ in range(repeats):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    here, there = time.process_time() - here, await clock() - there
    return (
        f"median {statistics.median(times) * 1e3:8.2f} ms   best {min(times) * 1e3:8.2f} ms; "
        f"CPU {here / repeats * 1e3:5.1f} + {there / repeats * 1e3:5.1f} ms"
    )


def socket_round_trip() -> float:
    """Microseconds for 64 bytes over a blocking socket pair between two threads."""
    ours, theirs = socket.socketpair()

    def answer() -> None:
        while data := theirs.recv(64):
            theirs.send(data)

    thread = threading.Thread(target=answer)
    thread.start()
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        ours.send(b"x" * 64)
        ours.recv(64)
        times.append(time.perf_counter() - start)
    ours.close()
    thread.join()
    theirs.close()
    return statistics.median(times) * 1e6


async def measure(peer_address: str, names: list[str], seconds: float, spin: float) -> None:
    agent = make_agent("a", 0, spin)
    await agent.start()
    peer = await agent.connect(peer_address)
    agent.directory.add(PeerInfo(peer.name, peer.rank, peer.incarnation, (peer_address,)))
    small = np.ones((3, 3))
    big = np.random.default_rng(0).normal(size=8 << 20)  # 64 MiB
    one = np.random.default_rng(0).normal(size=128 << 10)  # 1 MiB
    call = agent.call

    def clock() -> Any:
        return call("b", time.process_time)

    rows: dict[str, Callable[[], Any]] = {
        "async rtt": lambda: round_trips(lambda: call("b", async_noop), seconds),
        "inline rtt": lambda: round_trips(lambda: call("b", inline_noop), seconds),
        "plain rtt": lambda: round_trips(lambda: call("b", plain_noop), seconds),
        "op rtt": lambda: round_trips(lambda: call("b", add_op, (small, small)), seconds),
        "async rate": lambda: in_flight(lambda: call("b", async_noop), seconds, clock),
        "inline rate": lambda: in_flight(lambda: call("b", inline_noop), seconds, clock),
        "plain rate": lambda: in_flight(lambda: call("b", plain_noop), seconds, clock),
        "op rate": lambda: in_flight(lambda: call("b", add_op, (small, small)), seconds, clock),
        "echo 1MiB": lambda: array(lambda: call("b", echo, (one,)), 50, clock),
        "sum 1MiB": lambda: array(lambda: call("b", total, (one,)), 50, clock),
        "echo 64MiB": lambda: array(lambda: call("b", echo, (big,)), 10, clock),
        "sum 64MiB": lambda: array(lambda: call("b", total, (big,)), 10, clock),
    }
    for name, run in rows.items():
        if not names or any(part in name for part in names):
            print(f"{name:12} {await run()}", flush=True)
    await agent.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--spin", action="store_true")
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--asyncio", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--serve", default="")
    given = parser.parse_args()
    spin = 200e-6 if given.spin else 0.0
    factory = asyncio.new_event_loop if given.asyncio else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        if given.serve:
            runner.run(serve(given.serve, spin))
            return
        print(f"{'bare socket':12} RTT {socket_round_trip():8.1f} us")
        with tempfile.TemporaryDirectory() as folder:
            address = "tcp:127.0.0.1:0" if given.tcp else f"unix:{folder}/b.sock"
            flags = [flag for flag in ("--spin", "--asyncio") if getattr(given, flag[2:])]
            child = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), "--serve", address, *flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            try:
                real = child.stdout.readline().strip()
                runner.run(measure(real, given.names, given.seconds, spin))
            finally:
                child.communicate()


if __name__ == "__main__":
    main()
