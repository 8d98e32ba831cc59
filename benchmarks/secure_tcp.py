"""TCP with each kind of protection beside bare TCP in one run: large arrays, lone and many calls.

    python benchmarks/secure_tcp.py [--kinds bare,frames,large,hashes,secret,certificates]
                                    [--asyncio] [--mib 16] [--rounds 15]

    bare           nothing: no option gives this, it is what the others are compared with
    frames         authenticated frames, AES-256-GCM (the extra `tls`)
    large          authenticated frames without the extra: AES-256-GCM for large records
    hashes         authenticated frames with the hashes of the standard library alone
    secret         TLS by the secret alone
    certificates   TLS with certificates

The other end is a process of its own. Rounds of all kinds alternate, and the best of each counts,
because other load only makes them slower. Goals: frames at least 60 % of the throughput of bare
TCP, many calls within 10 %; TLS at least 30 % of the throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
from aiograd.rpc.link import handshaking
from aiograd.rpc.options import Options
from aiograd.rpc.transport.tls import TLS
from aiograd.wire.records import Protection

SECRET = b"only for this benchmark, loopback"
KINDS = ("bare", "frames", "large", "hashes", "secret", "certificates")
PROTECTION = {"large": Protection.LARGE, "hashes": Protection.HASHES}
LONE, AT_ONCE, BATCHES = 200, 100, 20


@inline
def size(x: Any) -> int:
    return int(x.size)


@inline
def same(x: Any) -> Any:
    return x


def issue(folder: Path) -> None:
    """Write a certificate for each worker, of one authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for rank in range(2):
        issued = authority.issue_cert(f"worker{rank}")
        issued.private_key_and_cert_chain_pem.write_to_path(folder / f"worker{rank}.pem")


def agent(rank: int, kind: str, folder: Path) -> Agent:
    pem = folder / f"worker{rank}.pem"
    tls = {"secret": "secret", "certificates": TLS(pem, pem, folder / "ca.pem")}.get(kind)
    return Agent(f"worker{rank}", rank, secret=SECRET, options=Options(tls=tls, timeout=600.0))


class Ports:
    """Which kind of protection the connections at a port get."""

    def __init__(self) -> None:
        self.kinds: dict[int, str] = {}
        self._needs_seal = handshaking.needs_seal
        handshaking.needs_seal = self.needs_seal
        handshaking.best_protection = lambda: PROTECTION.get(self._last, Protection.AEAD)
        self._last = ""

    def needs_seal(self, transport: Any) -> bool:
        ends = [transport.get_extra_info(name) for name in ("sockname", "peername")]
        found = [self.kinds.get(end[1]) for end in ends if isinstance(end, tuple)]
        self._last = next((kind for kind in found if kind), "")
        return self._last != "bare" and self._needs_seal(transport)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def measure(kinds: list[str], mib: int, rounds: int, folder: Path) -> None:
    ports, array = Ports(), np.ones(mib << 20, np.uint8)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--serve", str(folder), "--kinds", ",".join(kinds)),
        stdin=-1,
        stdout=-1,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    agents: dict[str, Agent] = {}
    for kind, (incarnation, address) in zip(
        kinds, json.loads(await child.stdout.readline()), strict=True
    ):
        ports.kinds[port_of(address)] = kind
        agents[kind] = here = agent(0, kind, folder)
        here.directory.add(PeerInfo("worker1", 1, bytes.fromhex(incarnation), (address,)))
        await here.call("worker1", size, (array,))
    found: dict[str, list[list[float]]] = {kind: [[], [], []] for kind in kinds}
    for _ in range(rounds):
        for kind, here in agents.items():
            began = time.perf_counter()
            await here.call("worker1", size, (array,))
            found[kind][0].append(array.nbytes / (time.perf_counter() - began) / 1e9)
        for kind, here in agents.items():
            began = time.perf_counter()
            for _ in range(LONE):
                await here.call("worker1", same, (1,))
            found[kind][1].append(LONE / (time.perf_counter() - began))
        for kind, here in agents.items():
            began = time.perf_counter()
            for _ in range(BATCHES):
                await asyncio.gather(*[here.call("worker1", same, (1,)) for _ in range(AT_ONCE)])
            found[kind][2].append(BATCHES * AT_ONCE / (time.perf_counter() - began))
    first = [max(each) for each in found[kinds[0]]]
    for kind in kinds:
        gigabytes, lone, many = (max(each) for each in found[kind])
        print(
            f"{kind:13s} {gigabytes:5.2f} GB/s ({gigabytes / first[0]:4.0%})"
            f"   lone call {1e6 / lone:5.1f} µs ({first[1] / lone - 1:+4.0%})"
            f"   many calls {many:7.0f} /s ({many / first[2] - 1:+4.0%})"
        )
    for here in agents.values():
        await here.close()
    child.stdin.close()
    await child.wait()


async def serve(kinds: list[str], folder: Path) -> None:
    """The other end: lives until its standard input ends."""
    ports, agents = Ports(), [agent(1, kind, folder) for kind in kinds]
    for kind, there in zip(kinds, agents, strict=True):
        await there.start("tcp:127.0.0.1:0")
        ports.kinds[port_of(there.info.addresses[0])] = kind
    told = [(there.incarnation.hex(), there.info.addresses[0]) for there in agents]
    print(json.dumps(told), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for there in agents:
        await there.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--asyncio", action="store_true")
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    plain_loop = args.asyncio or os.environ.get("BENCH_LOOP") == "asyncio"
    os.environ["BENCH_LOOP"] = "asyncio" if plain_loop else "uvloop"
    factory = asyncio.new_event_loop if plain_loop else uvloop.new_event_loop
    kinds = args.kinds.split(",")
    with asyncio.Runner(loop_factory=factory) as runner:
        if args.serve is not None:
            runner.run(serve(kinds, Path(args.serve)))
            return
        with tempfile.TemporaryDirectory() as folder:
            issue(Path(folder))
            runner.run(measure(kinds, args.mib, args.rounds, Path(folder)))


if __name__ == "__main__":
    main()
