"""Bring a worker up on this host: sockets, a private folder, the rendezvous, the secret.

    Bootstrap.open   secret ─▶ (rank from the coordinator) ─▶ listen ─▶ rank 0: write the file
                                                                   └─▶ others: dial rank 0
    Bootstrap.close  remove the folder and the file

`rendezvous.py` knows the formats and files; this module listens, dials and retries. The protocol
after the connection is up is that of `member.py` and `coordinator.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import stat
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from aiograd.cluster.config import WorkerPlan
from aiograd.cluster.folders import PrivateFolder, is_listening
from aiograd.cluster.processes.malloc import free_one_large_array
from aiograd.cluster.rendezvous import Refusal, Rendezvous, RendezvousFile, find_secret
from aiograd.errors import ProtocolError, RpcError, SecurityError, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.retry import Backoff, RetryPolicy
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.transport.network import split_tcp
from aiograd.rpc.transport.tls import TLS, check_own_certificate
from aiograd.wire.handshake import NO_CLUSTER
from aiograd.wire.secrets import Secret

__all__ = ["Bootstrap"]

_log = logging.getLogger("aiograd.cluster")

# Seconds that a new rank 0 has to replace the refusal that an earlier start left in the file.
REPLACE_GRACE = 0.5
# Between attempts to find rank 0: short pauses at first, because the ranks of one job usually start
# together, and rank 0 listens a moment later. `WorkerPlan.join_timeout` ends the attempts. No
# jitter: processes start at times of their own.
RETRY = RetryPolicy(attempts=math.inf, first_pause=0.005, factor=1.5, longest_pause=0.2, jitter=0.0)


class Bootstrap:
    """What one worker occupies on its host, from `open` to `close`."""

    def __init__(self, plan: WorkerPlan, environment: MutableMapping[str, str]) -> None:
        self._plan = plan
        self._environment = environment
        # Random numbers, clocks and sockets come from here, so that a simulator can replace them.
        self._runtime = Runtime(plan.network, spin=plan.spin, crowded=plan.crowded)
        self._deadline = math.inf  # loop time; for everything until the coordinator answers
        self._folder: PrivateFolder | None = None  # of our Unix sockets
        self._written: str | None = None  # path of the rendezvous file, if this rank 0 wrote it
        self._began = 0.0  # wall time
        # The refusal that was in the file, and the loop time from which on it counts for us.
        self._seen_refusal: tuple[Refusal, float] | None = None

    async def open(self, ops: Mapping[str, Any]) -> tuple[Agent, PeerInfo | None]:
        """Give a listening agent, and the coordinator's address unless it is this worker.

        RpcError or AuthError if that fails; then the agent is closed, and `close` removes the rest.
        """
        plan = self._plan
        if plan.network is None:  # in a process of its own, where large arrays come and go
            free_one_large_array()
        self._deadline = asyncio.get_running_loop().time() + plan.join_timeout
        self._began = self._runtime.wall_time()
        if isinstance(plan.options.tls, TLS):
            check_own_certificate(plan.options.tls, plan.name)
        secret, generated = await self._find_secret()
        # Workers in one process share all memory: there is nobody to keep apart.
        if plan.network is None:
            plan.options.check_proof_of_names(secret)
        # Before listening and writing: nothing of the other rank 0 may be replaced.
        await self._check_only_rank_0(secret)
        rank = plan.rank
        if rank is None:
            rank = await self._request_rank(secret)
        agent = Agent(
            plan.name,
            rank,
            secret=secret,
            options=plan.options,
            runtime=self._runtime,
            # The coordinator makes the id; the others take it over from the coordinator.
            cluster=self._runtime.token_bytes(16) if plan.leads else NO_CLUSTER,
            ops=ops,
        )
        try:
            await self._listen(agent)
            # After listening: ranks that read the file dial these addresses at once.
            if plan.rendezvous is not None and plan.rendezvous.kind == "file" and plan.leads:
                RendezvousFile(agent.info.addresses, generated).write(plan.rendezvous.location)
                self._written = plan.rendezvous.location
            if plan.leads or plan.coordinator is not None:
                return agent, plan.coordinator
            return agent, await self._dial_coordinator(agent)
        except BaseException:
            await agent.close()
            raise

    def publish_refusal(self, why: str, informed: Sequence[int]) -> bool:
        """Write into the file why the start was refused, for late ranks; False if there is none."""
        if self._written is None:
            return False
        # The file outlives this worker, until the next start replaces it: `close` leaves it alone.
        path, self._written = self._written, None
        refusal = Refusal(why, self._runtime.wall_time(), tuple(informed))
        try:
            RendezvousFile((), refusal=refusal).write(path)
        except RpcError as error:
            _log.warning("%s: cannot tell late ranks of the refusal: %s", self._plan.name, error)
        return True

    @contextlib.contextmanager
    def refusal_for_loss(self) -> Iterator[None]:
        """Raise RpcError with the refusal in the file, if there is one, in place of WorkerLost.

        For requests to rank 0 before it has admitted this worker.
        """
        try:
            yield
        except WorkerLost as error:
            # Rank 0 replaces its addresses by the refusal and then closes. A rank that read them
            # before, and is connected when rank 0 closes, may not have been heard there: only the
            # end of the connection reaches it. It dialled the addresses that were in the file, so
            # the refusal that replaced them is about its own start, however old it is.
            rendezvous = self._plan.rendezvous
            if rendezvous is None or rendezvous.kind != "file":
                raise
            content = RendezvousFile.read(rendezvous.location)
            if content is None or content.refusal is None:
                raise
            raise RpcError(content.refusal.why) from error

    async def close(self) -> None:
        """Remove the folder of sockets and the rendezvous file."""
        if self._written is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._written)
        if self._folder is not None:
            self._folder.close()
        self._written = self._folder = None

    async def _check_only_rank_0(self, secret: bytes | Mapping[str, bytes]) -> None:
        """Raise RpcError if another rank 0 that is alive has written the file."""
        plan, rendezvous = self._plan, self._plan.rendezvous
        if rendezvous is None or rendezvous.kind != "file" or not plan.leads:
            return
        # Two of rank 0 would each replace the file of the other: ranks would find either of them,
        # and both worlds would stay incomplete.
        content = RendezvousFile.read(rendezvous.location)
        if content is None or content.refusal is not None:
            return
        known, world_size = content.secret or secret, plan.world_size
        probe = Agent(plan.name, 0, secret=known, options=plan.options, runtime=self._runtime)
        try:
            for address in content.addresses:
                # OSError: no process listens there any more, or one that has another secret.
                with contextlib.suppress(OSError, ProtocolError):
                    other = await probe.connect(address)
                    probe.directory.add(other)
                    # Joining the other rank 0, instead of just failing here, lets its membership
                    # refuse the start: both of rank 0 and all ranks that wait there get the reason.
                    join = "cluster.join", probe.info, world_size
                    await probe.request(other, *join, timeout=plan.join_timeout)
        finally:
            await probe.close()

    # ── the secret ──────────────────────────────────────────────────────────────────────────────

    async def _find_secret(self) -> tuple[bytes | Mapping[str, bytes], Secret | None]:
        """Give the secret, or those by name; and a generated one that the file has to carry."""
        plan = self._plan
        if plan.secret is not None:
            return Secret(plan.secret), None
        if plan.rendezvous is None:
            return plan.options.secret or Secret(self._runtime.token_bytes(32)), None
        secret = find_secret(
            plan.rendezvous,
            secret=plan.options.secret,
            secret_file=plan.options.secret_file,
            environment=self._environment,
            token=self._runtime.token_bytes,
        )
        if secret is not None:
            return secret, None
        if plan.leads:
            generated = Secret(self._runtime.token_bytes(32))
            return generated, generated
        content = await self._wait_for_file(with_secret=True)
        assert content.secret is not None
        return content.secret, None

    async def _wait_for_file(self, with_secret: bool = False) -> RendezvousFile:
        """Poll the rendezvous file until rank 0 has written it; RpcError at the deadline."""
        assert self._plan.rendezvous is not None
        path = self._plan.rendezvous.location
        backoff = self._backoff()
        while True:
            content = RendezvousFile.read(path)
            if content is not None and content.refusal is not None:
                self._check_refusal(content.refusal)
            elif content is not None and (content.secret is not None or not with_secret):
                return content
            if not await backoff.pause():
                refusal = content.refusal if content is not None else None
                before = f"; an earlier start was refused: {refusal.why}" if refusal else ""
                raise RpcError(f"rank 0 did not write its address into {path} in time{before}")

    def _check_refusal(self, refusal: Refusal) -> None:
        """Raise the reason of rank 0, unless the refusal is about another start than ours."""
        now = asyncio.get_running_loop().time()
        if self._seen_refusal is None or self._seen_refusal[0] != refusal:
            # One from before we began may be left over from the last start. If so, the next rank 0
            # is about to replace it. If it stays, rank 0 of our own start was faster than we were.
            grace = REPLACE_GRACE if refusal.at < self._began else 0.0
            applies = refusal.applies_to(self._plan.rank, self._runtime.wall_time())
            self._seen_refusal = refusal, now + grace if applies else math.inf
        if now >= self._seen_refusal[1]:
            raise RpcError(refusal.why)

    # ── listening ───────────────────────────────────────────────────────────────────────────────

    async def _listen(self, agent: Agent) -> None:
        addresses = self._plan.listen or await self._choose_addresses()
        for address in addresses:
            if address.startswith("unix:"):
                _remove_stale_socket(address.removeprefix("unix:"))
        try:
            await agent.start(*addresses)
        except SecurityError:
            raise  # it is an OSError too, and says more than "cannot listen"
        except OSError as error:
            raise RpcError(f"cannot listen at {', '.join(addresses)}: {error}") from error

    async def _choose_addresses(self) -> list[str]:
        """Choose where to listen: the rendezvous for rank 0, a Unix socket, a TCP port."""
        plan, rendezvous = self._plan, self._plan.rendezvous
        if rendezvous is None:
            return []
        if rendezvous.kind == "memory":
            own = f"{rendezvous.address}/{self._runtime.token_bytes(8).hex()}"
            return [rendezvous.address if plan.leads else own]
        # A Unix socket beside the TCP port: it is faster for peers on the same host.
        transport = plan.options.transport
        if transport == "auto" and not hasattr(socket, "AF_UNIX"):
            transport = "tcp"  # Windows
        addresses = []
        if transport in ("auto", "unix") and not (plan.leads and rendezvous.kind == "unix"):
            if self._folder is None:
                self._folder = PrivateFolder()
            addresses.append(f"unix:{self._folder.path}/w")
        one_host = rendezvous.local or rendezvous.kind == "file"
        if plan.leads and rendezvous.kind != "file":
            addresses.append(rendezvous.address)
        elif transport == "tcp" or not (transport == "unix" or one_host):
            addresses.append(f"tcp:{await self._reachable_host(rendezvous)}:0")
        return addresses

    async def _reachable_host(self, rendezvous: Rendezvous) -> str:
        """Give the address of this host from which the coordinator's host is reached."""
        if rendezvous.kind != "tcp" or rendezvous.local:
            return "127.0.0.1"
        host, port = split_tcp(rendezvous.address)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        # Connecting a datagram socket sends no packet; it makes the kernel choose the interface
        # that routes there. A host name may resolve to loopback, or to the wrong interface.
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
        return f"[{own}]" if family == socket.AF_INET6 else own

    def _backoff(self) -> Backoff:
        clock = asyncio.get_running_loop().time
        return Backoff(RETRY, self._runtime.random, clock, self._deadline)

    # ── finding the coordinator ─────────────────────────────────────────────────────────────────

    async def _request_rank(self, secret: bytes | Mapping[str, bytes]) -> int:
        """Let the coordinator assign a rank, over a connection of its own.

        The handshake of the real agent carries its rank, so the rank must be known before it.
        """
        plan = self._plan
        # Under our own name: the secret may be for this name only.
        probe = Agent(plan.name, -1, secret=secret, options=plan.options, runtime=self._runtime)
        try:
            coordinator = await self._dial_coordinator(probe)
            probe.directory.add(coordinator)
            with self.refusal_for_loss():
                rank = probe.request(coordinator, "cluster.rank", timeout=plan.join_timeout)
                return int(await rank)
        finally:
            await probe.close()

    async def _dial_coordinator(self, agent: Agent) -> PeerInfo:
        """Connect to rank 0, retrying until the deadline: ranks start in any order."""
        rendezvous = self._plan.rendezvous
        assert rendezvous is not None
        backoff = self._backoff()
        while True:
            addresses: tuple[str, ...] = (rendezvous.address,)
            if rendezvous.kind == "file":
                # Read again for each attempt: the file of a dead rank 0 may be replaced meanwhile.
                addresses = (await self._wait_for_file()).addresses
            failure: Exception | None = None
            for address in addresses:
                try:
                    return await agent.connect(address)
                except SecurityError:
                    raise  # retrying does not make the secrets equal
                except OSError as error:
                    _log.debug("%s: no rank 0 at %s yet: %s", self._plan.name, address, error)
                    failure = error
            if not await backoff.pause():
                where = rendezvous.location
                raise RpcError(
                    f"nobody answered at {where} in time; is rank 0 running? ({failure})"
                )


# ── sockets ─────────────────────────────────────────────────────────────────────────


def _remove_stale_socket(path: str) -> None:
    """Remove a socket whose process is gone; RpcError if a process still listens on it.

    The loop would remove it in both cases, and so take the address from the live worker.
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
