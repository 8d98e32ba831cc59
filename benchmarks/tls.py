"""TLS beside plain TCP in the same run: throughput of large arrays, and the time to connect.

    python benchmarks/tls.py [--asyncio] [--apart] [--mib 16] [--rounds 15]

Both ends live in one loop, so one core does all the work of both; with --apart the other end is a
process of its own. Rounds of both kinds alternate, and the best of each counts, because other load
only makes them slower; CPU time says more on a busy machine. Goals: TLS at least 35 %
of plain, a connection in 10 ms. In one loop AES-256-GCM alone, there and back, takes half the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import trustme
import uvloop

from aiograd.rpc.agent import Agent
from aiograd.rpc.api import inline
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.rpc.transport.tls import TLS

SECRET = b"only for this benchmark, loopback"
CONNECTS = 30


@inline
def size(x: Any) -> int:
    return int(x.size)


def issue(folder: Path, *names: str) -> list[TLS]:
    """A certificate for each worker, of one authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    made = []
    for name in names:
        issued = authority.issue_cert(name)
        issued.private_key_and_cert_chain_pem.write_to_path(folder / f"{name}.pem")
        pem = folder / f"{name}.pem"
        made.append(TLS(pem, pem, folder / "ca.pem"))
    return made


def agent(rank: int, tls: TLS | None) -> Agent:
    return Agent(f"worker{rank}", rank, secret=SECRET, options=Options(tls=tls, timeout=600.0))


class Pair:
    """Two workers over TCP, the second one optionally in a process of its own."""

    def __init__(self, papers: list[TLS] | None, apart: bool) -> None:
        self._papers: list[Any] = papers or [None, None]
        self._apart = apart
        self._child: asyncio.subprocess.Process | None = None
        self._there: Agent | None = None

    async def __aenter__(self) -> Pair:
        self.here = agent(0, self._papers[0])
        await self.here.start("tcp:127.0.0.1:0")
        if self._apart:
            pem = str(self._papers[1].cert) if self._papers[1] else ""
            self._child = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--serve", pem, stdin=-1, stdout=-1
            )
            assert self._child.stdout is not None
            incarnation, address = (await self._child.stdout.readline()).decode().split()
            there = PeerInfo("worker1", 1, bytes.fromhex(incarnation), (address,))
        else:
            self._there = agent(1, self._papers[1])
            await self._there.start("tcp:127.0.0.1:0")
            there = self._there.info
        self.here.directory.add(there)
        await self.here.call("worker1", size, (np.zeros(1),))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.here.close()
        if self._there is not None:
            await self._there.close()
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            await self._child.wait()

    async def send(self, array: np.ndarray) -> tuple[float, float]:
        """GB of a large argument per second of wall time, and of the sender's CPU time."""
        began, used = time.perf_counter(), time.process_time()
        await self.here.call("worker1", size, (array,))
        took, used = time.perf_counter() - began, time.process_time() - used
        return array.nbytes / took / 1e9, array.nbytes / used / 1e9

    async def connect(self) -> tuple[float, float]:
        """Milliseconds from a new worker's first call to its reply, and of CPU time."""
        assert self._there is not None
        newcomer = Agent("worker0", 2, secret=SECRET, options=self.here.options)
        newcomer.directory.add(self._there.info)
        began, used = time.perf_counter(), time.process_time()
        await newcomer.call("worker1", size, (np.zeros(1),))
        took, used = time.perf_counter() - began, time.process_time() - used
        await newcomer.close()
        return took * 1e3, used * 1e3


async def measure(mib: int, rounds: int, apart: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        certificates = issue(Path(folder), "worker0", "worker1")
        array = np.ones(mib << 20, np.uint8)
        async with Pair(None, apart) as plain, Pair(certificates, apart) as secure:
            for pair in (plain, secure):
                await pair.send(array)
            found = [(await plain.send(array), await secure.send(array)) for _ in range(rounds)]
            for number, what in enumerate(("second", "CPU second of the sender")):
                before, after = (
                    max(each[number] for each in side) for side in zip(*found, strict=True)
                )
                ratio = f"{after / before:.0%}"
                print(f"GB per {what}: plain {before:.2f}, TLS {after:.2f}: {ratio}")
            if not apart:
                for name, pair in (("plain", plain), ("TLS", secure)):
                    times = [await pair.connect() for _ in range(CONNECTS)]
                    took, used = (statistics.median(each) for each in zip(*times, strict=True))
                    print(f"connect, {name}: median {took:.1f} ms, of them CPU {used:.1f} ms")


async def serve(pem: str) -> None:
    """The other end: lives until its standard input ends."""
    certificate = TLS(pem, pem, Path(pem).parent / "ca.pem") if pem else None
    there = agent(1, certificate)
    await there.start("tcp:127.0.0.1:0")
    print(there.incarnation.hex(), there.info.addresses[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await there.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--asyncio", action="store_true")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    plain_loop = args.asyncio or os.environ.get("BENCH_LOOP") == "asyncio"
    os.environ["BENCH_LOOP"] = "asyncio" if plain_loop else "uvloop"
    factory = asyncio.new_event_loop if plain_loop else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        if args.serve is not None:
            runner.run(serve(args.serve))
        else:
            print("asyncio" if plain_loop else "uvloop", "apart" if args.apart else "in one loop")
            runner.run(measure(args.mib, args.rounds, args.apart))


if __name__ == "__main__":
    main()
