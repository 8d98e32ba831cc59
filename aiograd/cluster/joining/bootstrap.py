"""Bring a worker up on this host: sockets, a private folder, the rendezvous, the secret.

    Bootstrap.open   secret ─▶ (name and rank from the coordinator) ─▶ listen ─▶ rank 0: write file
                                                                            └─▶ others: dial rank 0
    Bootstrap.close  remove the folder and the file

`rendezvous.py` knows the formats and files, `listening.py` chooses addresses; this module dials and
retries: a name that DNS does not know yet, and a coordinator that is late, are waited for, with a
line in the log every 5 s. The protocol after the connection is up is that of `member.py` and
`coordinator.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from aiograd.cluster.config import WorkerPlan
from aiograd.cluster.joining.folders import PrivateFolder, is_listening
from aiograd.cluster.joining.listening import (
    crosses_hosts,
    listen,
    listen_host,
    rendezvous_host,
    resolve_once,
    tell_with,
)
from aiograd.cluster.joining.rendezvous import Refusal, Rendezvous, RendezvousFile, find_secret
from aiograd.cluster.membership.forms import check_peer
from aiograd.cluster.membership.member import CONFIRM_TIMEOUT
from aiograd.cluster.processes.malloc import free_one_large_array
from aiograd.errors import AuthError, ProtocolError, RpcError, SecurityError, WorkerLost
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo, Whereabouts
from aiograd.rpc.retry import Backoff, RetryPolicy
from aiograd.rpc.runtime.runtime import Runtime
from aiograd.rpc.transport.interfaces import host_name, join_address
from aiograd.rpc.transport.network import is_local, is_loopback, split, split_tcp
from aiograd.rpc.transport.tls import TLS, check_own_certificate
from aiograd.wire.handshake import NO_CLUSTER
from aiograd.wire.names import check_name
from aiograd.wire.secrets import Secret

__all__ = ["Bootstrap"]

_log = logging.getLogger("aiograd.cluster")

NOTICE = 5.0  # seconds between two lines in the log about who is waited for
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
        # Path and content of the rendezvous file, if this worker wrote it.
        self._written: tuple[str, RendezvousFile] | None = None
        self._began = 0.0  # wall time
        # Name, rank and secret of the agent's probes.
        self._known: tuple[str, int, bytes | Mapping[str, bytes]] | None = None
        self.secret: Secret | None = None  # the one that all members share, once it is known
        self._next_notice = math.inf  # loop time of the next line about who is waited for
        self._secret_from_file = False  # the secret is the one that was in the rendezvous file
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
        self._next_notice = asyncio.get_running_loop().time() + NOTICE
        if isinstance(plan.options.tls, TLS):
            check_own_certificate(plan.options.tls, plan.name)
        while True:
            try:
                return await self._open_once(ops)
            except _SecretReplacedError:
                # The file was left by a run that has ended, and rank 0 has replaced it just now.
                _log.info("%s: rank 0 has written another secret; trying that", self._label)

    async def _open_once(self, ops: Mapping[str, Any]) -> tuple[Agent, PeerInfo | None]:
        plan = self._plan
        secret, generated = await self._find_secret()
        self.secret = None if isinstance(secret, Mapping) else Secret(secret)
        # Workers in one process share all memory: there is nobody to keep apart.
        if plan.network is None:
            plan.options.check_proof_of_names(secret)
        # Before listening and writing: nothing of the other rank 0 may be replaced.
        await self._check_only_rank_0(secret)
        name, rank = plan.name, plan.rank
        if rank is None:
            name, rank = await self._request_place(secret)
        # The coordinator makes the id; the others take it over from the coordinator.
        cluster = self._runtime.token_bytes(16) if plan.leads else None
        agent = self._agent(name, rank, secret, ops, cluster)
        self._known = name, -1, secret
        try:
            await self._listen(agent)
            # After listening: ranks that read the file dial these addresses at once.
            if plan.rendezvous is not None and plan.rendezvous.kind == "file" and plan.leads:
                self.write_file(agent, generated)
            if plan.leads or plan.coordinator is not None:
                return agent, plan.coordinator
            return agent, await self._dial_coordinator(agent, secret)
        except BaseException:
            await agent.close()
            raise

    def _agent(
        self,
        name: str,
        rank: int,
        secret: bytes | Mapping[str, bytes],
        ops: Mapping[str, Any] | None = None,
        cluster: bytes | None = None,
    ) -> Agent:
        host, locality = self._runtime.network.whereabouts()
        if cluster is None:
            cluster = self._invited_to
        agent = Agent(
            name,
            rank,
            secret=secret,
            options=self._plan.options,
            runtime=self._runtime,
            cluster=cluster,
            whereabouts=Whereabouts(host, locality, self._plan.labels),
            ops=ops,
        )
        agent.listener.tell = tell_with(self._plan.options)
        return agent

    @property
    def _invited_to(self) -> bytes:
        """The id of the cluster that the invitation is for; zeros if there is none."""
        # Another cluster may listen at the address by now, with the same secret.
        invitation = self._plan.invitation
        if invitation is None or not invitation.cluster:
            return NO_CLUSTER
        try:
            found = bytes.fromhex(invitation.cluster)
        except ValueError:
            found = b""
        if len(found) != len(NO_CLUSTER):
            raise RpcError("the invitation is damaged: its cluster id is not 32 hex digits")
        return found

    def make_probe(self) -> Agent:
        """Make an agent that dials in the name of this worker, to ask something."""
        assert self._known is not None
        return self._agent(*self._known)

    @property
    def _label(self) -> str:
        return self._plan.name or "a newcomer"

    def write_file(self, agent: Agent, generated: Secret | None) -> None:
        """Write the rendezvous file of a coordinator: where it listens, and a generated secret."""
        assert self._plan.rendezvous is not None
        path, (host, locality, _) = self._plan.rendezvous.location, agent.whereabouts
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._runtime.wall_time()))
        author = f"{agent.name} on {host}, process {os.getpid()}, at {when}"
        content = RendezvousFile(agent.info.addresses, generated, locality=locality, author=author)
        content.write(path)
        self._written = path, content

    def lead_on(self, agent: Agent) -> None:
        """Write the rendezvous file again, if there is one: newcomers must find the successor."""
        rendezvous = self._plan.rendezvous
        if rendezvous is None or rendezvous.kind != "file":
            return
        try:
            self.write_file(agent, self.secret if self._secret_from_file else None)
        except RpcError as error:
            _log.warning("%s: newcomers will not find it: %s", agent.name, error)

    def whereabouts(self) -> tuple[str, str]:
        """Return the name of this host, and what workers share that share its loopback."""
        return self._runtime.network.whereabouts()

    def publish_refusal(self, why: str, informed: Sequence[int]) -> bool:
        """Write into the file why the start was refused, for late ranks; False if there is none."""
        if self._written is None:
            return False
        # The file outlives this worker, until the next start replaces it: `close` leaves it alone.
        (path, _), self._written = self._written, None
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
            path, content = self._written
            # A successor, or the next start, may have replaced it: theirs has to stay.
            with contextlib.suppress(FileNotFoundError, AuthError, RpcError):
                if RendezvousFile.read(path) == content:
                    os.unlink(path)
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
        probe = self._agent(plan.name, 0, known)
        try:
            for address in self._usable(content.addresses, content.locality):
                # OSError: no process listens there any more, or one that has another secret.
                with contextlib.suppress(OSError, ProtocolError):
                    other = await probe.connect(address)
                    probe.directory.add(other)
                    # Joining the other rank 0, instead of just failing here, lets its membership
                    # refuse the start: both of rank 0 and all ranks that wait there get the reason.
                    join = "cluster.join", probe.info, world_size, ()
                    await probe.request(other, *join, timeout=plan.join_timeout)
        finally:
            await probe.close()

    # ── the secret ──────────────────────────────────────────────────────────────────────────────

    async def _find_secret(self) -> tuple[bytes | Mapping[str, bytes], Secret | None]:
        """Give the secret, or those by name; and a generated one that the file has to carry."""
        plan = self._plan
        if plan.secret is not None:
            return Secret(plan.secret), None
        rendezvous = plan.rendezvous
        if plan.invitation is not None:
            if plan.options.secret is None and plan.options.secret_file is None:
                if plan.invitation.secret is not None:
                    return plan.invitation.secret, None
                raise AuthError(
                    "this invitation carries no secret, because each member has its own: "
                    "give yours by Options(secret=...)"
                )
            rendezvous = Rendezvous("tcp", "invitation:0")
        if rendezvous is None:
            return plan.options.secret or Secret(self._runtime.token_bytes(32)), None
        secret = find_secret(
            rendezvous,
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
        self._secret_from_file = True
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
            self._notice(f"rank 0 to write {path}", None)
            if not await backoff.pause():
                refusal = content.refusal if content is not None else None
                before = f"; an earlier start was refused: {refusal.why}" if refusal else ""
                raise RpcError(
                    f"rank 0 did not write its address into {path} in time{before}"
                    f" (waited {self._plan.join_timeout:g} s on {host_name()}: is rank 0 running, "
                    "and does it see the same folder?)"
                )

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
        plan = self._plan
        addresses = plan.listen or await self._choose_addresses()
        for address in addresses:
            if address.startswith("unix:"):
                _remove_stale_socket(address.removeprefix("unix:"))
        try:
            await listen(agent, addresses, plan.options.ports)
        except (SecurityError, RpcError):
            raise  # they are OSErrors too, and say more than "cannot listen"
        except OSError as error:
            where = ", ".join(addresses)
            raise RpcError(f"cannot listen at {where} on {host_name()}: {error}") from error

    async def _choose_addresses(self) -> list[str]:
        """Choose where to listen: the rendezvous for rank 0, a Unix socket, a TCP port."""
        plan, rendezvous = self._plan, self._plan.rendezvous
        if rendezvous is None and plan.invitation is None and (plan.world_size or 1) == 1:
            return []
        if rendezvous is not None and rendezvous.kind == "memory":
            own = f"{rendezvous.address}/{self._runtime.token_bytes(8).hex()}"
            return [rendezvous.address if plan.leads else own]
        # A Unix socket beside the TCP port: it is faster for peers on the same host.
        transport = plan.options.transport
        if transport == "auto" and not hasattr(socket, "AF_UNIX"):
            transport = "tcp"  # Windows
        kind = rendezvous.kind if rendezvous is not None else "invitation"
        addresses = []
        if transport in ("auto", "unix") and not (plan.leads and kind == "unix"):
            if self._folder is None:
                self._folder = PrivateFolder()
            addresses.append(f"unix:{self._folder.path}/w")
        if plan.leads and kind == "unix":
            addresses.append(f"unix:{rendezvous.location}" if rendezvous is not None else "")
        if plan.leads and kind == "tcp" and rendezvous is not None:
            host, port = await rendezvous_host(plan.options, rendezvous.location, resolve_once)
            addresses.append(join_address(host, port))
        elif transport == "tcp" or (transport == "auto" and await self._crosses_hosts()):
            addresses.append(join_address(*await self._tcp_place()))
        return addresses

    async def _crosses_hosts(self) -> bool:
        rendezvous = self._plan.rendezvous
        if self._plan.leads:
            if rendezvous is None:  # ranks of MPI, which knows where they are
                return self._plan.options.listen is not None
            return crosses_hosts(rendezvous, self._plan.options)
        told, _ = await self._told_addresses()
        return any(not is_local(address) for address in told)

    async def _tcp_place(self) -> tuple[str, int]:
        """Return host and port for TCP, other than at the rendezvous."""
        options, coordinator = self._plan.options, ""
        if not self._plan.leads:
            told, locality = await self._told_addresses()
            usable = [each for each in self._usable(told, locality) if each.startswith("tcp:")]
            # A coordinator on this host may have both; others can reach what is not local.
            usable.sort(key=is_local)
            coordinator = usable[0] if usable else "tcp:127.0.0.1:0"
        elif not await self._crosses_hosts():
            coordinator = "tcp:127.0.0.1:0"
        return await listen_host(options, coordinator, self._resolve)

    async def _resolve(self, name: str) -> list[str]:
        """Ask DNS for a name until it is known; RpcError at the deadline."""
        backoff = self._backoff()
        while not (found := await resolve_once(name)):
            self._notice(f"DNS to know {name}", None)
            if not await backoff.pause():
                raise RpcError(
                    f"the name {name} of the coordinator is not known on {host_name()} "
                    f"(asked DNS for {self._plan.join_timeout:g} s): mend the name, or wait for "
                    "its service to exist and give more patience"
                )
        return found

    def _backoff(self) -> Backoff:
        clock = asyncio.get_running_loop().time
        return Backoff(RETRY, self._runtime.random, clock, self._deadline)

    # ── finding the coordinator ─────────────────────────────────────────────────────────────────

    async def _request_place(self, secret: bytes | Mapping[str, bytes]) -> tuple[str, int]:
        """Let the coordinator assign rank and, unless it is given, name, over a connection.

        The handshake of the real agent carries both, so they must be known before it.
        """
        plan = self._plan
        # Under our own name, if we have one: the secret may be for this name only.
        name = plan.name or f"newcomer-{self._runtime.token_bytes(8).hex()}"
        probe = self._agent(name, -1, secret)
        try:
            coordinator = await self._dial_coordinator(probe, secret)
            probe.directory.add(coordinator)
            with self.refusal_for_loss():
                asked = bool(plan.name), plan.key
                place = probe.request(
                    coordinator, "cluster.place", *asked, timeout=plan.join_timeout
                )
                name, rank = await place
                return check_name(name), int(rank)
        finally:
            await probe.close()

    async def _told_addresses(self) -> tuple[Sequence[str], str]:
        """Return where the coordinator, or members, said to listen, and at which locality."""
        plan, rendezvous = self._plan, self._plan.rendezvous
        if plan.invitation is not None:
            return plan.invitation.addresses, plan.invitation.locality
        assert rendezvous is not None
        if rendezvous.kind == "file":
            # Read again each time: the file of a dead rank 0 may be replaced meanwhile.
            content = await self._wait_for_file()
            return content.addresses, content.locality
        return (rendezvous.address,), ""

    def _usable(self, addresses: Sequence[str], locality: str) -> list[str]:
        """Leave out Unix sockets and loopback of another host."""
        here = self._runtime.network.whereabouts()[1]
        if not locality or not here or locality == here:
            return list(addresses)
        return [address for address in addresses if not is_local(address)]

    async def _dial_coordinator(
        self, agent: Agent, secret: bytes | Mapping[str, bytes]
    ) -> PeerInfo:
        """Connect to the coordinator, retrying until the deadline: ranks start in any order."""
        plan, backoff = self._plan, self._backoff()
        while True:
            told, locality = await self._told_addresses()
            await self._check_secret_in_file(secret)
            failure: Exception | None = None
            strangers: list[str] = []
            usable = self._usable(told, locality)
            for address in usable:
                try:
                    await self._check_name(address)
                    peer = await agent.connect(address)
                    # A rank that is given is for rank 0 at the rendezvous, if that is all we know.
                    if plan.rank is not None and plan.invitation is None:
                        return peer
                    return await self._coordinator_of(agent, peer)
                except SecurityError:
                    # Another secret in the file: that of a run whose rank 0 has just come.
                    await self._check_secret_in_file(secret)
                    if not await self._is_other_cluster(address, secret):
                        raise  # retrying does not make the secrets equal
                    strangers.append(address)
                except OSError as error:
                    _log.debug("%s: no coordinator at %s yet: %s", self._label, address, error)
                    failure = error
            if strangers and len(strangers) == len(usable):
                raise AuthError(
                    f"another cluster listens at {', '.join(strangers)} now than the one that the "
                    "invitation is for: ask a member of that one for a new invitation"
                )
            where = self._where(usable)
            if not usable:
                failure = OSError(
                    f"{', '.join(told)} can be reached on their own host only: let the "
                    'coordinator listen beyond it, by Options(listen="0.0.0.0:0")'
                )
            self._notice(where, failure)
            if not await backoff.pause():
                raise RpcError(
                    f"nobody answered at {where} in time; is rank 0 running? "
                    f"(tried for {plan.join_timeout:g} s from {host_name()}: {failure})"
                )

    async def _is_other_cluster(self, address: str, secret: bytes | Mapping[str, bytes]) -> bool:
        """Whether a worker listens there that knows the secret, but not the cluster we look for.

        It has refused us without a word, as it refuses all. As a newcomer to any cluster we hear
        which one it is.
        """
        if self._invited_to == NO_CLUSTER:
            return False
        name = self._plan.name or f"newcomer-{self._runtime.token_bytes(8).hex()}"
        scout = self._agent(name, -1, secret, cluster=NO_CLUSTER)
        try:
            await scout.connect(address)
            return scout.cluster != self._invited_to
        except (OSError, ProtocolError):  # SecurityError is an OSError
            return False
        finally:
            await scout.close()

    async def _check_name(self, address: str) -> None:
        """Raise OSError for a name that DNS does not know yet."""
        scheme, _ = split(address)
        if scheme != "tcp" or self._plan.network is not None:
            return
        host, _ = split_tcp(address)
        if not is_loopback(host) and not await resolve_once(host):
            raise OSError(f"the name {host} is not known to DNS on {host_name()}")

    async def _coordinator_of(self, agent: Agent, peer: PeerInfo) -> PeerInfo:
        """Follow a member to the coordinator; OSError if that cannot be reached from here."""
        agent.directory.add(peer)
        found = await agent.request(peer, "cluster.coordinator", timeout=CONFIRM_TIMEOUT)
        check_peer(found, "cluster.coordinator", peer)
        if found.incarnation == peer.incarnation:
            return peer
        failure: OSError = ConnectionRefusedError(f"{found.name} is the coordinator")
        for address in self._usable(found.addresses, found.locality):
            try:
                return await agent.connect(address)
            except SecurityError:
                raise
            except OSError as error:
                failure = error
        raise failure

    def _where(self, usable: Sequence[str]) -> str:
        rendezvous = self._plan.rendezvous
        if rendezvous is None:
            return ", ".join(usable) or "any address of the invitation"
        if rendezvous.kind != "file":
            return rendezvous.location
        content = RendezvousFile.read(rendezvous.location)
        author = f", which {content.author} wrote" if content and content.author else ""
        return f"{', '.join(usable) or 'any address'} (from {rendezvous.location}{author})"

    async def _check_secret_in_file(self, secret: bytes | Mapping[str, bytes]) -> None:
        """Raise if the file has another secret than the one that this worker took from it."""
        rendezvous = self._plan.rendezvous
        if not self._secret_from_file or rendezvous is None:
            return
        content = RendezvousFile.read(rendezvous.location)
        if content is not None and content.secret is not None and content.secret != secret:
            raise _SecretReplacedError

    def _notice(self, what: str, error: Exception | None) -> None:
        """Log who is waited for, every 5 s; a person may wait for it."""
        now = asyncio.get_running_loop().time()
        if now < self._next_notice:
            return
        self._next_notice = now + NOTICE
        left = self._deadline - now
        _log.warning(
            "%s on %s waits for %s, %.0f s more%s",
            self._label,
            host_name(),
            what,
            max(left, 0.0),
            f" (last: {error})" if error is not None else "",
        )


class _SecretReplacedError(Exception):
    """Rank 0 has written another secret into the file than the one that was read before."""


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
