"""Several hosts, as far as the kernel is concerned: network namespaces on one virtual switch.

    async with network(3) as hosts:
        a = await hosts[0].program()
        await a.do("worker = await ag.init_rpc('a', rank=0, rendezvous='10.78.0.1:29500')")

Each host has an address, `/etc/hosts` of its own, and a cable that can be cut. Making them takes
root and the `ip` command; tests that need them are skipped without.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.namespaces import ip, possible

__all__ = ["Host", "Program", "network", "possible"]

ROOT = Path(__file__).parents[2]
# Runs what it reads, one JSON text per line, as the body of an async function; answers likewise.
PROGRAM = """
import asyncio, json, sys, traceback
import aiograd as ag
async def main():
    names = {"ag": ag, "asyncio": asyncio}
    loop = asyncio.get_running_loop()
    async def run(number, code):
        body = "".join(f"    {line}\\n" for line in code.splitlines())
        try:
            exec(f"async def body():\\n    global worker, task\\n{body}", names)
            answer = {"value": await names["body"]()}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"number": number, **answer}, default=repr), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        number, code = json.loads(line)
        loop.create_task(run(number, code))
asyncio.run(main())
"""


class Program:
    """A Python program on one host, which runs what a test sends it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    def start(self, code: str) -> asyncio.Future[Any]:
        """Send the body of an async function; gives its result, AssertionError if it raised."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        line = json.dumps([self._number, textwrap.dedent(code).strip()])
        self.process.stdin.write(f"{line}\n".encode())
        return answer

    async def do(self, code: str, within: float = 40.0) -> Any:
        """Run the body of an async function there, and return its result."""
        async with asyncio.timeout(within):
            return await self.start(code)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            answer = json.loads(line)
            future = self._answers.pop(answer["number"])
            if "error" in answer:
                future.set_exception(AssertionError(answer["error"]))
            else:
                future.set_result(answer["value"])
        for future in self._answers.values():
            if not future.done():
                future.set_exception(AssertionError("the program ended"))

    def kill(self) -> None:
        """End it at once, as a crash does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill it, and wait for its end."""
        self.kill()
        await self.process.wait()
        self._reading.cancel()
        await asyncio.wait([self._reading])


class Host:
    """One namespace with the address 10.78.0.<number>."""

    def __init__(self, namespace: str, switch: str, port: str, number: int) -> None:
        self.namespace, self.address = namespace, f"10.78.0.{number}"
        self._switch, self._port = switch, port
        self.device = "eth0"
        self.etc = Path("/etc/netns", namespace)
        self._programs: list[Program] = []

    def know(self, text: str) -> None:
        """Write /etc/hosts of this host; also while programs run on it."""
        (self.etc / "hosts").write_text(text)  # in place: programs have this file mounted

    def plug(self, state: str) -> None:
        """Set the cable "down" or "up"; while it is down, packets are dropped silently."""
        assert ip("-n", self._switch, "link", "set", self._port, state)

    def exec(self, *words: str) -> list[str]:
        """Return the command that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    async def program(self, stderr: Any = None) -> Program:
        """Start a program here."""
        process = await asyncio.create_subprocess_exec(
            *self.exec(sys.executable, "-c", PROGRAM),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        self._programs.append(Program(process))
        return self._programs[-1]

    async def close(self) -> None:
        """End the programs on this host."""
        for program in self._programs:
            await program.close()


@contextlib.asynccontextmanager
async def network(count: int) -> AsyncIterator[list[Host]]:
    """Make hosts on one switch, and remove them and their programs at the end."""
    mark = f"ah{os.getpid() % 10000}"
    switch = f"{mark}s"
    hosts = [Host(f"{mark}{i}", switch, f"{mark}p{i}", i + 1) for i in range(count)]
    try:
        assert ip("netns", "add", switch)
        assert ip("-n", switch, "link", "add", "br0", "type", "bridge")
        assert ip("-n", switch, "link", "set", "br0", "up")
        for i, host in enumerate(hosts):
            space, inner, outer = host.namespace, f"{mark}c{i}", f"{mark}p{i}"
            host.etc.mkdir(parents=True)
            host.know("127.0.0.1 localhost\n")
            assert ip("netns", "add", space)
            assert ip("link", "add", inner, "type", "veth", "peer", "name", outer)
            assert ip("link", "set", inner, "netns", space)
            assert ip("-n", space, "link", "set", inner, "name", host.device)
            assert ip("link", "set", outer, "netns", switch)
            assert ip("-n", switch, "link", "set", outer, "master", "br0", "up")
            assert ip("-n", space, "addr", "add", f"{host.address}/24", "dev", host.device)
            assert ip("-n", space, "link", "set", host.device, "up")
            assert ip("-n", space, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            await host.close()
            ip("netns", "del", host.namespace)
            shutil.rmtree(host.etc, ignore_errors=True)
        ip("netns", "del", switch)
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")  # ours, if nobody else has namespaces
