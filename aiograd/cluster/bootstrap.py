"""What a worker occupies on this host: sockets, a private folder, a sign at the rendezvous.

Opens them as the plan says, finds the coordinator there, and leaves nothing behind. What is said
over the connections is `members.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from aiograd.cluster.config import Plan
from aiograd.cluster.processes.malloc import free_one_large_array
from aiograd.cluster.rendezvous import Place, Sign, Verdict, find_secret
from aiograd.errors import ProtocolError, RpcError, SecurityError
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.transport.network import split_tcp
from aiograd.wire.secrets import Secret

__all__ = ["Premises", "is_listening", "private_folder"]

_log = logging.getLogger("aiograd")

LONGEST_PATH = 80  # characters of a folder for sockets: the kernel allows 107 in all
REPLACED = 0.5  # seconds for a new rank 0 to replace the verdict of an earlier start
LONGEST_PAUSE = 0.2  # seconds between two looks whether the coordinator is there, at most


class Premises:
    """The places of one worker, from `open` to `close`."""

    def __init__(self, plan: Plan, environment: MutableMapping[str, str]) -> None:
        self._plan = plan
        self._environment = environment
        self._runtime = Runtime(plan.network, spin=plan.spin, crowded=plan.crowded)
        self._deadline = math.inf  # loop time; for everything until the coordinator answers
        self._folder: str | None = None
        self._sign: str | None = None  # the file that rank 0 wrote
        self._began = 0.0  # wall time
        self._old_verdict: tuple[Verdict, float] | None = None  # that was there, and until when

    async def open(self, ops: Mapping[str, Any]) -> tuple[Agent, PeerInfo | None]:
        """Open everything; gives the agent, and the coordinator unless it is this worker."""
        plan = self._plan
        if plan.network is None:  # among processes, where large arrays come and go
            free_one_large_array()
        self._deadline = asyncio.get_running_loop().time() + plan.patience
        self._began = self._runtime.wall_time()
        secret, made = await self._secret()
        await self._check_only_rank_0(secret)
        rank = plan.rank
        if rank is None:
            rank = await self._ask_for_rank(secret)
        agent = Agent(
            plan.name, rank, secret=secret, options=plan.options, runtime=self._runtime, ops=ops
        )
        try:
            await self._listen(agent)
            if plan.place is not None and plan.place.kind == "file" and plan.leads:
                Sign(agent.info.addresses, made).write(plan.place.text)
                self._sign = plan.place.text
            if plan.leads or plan.coordinator is not None:
                return agent, plan.coordinator
            return agent, await self._find_coordinator(agent)
        except BaseException:
            await agent.close()
            raise

    def leave_verdict(self, why: str, told: Sequence[int]) -> bool:
        """Tell late ranks in the file that the start was refused; False if there is no file."""
        if self._sign is None:
            return False
        sign, self._sign = self._sign, None  # it stays, until the next start replaces it
        verdict = Verdict(why, self._runtime.wall_time(), tuple(told))
        try:
            Sign((), verdict=verdict).write(sign)
        except RpcError as error:
            _log.warning("%s: late ranks are not told: %s", self._plan.name, error)
        return True

    async def close(self) -> None:
        """Remove the folder and the sign."""
        if self._sign is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._sign)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._sign = self._folder = None

    async def _check_only_rank_0(self, secret: bytes | Mapping[str, bytes]) -> None:
        """Look whether another rank 0 has written the file and lives; RpcError if so.

        Joining it is how everybody hears of the clash: both of rank 0, and all who wait there.
        """
        plan, place = self._plan, self._plan.place
        if place is None or place.kind != "file" or not plan.leads:
            return
        sign = Sign.read(place.text)
        if sign is None or sign.verdict is not None:
            return
        known, world_size = sign.secret or secret, plan.world_size
        guest = Agent(plan.name, 0, secret=known, options=plan.options, runtime=self._runtime)
        try:
            for address in sign.addresses:
                # OSError: nobody is there any more, or somebody without our secret.
                with contextlib.suppress(OSError, ProtocolError):
                    other = await guest.connect(address)
                    guest.directory.add(other)
                    join = "cluster.join", guest.info, world_size
                    await guest.request(other, *join, timeout=plan.patience)
        finally:
            await guest.close()

    # ── the secret ──────────────────────────────────────────────────────────────────────────────

    async def _secret(self) -> tuple[bytes | Mapping[str, bytes], Secret | None]:
        """Find the secret, or those by name; and one that is new, to be told through the sign."""
        plan = self._plan
        if plan.secret is not None:
            return Secret(plan.secret), None
        if plan.place is None:
            return plan.options.secret or Secret(self._runtime.token_bytes(32)), None
        secret = find_secret(
            plan.place,
            secret=plan.options.secret,
            secret_file=plan.options.secret_file,
            environment=self._environment,
            token=self._runtime.token_bytes,
        )
        if secret is not None:
            return secret, None
        if plan.leads:
            made = Secret(self._runtime.token_bytes(32))
            return made, made
        sign = await self._read_sign(with_secret=True)
        assert sign.secret is not None
        return sign.secret, None

    async def _read_sign(self, with_secret: bool = False) -> Sign:
        assert self._plan.place is not None
        path = self._plan.place.text
        waits = _Waits(self._deadline)
        while True:
            sign = Sign.read(path)
            if sign is not None and sign.verdict is not None:
                self._heed(sign.verdict)
            elif sign is not None and (sign.secret is not None or not with_secret):
                return sign
            if not await waits.again():
                verdict = sign.verdict if sign is not None else None
                before = f"; an earlier start was refused: {verdict.why}" if verdict else ""
                raise RpcError(f"rank 0 did not write its address into {path} in time{before}")

    def _heed(self, verdict: Verdict) -> None:
        """Raise what rank 0 has decided, unless it was about another start than ours."""
        now = asyncio.get_running_loop().time()
        if self._old_verdict is None or self._old_verdict[0] != verdict:
            # One from before we began may be of the last start. Then the next rank 0 replaces it.
            old = verdict.at < self._began
            fits = verdict.is_for(self._plan.rank, self._runtime.wall_time())
            self._old_verdict = verdict, now + (REPLACED if old else 0.0) if fits else math.inf
        if now >= self._old_verdict[1]:
            raise RpcError(verdict.why)

    # ── listening ───────────────────────────────────────────────────────────────────────────────

    async def _listen(self, agent: Agent) -> None:
        addresses = self._plan.listen or await self._addresses()
        for address in addresses:
            if address.startswith("unix:"):
                _clear(address.removeprefix("unix:"))
        try:
            await agent.start(*addresses)
        except SecurityError:
            raise
        except OSError as error:
            raise RpcError(f"cannot listen at {', '.join(addresses)}: {error}") from error

    async def _addresses(self) -> list[str]:
        """Choose where to listen: the rendezvous for rank 0, a Unix socket, a TCP port."""
        plan, place = self._plan, self._plan.place
        if place is None:
            return []
        if place.kind == "memory":
            own = f"{place.address}/{self._runtime.token_bytes(8).hex()}"
            return [place.address if plan.leads else own]
        transport = plan.options.transport
        addresses = []
        if transport in ("auto", "unix") and not (plan.leads and place.kind == "unix"):
            if self._folder is None:
                self._folder = private_folder()
            addresses.append(f"unix:{self._folder}/w")
        if plan.leads and place.kind != "file":
            addresses.append(place.address)
        elif transport == "tcp" or not (transport == "unix" or place.local or place.kind == "file"):
            addresses.append(f"tcp:{await self._own_host(place)}:0")
        return addresses

    async def _own_host(self, place: Place) -> str:
        """The address of this host that the coordinator's host can reach."""
        if place.kind != "tcp" or place.local:
            return "127.0.0.1"
        host, port = split_tcp(place.address)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:  # a datagram socket connects without a packet
            probe.connect(address)
            own = str(probe.getsockname()[0])
        return f"[{own}]" if family == socket.AF_INET6 else own

    # ── finding the coordinator ─────────────────────────────────────────────────────────────────

    async def _ask_for_rank(self, secret: bytes | Mapping[str, bytes]) -> int:
        """Let the coordinator give a rank, asked by a guest that is gone again before we come."""
        plan = self._plan  # by our own name: it may be the only one that the secret is for
        guest = Agent(plan.name, -1, secret=secret, options=plan.options, runtime=self._runtime)
        try:
            coordinator = await self._find_coordinator(guest)
            guest.directory.add(coordinator)
            rank = guest.request(coordinator, "cluster.rank", timeout=self._plan.patience)
            return int(await rank)
        finally:
            await guest.close()

    async def _find_coordinator(self, agent: Agent) -> PeerInfo:
        """Dial the rendezvous until somebody answers."""
        place = self._plan.place
        assert place is not None
        waits = _Waits(self._deadline)
        while True:
            addresses: tuple[str, ...] = (place.address,)
            if place.kind == "file":
                addresses = (await self._read_sign()).addresses  # an old one may be replaced
            trouble: Exception | None = None
            for address in addresses:
                try:
                    return await agent.connect(address)
                except SecurityError:
                    raise
                except OSError as error:
                    trouble = error
            if not await waits.again():
                raise RpcError(
                    f"nobody answered at {place.text} in time; is rank 0 running? ({trouble})"
                )


class _Waits:
    """Pauses between attempts, longer and longer, until a deadline."""

    def __init__(self, deadline: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._pause = 0.005

    async def again(self) -> bool:
        left = self._deadline - self._loop.time()
        if left <= 0:
            return False
        await asyncio.sleep(min(self._pause, left))
        self._pause = min(self._pause * 1.5, LONGEST_PAUSE)
        return True


def private_folder() -> str:
    """Make a folder for sockets that only this user can enter, with a path short enough."""
    folder = tempfile.mkdtemp(prefix="aiograd-")  # mode 0700
    if len(folder) > LONGEST_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="aiograd-", dir="/tmp")
    return folder


def is_listening(path: str) -> bool:
    """Whether somebody accepts connections at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _clear(path: str) -> None:
    """Remove a socket that nobody listens on any more; one that is in use is an error.

    The loop would remove it in both cases, and take the name from whoever has it.
    """
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    if is_listening(path):
        raise RpcError(f"cannot listen at unix:{path}: another worker does (address in use)")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
