"""Connect to a running cluster without being a member of it, to look at it.

    run folder ─┐                       ┌─ "inspect.all" ─▶ coordinator, which asks all workers
    --join ─────┼─▶ Target ─▶ Guest ────┤
    AIOGRAD_* ──┘                       └─ it does not answer: the workers of this host, one by one

A guest authenticates as a worker does, by the secret of the cluster. It joins nothing: no member
hears of it, it has no rank, and it leaves by closing its connection. The name of a guest is its
own; in a cluster with a secret for each name, give the name that its secret is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aiograd.cluster.joining.rendezvous import (
    Rendezvous,
    RendezvousFile,
    find_secret,
    parse_rendezvous,
    read_secret_file,
)
from aiograd.errors import AiogradError, AuthError, RpcError
from aiograd.observe import blocked
from aiograd.observe.runfolder import RunRecord, records
from aiograd.observe.snapshot import SILENT, Data, WorkerRow, from_json
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.options import Options
from aiograd.wire.secrets import Secret

TIMEOUT: Final = 2.0  # seconds for each worker to answer the coordinator
_MORE: Final = 2.0  # seconds for the answer of the coordinator beyond that
_CONNECT: Final = 2.0  # seconds to connect; shorter than `Options.handshake_timeout`


class NoCluster(RpcError):
    """There is nothing to look at, or too much of it."""


class RpcTimeout(RpcError, TimeoutError):
    """Nobody answered."""


@dataclass(frozen=True)
class Target:
    """A cluster, and how to get in."""

    addresses: tuple[str, ...]  # of its coordinator
    secret: bytes | Mapping[str, bytes]
    label: str  # for people
    members: tuple[RunRecord, ...] = ()  # those of this host, if it was found here


# ── finding ─────────────────────────────────────────────────────────────────────────────────────


def find_target(
    join: str | None, options: Options, environment: Mapping[str, str], cluster: str | None = None
) -> Target:
    """Find the cluster that is meant; NoCluster if there is none, or if several could be."""
    join = join or (None if cluster else environment.get("AIOGRAD_RENDEZVOUS"))
    if join:
        return _joined(parse_rendezvous(join), options, environment)
    clusters = local_clusters()
    if cluster is not None:
        clusters = {key: each for key, each in clusters.items() if _is_meant(each, cluster)}
    if not clusters:
        which = f"no cluster {cluster}" if cluster else "no cluster"
        raise NoCluster(
            f"{which} of this user runs on this host; --join HOST:PORT looks at one elsewhere"
        )
    if len(clusters) > 1:
        lines = "\n".join(
            f"  --pid {_leader(each).pid}  {_label(each)}" for each in clusters.values()
        )
        raise NoCluster(f"several clusters run on this host; which one?\n{lines}")
    (members,) = clusters.values()
    leader = _leader(members)
    return Target(leader.addresses, _secret(leader, options), _label(members), tuple(members))


def local_clusters() -> dict[str, list[RunRecord]]:
    """Return the workers of this host by cluster, the coordinator first if it is here."""
    found: dict[str, list[RunRecord]] = {}
    for record in records():
        found.setdefault(record.cluster, []).append(record)
    for members in found.values():
        members.sort(key=lambda each: (not each.coordinator, each.rank))
    return found


def _leader(members: Sequence[RunRecord]) -> RunRecord:
    return members[0]


def _is_meant(members: Sequence[RunRecord], cluster: str) -> bool:
    return any(cluster in (str(each.pid), each.cluster) for each in members)


def _label(members: Sequence[RunRecord]) -> str:
    leader = _leader(members)
    since = time.strftime("%H:%M:%S", time.localtime(leader.started))
    return f"{leader.program or leader.name} (process {leader.pid}, since {since})"


def _secret(leader: RunRecord, options: Options) -> bytes | Mapping[str, bytes]:
    if options.secret is not None:
        return options.secret
    if isinstance(options.secret_file, str | os.PathLike):
        return read_secret_file(os.fspath(options.secret_file))
    if leader.secret is not None:
        return Secret(bytes.fromhex(leader.secret))
    if leader.secret_file is not None and os.path.exists(leader.secret_file):
        return read_secret_file(leader.secret_file)
    where = leader.rendezvous
    if where is not None:
        with contextlib.suppress(AuthError):
            rendezvous = parse_rendezvous(where)
            content = (
                RendezvousFile.read(rendezvous.location) if rendezvous.kind == "file" else None
            )
            if content is not None and content.secret is not None:
                return content.secret
            found = _given_secret(rendezvous, options, {})
            if found is not None:
                return found
    raise NoCluster(f"the cluster of process {leader.pid} has a secret of its own: --secret-file")


def _joined(rendezvous: Rendezvous, options: Options, environment: Mapping[str, str]) -> Target:
    label = f"the cluster at {rendezvous.location}"
    secret = _given_secret(rendezvous, options, environment)
    addresses: tuple[str, ...] = (rendezvous.address,)
    if rendezvous.kind == "file":
        content = RendezvousFile.read(rendezvous.location)
        if content is None or content.refusal is not None:
            raise NoCluster(f"no cluster has written its address into {rendezvous.location}")
        addresses, secret = content.addresses, secret or content.secret
    if secret is None:
        raise NoCluster(f"{label} needs a secret: --secret-file, or AIOGRAD_SECRET_FILE")
    return Target(addresses, secret, label)


def _given_secret(
    rendezvous: Rendezvous, options: Options, environment: Mapping[str, str]
) -> bytes | Mapping[str, bytes] | None:
    file = options.secret_file or environment.get("AIOGRAD_SECRET_FILE") or None
    return find_secret(
        rendezvous,
        secret=options.secret,
        secret_file=file,
        environment=dict(environment),  # a copy: our own is not to be changed
        token=os.urandom,
    )


# ── asking ──────────────────────────────────────────────────────────────────────────────────────


class Guest:
    """A connection to a cluster, to look at it; `connected` makes one."""

    def __init__(self, target: Target, agent: Agent) -> None:
        self.target = target
        self._agent = agent
        self._leader: PeerInfo | None = None

    async def snapshot(self, names: Iterable[str] | None = None, timeout: float = TIMEOUT) -> Data:
        """Take a snapshot; of the workers of this host alone if the coordinator does not answer."""
        wanted = None if names is None else list(names)
        try:
            return from_json(await self.ask("inspect.all", wanted, timeout))
        except (TimeoutError, ConnectionError, OSError) as error:
            if isinstance(error, AuthError) or not self.target.members:
                raise
            return await self._around(wanted, timeout, error)

    async def stacks(
        self, names: Iterable[str] | None = None, timeout: float = TIMEOUT
    ) -> dict[str, Any]:
        """Return the stacks of workers, by name."""
        wanted = None if names is None else list(names)
        found: dict[str, Any] = json.loads(await self.ask("inspect.stacks.all", wanted, timeout))
        return found

    async def logs(self, after: Mapping[str, int]) -> dict[str, tuple[int, list[str]]]:
        """Return what workers have written, by name: the number of the last line, and new lines."""
        found = json.loads(await self.ask("inspect.logs", dict(after)))
        return {name: (count, lines) for name, (count, lines) in found.items()}

    async def recording(self, seconds: float) -> dict[str, Any]:
        """Let all workers record what is called there; return their spans, and who gave none."""
        found: dict[str, Any] = json.loads(
            await self.ask("inspect.record.all", seconds, timeout=seconds + TIMEOUT)
        )
        return found

    async def ask(self, service: str, *args: Any, timeout: float = TIMEOUT) -> Any:
        """Ask a service of the coordinator."""
        if self._leader is None:
            self._leader = await self._dial(self.target.addresses)
        return await self._agent.request(self._leader, service, *args, timeout=timeout + _MORE)

    async def _dial(self, addresses: Iterable[str]) -> PeerInfo:
        failure: Exception = NoCluster("the cluster has no address")
        for address in addresses:
            try:
                # A blocked loop proves nothing, which is no reason to doubt the secret.
                async with asyncio.timeout(_CONNECT):
                    peer = await self._agent.connect(address)
            except AuthError:
                raise
            except TimeoutError:
                failure = RpcTimeout(f"nobody answers at {address}; is its event loop blocked?")
                continue
            except (AiogradError, OSError) as error:
                failure = error
                continue
            self._agent.directory.add(peer)
            return peer
        raise failure

    async def _around(self, names: list[str] | None, timeout: float, error: Exception) -> Data:
        """Ask the workers of this host one by one: the coordinator does not answer."""
        members = [each for each in self.target.members if names is None or each.name in names]
        data = Data(time.time(), self._agent.name)
        for part in await asyncio.gather(*(self._one(each, timeout) for each in members)):
            data.add(part)
        data.reconcile()
        for row in data.workers:
            if row.state == SILENT:
                pids = {each.incarnation: each.pid for each in members}
                blocked.apply(row, blocked.describe(row.incarnation, pids.get(row.incarnation)))
                row.why = row.why or str(error)
        data.workers.sort(key=lambda row: (row.rank, row.name))
        return data

    async def _one(self, record: RunRecord, timeout: float) -> Data:
        if record.coordinator:  # it was asked already
            return Data(workers=[_silent(record, "")])
        try:
            peer = await self._dial(record.addresses)
            return from_json(await self._agent.request(peer, "inspect", timeout=timeout))
        except Exception as error:  # whatever a worker answers, the others are shown
            return Data(workers=[_silent(record, str(error))])


def _silent(record: RunRecord, why: str) -> WorkerRow:
    row = WorkerRow(record.name, record.rank, SILENT, why, record.incarnation, pid=record.pid)
    row.coordinator = record.coordinator
    return row


@contextlib.asynccontextmanager
async def connected(
    target: Target, options: Options, name: str | None = None
) -> AsyncIterator[Guest]:
    """Be a guest of a cluster in this block; AuthError if it does not let us in."""
    secret = target.secret
    options = replace(options, secret=None, secret_file=None)  # that of the target is used
    agent = Agent(name or f"guest-{os.getpid()}", -1, secret=secret, options=options)
    try:
        yield Guest(target, agent)
    finally:
        await agent.close()
