"""The coordinator: admits, announces and dismisses the members of a cluster, over the wire.

`Membership` and `TerminationDetector` decide, without I/O; this module carries their decisions to
the members. The services are listed in `member.py`. A newcomer is admitted in this order:

    join ─▶ welcome to it, change to the members ─▶ all have confirmed, or 1 s ─▶ reply to join

so that, when `join` returns, it can call every member and every member can call it. Newcomers that
come in between wait for these confirmations, and are admitted together by one change; in a large
cluster for a moment longer, so that announcements come at a bounded rate. Losses that follow each
other are announced together for the same reason.

Where members elect, a change that half of the electorate has acknowledged is confirmed to all
(`Electorate`). While one is not, more members are out of reach than there are here, and they may
have elected a successor: this coordinator asks them, again and again. If they have, it resigns.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from aiograd.cluster.joining.invitation import check_versions
from aiograd.cluster.membership.collectives import mark_retrieved
from aiograd.cluster.membership.election import VOTE
from aiograd.cluster.membership.forms import check_peer
from aiograd.cluster.membership.member import CONFIRM_TIMEOUT, Member
from aiograd.cluster.membership.roster import Action, Admit, Announce, Membership, Refuse, Update
from aiograd.cluster.membership.succession import Electorate
from aiograd.cluster.membership.termination import TerminationDetector
from aiograd.errors import (
    NotAllowed,
    ProtocolError,
    RpcError,
    SecurityError,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.transport.network import is_local

__all__ = ["Coordinator"]

_log = logging.getLogger("aiograd.cluster")

# Every admission is announced to every member. Newcomers of a large cluster are admitted at most so
# often that the coordinator announces 500 times per second, whatever the size: so the cost of a
# start grows as the time it takes, not as the square of the number of workers.
_PAUSE_PER_MEMBER: Final = 0.002  # seconds
_LONGEST_PAUSE: Final = 0.25
_FEW: Final = 8  # members up to which nobody is held for that
# Seconds for which losses wait for others: workers of one host end within a few milliseconds, and
# WorkerLost is promised within a second.
_LOSS_PAUSE: Final = 0.02

# Seconds for a member to acknowledge a change, for the electorate: it may be stopped for a while.
_ACKNOWLEDGE: Final = 10.0
_FOLLOW: Final = 10.0  # seconds for a member to follow a successor
# Seconds for one that is not even connected. A cut is noticed after 6 s, so within 10 s of it all
# know who is left.
_CONNECT: Final = 2.5
_TELL_AGAIN: Final = 0.3  # seconds until it is told again
_UNCONFIRMED: Final = 2.0  # seconds until those are asked that did not acknowledge, and between two
_PROBE: Final = 2.0  # seconds for one of them to answer
_PROBES: Final = 8  # of them are asked at a time
_TERMS: Final = 1024  # that a majority which is dead by now may have used up


class Coordinator:
    """The coordinator's part of one worker, beside its `Member`."""

    def __init__(
        self,
        member: Member,
        elects: bool = False,
        membership: Membership[PeerInfo] | None = None,
    ) -> None:
        self._member = member
        self._agent = agent = member.agent
        # Whether the members elect a successor if this worker is lost; they hear it when they join.
        self._elects = member.elects = elects
        self._membership: Membership[PeerInfo] = (
            Membership(agent.info, member.world_size) if membership is None else membership
        )
        # Replies to `join` that are still to be sent, by incarnation. A name would not do: two
        # workers of one name may be waiting, and each of them has to be refused.
        self._joining: dict[bytes, asyncio.Future[Any]] = {}
        self._admissions = 0  # under way: changes with newcomers that are not confirmed by all
        self._next_admission = 0.0  # loop time before which newcomers are held
        self._timer: asyncio.TimerHandle | None = None  # admits those that are held
        self._termination = TerminationDetector()
        self._round: asyncio.Future[bool] = agent.loop.create_future()  # ends with the round
        # Gives name and rank to a process that an engine knows by a key; None if it is not wanted.
        self.assign: Callable[[str], tuple[str, int] | None] = lambda key: None
        self._losses: list[tuple[bytes, str]] = []  # not announced yet
        self._next_losses = 0.0  # loop time before which losses wait for others
        self._loss_timer: asyncio.TimerHandle | None = None  # announces them
        self._electorate: Electorate[PeerInfo] = Electorate(agent.incarnation, (agent.info,))
        self._doubt: asyncio.Task[None] | None = None  # while a change is not confirmed
        self.resigned: bool = False  # another worker is the coordinator
        self._leaving = False  # this worker has begun to leave: no newcomers
        self._terminated = False  # the last round is over
        agent.services.update(
            {
                "cluster.place": self._on_place,
                "cluster.join": self._on_join,
                "cluster.roster": self._on_roster,
                "cluster.leave": self._on_leave,
                "cluster.report": self._on_report,
            }
        )
        agent.lost.append(self._on_lost)
        # Members hear of losses from here, so this worker has to see them at once.
        agent.watched.append(self._watched)
        member.resign = self._resign

    def _watched(self) -> list[bytes]:
        # Looked up each time: a static world that is complete has another table than before.
        return [peer.incarnation for peer in self._membership.members.values()]

    # ── joining ─────────────────────────────────────────────────────────────────────────────────

    async def start(self, timeout: float) -> None:
        """Admit this worker itself; RpcError if the static world is not complete in time."""
        admitted = self._reply_to_join(self._agent.incarnation)
        self._apply(self._membership.start())
        try:
            async with asyncio.timeout(timeout):
                await admitted
        except TimeoutError:
            # Those who wait are refused, too, instead of losing their coordinator without a reason.
            why = self._incomplete(timeout)
            self._apply(self._membership.give_up(why))
            raise RpcError(why) from None

    @property
    def refused_ranks(self) -> list[int]:
        """List the ranks that got the reason why this start is refused."""
        return [peer.rank for peer in self._membership.refused.values()]

    async def wait_for_refused(self, late: float) -> None:
        """Stay until every connected worker has got the reason, and `late` seconds for late ranks.

        Late ranks can learn the reason from this worker only, unless a file carries it.
        """
        membership, connected = self._membership, self._agent.links.table
        if late and membership.to_come():
            _log.error(
                "%s: %s; staying %g s for late ranks", self._agent.name, membership.refusal, late
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(late):
                    while membership.to_come():
                        await self._member.changed.wait()
        # Refused workers disconnect when they have read the reply; closing earlier could cut it
        # off. Every connection counts, not only those that were refused so far: the `join` of a
        # worker that has just connected is still on its way, and is refused when it arrives.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONFIRM_TIMEOUT):
                while connected:
                    await self._member.changed.wait()

    async def wait_until_known(self, names: Iterable[str]) -> None:
        """Wait until all of these are members and all members know them."""
        names, roster = set(names), self._member.roster
        # A member whose `join` is still to be answered is not known to all members yet.
        while not (
            names <= roster.members.keys()
            and self._joining.keys().isdisjoint(roster.members[name].incarnation for name in names)
        ):
            await self._member.changed.wait()

    def _incomplete(self, timeout: float) -> str:
        missing = self._membership.missing()
        # A peer that has not proven the secret cannot end a start: it is only mentioned here, by
        # the place that it came from.
        refused = "".join(
            f"; {who} was turned away: {why}" for who, why in self._agent.refusals.items()
        )
        return (
            f"the world of {self._membership.world_size} was not complete within {timeout:g} s; "
            f"no word from rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            f"{refused}"
        )

    # The handlers trust `sender`, which the handshake has proven, and nothing else of a message.

    def _on_place(self, sender: PeerInfo, named: bool, key: str) -> tuple[str, int]:
        if type(key) is not str:
            raise ProtocolError("cluster.place: malformed key", sender.name)
        if key and self._agent.restricts(sender):
            # Keys are those of the workers of an engine, and can be guessed.
            raise NotAllowed("a partner has no place of an engine", self._agent.name)
        if key:
            place = self.assign(key)
            if place is None:
                raise RpcError(f"this cluster does not want {key} now")
        elif named or self._agent.restricts(sender):
            # A partner gets the one rank of its proven name: asking for other names, it could use
            # up all ranks.
            rank = self._membership.next_rank(sender.name)
            place = None if rank is None else (sender.name, rank)
        else:
            place = self._membership.next_place()
        if place is None:
            raise RpcError("this cluster has no rank left to give")
        return place

    def _on_join(
        self, sender: PeerInfo, peer: PeerInfo, world_size: int | None, versions: tuple[str, ...]
    ) -> Any:
        check_peer(peer, "cluster.join", sender)
        if not (world_size is None or (type(world_size) is int and world_size > 0)):
            raise ProtocolError("cluster.join: malformed world size", sender.name)
        # Only the handshake proves a name; `peer` is what the message claims.
        if peer.identity != sender.identity:
            raise NotAllowed("a worker joins for itself only", self._agent.name)
        # A newcomer would have to report in rounds that may be over before it has joined.
        if self._leaving:
            raise RpcError("this cluster is being closed")
        if self.resigned:  # a request that was under way
            raise RpcError(f"{self._agent.name} is not the coordinator of this cluster any more")
        self._check_fits(peer, versions)
        member = self._membership.members.get(peer.name)
        if member is not None and member.incarnation not in (
            peer.incarnation,
            self._agent.incarnation,
        ):
            return self._join_in_place_of(member, peer, world_size)
        return self._join(peer, world_size)

    def _join(self, peer: PeerInfo, world_size: int | None) -> asyncio.Future[Any]:
        self._announce_losses()  # the name of a worker whose loss is not announced yet is free
        reply = self._reply_to_join(peer.incarnation)
        hold = self._admissions > 0 or self._agent.loop.time() < self._next_admission
        partner = self._agent.restricts(peer)
        self._apply(self._membership.join(peer, world_size, hold=hold, partner=partner))
        self._admit_held_later()
        # Shielded: a repeated `join` shares the future, and a cancelled one must not end it.
        return asyncio.shield(reply)

    async def _join_in_place_of(
        self, member: PeerInfo, peer: PeerInfo, world_size: int | None
    ) -> None:
        """Let a worker join under the name of a member that may be dead already.

        An engine restarts a killed worker faster than its loss is noticed.
        """
        # A live one answers at once, and its name is taken. A dead one is lost, at the latest when
        # it was silent for long.
        options = self._agent.options
        silence = options.silence + options.resume + CONFIRM_TIMEOUT
        with contextlib.suppress(RpcError):
            await self._agent.request(member, "cluster.coordinator", timeout=silence)
        await self._join(peer, world_size)

    def _check_fits(self, peer: PeerInfo, versions: tuple[str, ...]) -> None:
        """RpcError if a newcomer could not work with this cluster: versions, addresses."""
        own = self._agent.info
        who = f"{peer.name!r} on {peer.host or 'an unknown host'}"
        if not (type(versions) is tuple and all(type(each) is str for each in versions)):
            raise ProtocolError("cluster.join: malformed versions", peer.name)
        # Who exchanges plain data only needs neither the same byte code nor the same arrays.
        if not self._agent.restricts(peer):
            theirs = dict(text.split(" ", 1) for text in versions if " " in text)
            if (why := check_versions(theirs, who)) is not None:
                raise RpcError(why)
        if own.shares_loopback(peer) or not peer.addresses:
            return
        if all(is_local(address) for address in peer.addresses):
            raise RpcError(
                f"{who} listens at {', '.join(peer.addresses)} only, which {own.name} on "
                f"{own.host} cannot dial: its host name may mean loopback in /etc/hosts; give it "
                'Options(listen="0.0.0.0:0"), or an interface or a network of that host'
            )

    def _reply_to_join(self, incarnation: bytes) -> asyncio.Future[Any]:
        reply = self._joining.get(incarnation)
        if reply is None:
            reply = self._joining[incarnation] = self._agent.loop.create_future()
            reply.add_done_callback(mark_retrieved)
        return reply

    # ── carrying out decisions ──────────────────────────────────────────────────────────────────

    def _apply(self, actions: Sequence[Action[PeerInfo]]) -> None:
        """Carry out what the membership has decided."""
        admitted = [action.peer for action in actions if isinstance(action, Admit)]
        # Before the announcement: as soon as members know a newcomer they may call it, and it has
        # to know them by then.
        confirmations = self._welcome(admitted)
        for action in actions:
            if isinstance(action, Announce):
                confirmations += self._announce(action.update, action.to)
        self._refuse([action for action in actions if isinstance(action, Refuse)])
        if admitted:
            self._admissions += 1
            others = max(len(self._membership.members) - _FEW, 0)
            pause = min(others * _PAUSE_PER_MEMBER, _LONGEST_PAUSE)
            self._next_admission = self._agent.loop.time() + pause
            self._agent.spawn(self._admit(admitted, confirmations))

    def _refuse(self, refusals: Sequence[Refuse[PeerInfo]]) -> None:
        for peer, why in ((refusal.peer, refusal.why) for refusal in refusals):
            reply = self._joining.pop(peer.incarnation, None)
            if reply is not None and not reply.done():
                reply.set_exception(RpcError(why))
                if peer.incarnation != self._agent.incarnation and self._may_log(peer):
                    _log.warning(
                        "%s: refused %s (rank %d): %s", self._agent.name, peer.name, peer.rank, why
                    )
            self._member.notify()

    def _may_log(self, peer: PeerInfo) -> bool:
        """Whether a line about a newcomer may be written now: a partner may ask on and on."""
        agent = self._agent
        return not agent.restricts(peer) or agent.accounts.of(peer.name).log_rate.allows()

    def _announce(
        self, update: Update[PeerInfo], to: Sequence[PeerInfo]
    ) -> list[asyncio.Future[Any]]:
        """Apply a change here and send it to the members; gives their confirmations."""
        if self._member.roster.version:
            # Whatever fails here is this worker's own trouble: the members must hear of the change.
            try:
                self._member.adopt(*self._membership.roster(), lost=update.lost)
                self._end_round_if_complete()  # perhaps only the lost one had yet to report
            except Exception:
                _log.exception("%s: a change of the membership failed here", self._agent.name)
        if self._terminated:
            return []  # all members are leaving, and need no more updates
        others = [peer for peer in to if peer.incarnation != self._agent.incarnation]
        told = self._request_each(others, "cluster.change", update)
        if self._elects:
            for peer, reply in told.items():
                take = functools.partial(self._take_answer, update.version, peer)
                reply.add_done_callback(take)
            self._confirm_if(self._electorate.announced(*self._membership.roster()))
            if not self._electorate.confirmed and self._doubt is None:
                self._doubt = self._agent.spawn(self._resolve_doubt())
        return list(told.values())

    def _welcome(self, admitted: Sequence[PeerInfo]) -> list[asyncio.Future[Any]]:
        """Send the roster to newcomers; gives their confirmations."""
        newcomers = [peer for peer in admitted if peer.incarnation != self._agent.incarnation]
        terms = self._elects, self._membership.highest_rank
        told = (*self._membership.roster(), *terms)
        return list(self._request_each(newcomers, "cluster.welcome", *told).values())

    def _request_each(
        self, peers: Sequence[PeerInfo], service: str, *arguments: Any
    ) -> dict[PeerInfo, asyncio.Future[Any]]:
        replies: dict[PeerInfo, asyncio.Future[Any]] = {}
        timeout = _ACKNOWLEDGE if self._elects else CONFIRM_TIMEOUT
        for peer in peers:
            # A peer that is gone already is lost on its own account, which is announced separately.
            with contextlib.suppress(RpcError):
                request = self._agent.request(peer, service, *arguments, timeout=timeout)
                request.add_done_callback(mark_retrieved)
                replies[peer] = request
        return replies

    async def _admit(
        self, admitted: Sequence[PeerInfo], confirmations: Sequence[asyncio.Future[Any]]
    ) -> None:
        """Reply to newcomers when they know all members and all members know them."""
        # At once, not after the confirmations: calls of the newcomer may come before them.
        for peer in admitted:
            self._agent.directory.add(peer)
        if any(peer.incarnation == self._agent.incarnation for peer in admitted):
            self._member.adopt(*self._membership.roster())
        try:
            if confirmations:
                await asyncio.wait(confirmations, timeout=CONFIRM_TIMEOUT)
        finally:
            self._admissions -= 1
        if self.resigned:
            return  # nobody else knows the newcomers
        for peer in admitted:
            reply = self._joining.pop(peer.incarnation, None)
            if reply is not None and not reply.done():
                reply.set_result(None)
        self._member.notify()
        self._admit_held_later()

    def _admit_held_later(self) -> None:
        """Admit newcomers that are held, when it is time; after an admission under way."""
        held = self._membership.held and not self._admissions
        if held and self._timer is None and not self._agent.closed:
            self._timer = self._agent.loop.call_at(self._next_admission, self._admit_held)

    def _admit_held(self) -> None:
        self._timer = None
        if not self._admissions and not self._agent.closed:
            self._apply(self._membership.admit_held())

    def _on_roster(self, sender: PeerInfo) -> Any:
        return self._membership.roster()

    # ── losing ──────────────────────────────────────────────────────────────────────────────────

    def process_ended(self, peer: PeerInfo, why: str, cause: BaseException | None = None) -> None:
        """Declare a member lost whose process has ended, unless it has left.

        Its connections may stay open: a child that it forked can inherit them. `cause` is what an
        engine says of it.
        """
        if not self._agent.closed:
            self._agent.spawn(self._lose_ended(peer, why, cause))

    async def _lose_ended(self, peer: PeerInfo, why: str, cause: BaseException | None) -> None:
        # Its last replies, and perhaps its `leave`, may still be in our receive buffer.
        await self._agent.links.read_out(peer)
        member = self._membership.members.get(peer.name)
        if member is not None and member.incarnation == peer.incarnation:
            self._agent.links.declare_lost(peer, why, cause)

    def lose(self, peer: PeerInfo, why: str) -> None:
        """Declare a member lost that does not follow this coordinator."""
        self._agent.links.declare_lost(peer, why)
        self._lose(peer.incarnation, why)

    def _on_lost(self, peer: PeerInfo, error: Exception) -> None:
        if isinstance(error, SecurityError):
            return  # alive, and in contact with others; it shares no secret, or no mode, with us
        reply = self._joining.pop(peer.incarnation, None)
        if reply is not None and not reply.done():
            reply.cancel()  # no connection is left to send it on
        # The reason alone, without the name: every member adds that in its own WorkerLost.
        self._lose(peer.incarnation, getattr(error, "why", "") or str(error))
        self._member.lose(peer, error)
        self._end_round_if_complete()

    def _lose(self, incarnation: bytes, why: str) -> None:
        """Announce a loss: the first one at once, in a large cluster those that follow together."""
        self._losses.append((incarnation, why))
        now = self._agent.loop.time()
        if now >= self._next_losses:
            self._announce_losses()
        elif self._loss_timer is None:
            call = self._agent.loop.call_at
            self._loss_timer = call(self._next_losses, self._announce_losses)

    def _announce_losses(self) -> None:
        if self._loss_timer is not None:
            self._loss_timer.cancel()
            self._loss_timer = None
        if not self._losses or self.resigned or self._agent.closed:
            return
        many = len(self._membership.members) > _FEW
        self._next_losses = self._agent.loop.time() + (_LOSS_PAUSE if many else 0.0)
        losses, self._losses = self._losses, []
        self._apply(self._membership.lost_all(losses))
        self._member.notify()

    # ── succession ──────────────────────────────────────────────────────────────────────────────

    @classmethod
    def succeed(cls, member: Member, lost: PeerInfo, why: str) -> Coordinator:
        """Go on with the open cluster of a coordinator that was lost; the member leads already."""
        agent = member.agent
        version, peers = member.roster.version, member.peers
        membership = Membership.inherit(agent.info, version, peers, member.highest_rank)
        made = cls(member, True, membership)
        made._electorate = Electorate(agent.incarnation, member.electors((*peers, lost)))
        made._confirm_if(made._electorate.announced(version, peers))
        for peer in member.others:
            # Also opens a connection to each: nobody else would notice their end.
            agent.spawn(made._tell_succession(peer, ((lost, why),)))
        if not made._electorate.confirmed:
            made._doubt = agent.spawn(made._resolve_doubt())
        return made

    async def _tell_succession(self, peer: PeerInfo, lost: Sequence[tuple[PeerInfo, str]]) -> None:
        """Tell a member who leads now, until it follows or is lost."""
        loop, links = self._agent.loop, self._agent.links
        began, why = loop.time(), "it does not answer"
        while not self.resigned and self._is_member(peer):
            link = links.get(peer.incarnation)
            patience = _FOLLOW if link is not None and link.is_open else _CONNECT
            left = began + patience - loop.time()
            if left <= 0:
                self.lose(peer, f"it does not follow {self._agent.name}: {why}")
                return
            version, peers = self._membership.roster()
            try:
                news = "cluster.succeed", version, peers, lost
                timeout = min(left, CONFIRM_TIMEOUT + VOTE)
                known = await self._agent.request(peer, *news, timeout=timeout)
            except WorkerLost as error:
                # It may have been lost before we led; nobody else declares it lost now.
                self._lose(peer.incarnation, error.why)
                return
            except Exception as error:  # whatever it raised there
                known, why = None, str(error)
                if self._agent.restricts(peer):
                    self.lose(peer, "it follows no successor of its coordinator")
                    return
            if known is True:
                self._confirm_if(self._electorate.acknowledged(version, peer.incarnation))
                if version == self._membership.version:
                    return
            else:
                if known is False:
                    began = loop.time()  # it follows; a vote of its keeps it from saying so
                await asyncio.sleep(min(left, _TELL_AGAIN))

    def _is_member(self, peer: PeerInfo) -> bool:
        member = self._membership.members.get(peer.name)
        return member is not None and member.incarnation == peer.incarnation

    def _take_answer(self, version: int, peer: PeerInfo, reply: asyncio.Future[Any]) -> None:
        """Take the answer of a member to a change."""
        if not reply.cancelled() and reply.exception() is None and reply.result() is True:
            self._confirm_if(self._electorate.acknowledged(version, peer.incarnation))

    def _confirm_if(self, confirmed: bool) -> None:
        """Tell all members that the last roster elects from now on, if it does."""
        if not confirmed or self.resigned or self._agent.closed:
            return
        if self._electorate.alone:
            # The dead may have had coordinators of their own, in terms that nobody else may have.
            self._apply(self._membership.skip_terms(_TERMS))
            return
        self._member.confirm()
        for peer in self._member.others:
            with contextlib.suppress(RpcError):
                self._agent.post(peer, "cluster.confirmed", self._membership.version)

    async def _resolve_doubt(self) -> None:
        """Ask those that are out of reach, until a change is confirmed or another one leads."""
        try:
            await asyncio.sleep(_UNCONFIRMED)
            while not (self._electorate.confirmed or self.resigned):
                missing = self._electorate.missing()
                for i in range(0, len(missing), _PROBES):
                    await asyncio.gather(*map(self._probe, missing[i : i + _PROBES]))
                await asyncio.sleep(_UNCONFIRMED)
        finally:
            self._doubt = None

    async def _probe(self, peer: PeerInfo) -> None:
        """Ask a worker that was lost here whom it follows."""
        # With an agent of its own: both sides take the other one's incarnation for lost, for good.
        # A partner is not believed: it takes no part in elections.
        if self._member.make_probe is None or self.resigned or self._agent.restricts(peer):
            return
        near = self._agent.info.shares_loopback(peer)
        addresses = [each for each in peer.addresses if near or not is_local(each)]
        probe = self._member.make_probe()
        try:
            async with asyncio.timeout(_PROBE):
                gone = [await self._asks(probe, peer, address) for address in addresses]
            # Nobody listens there any more, or another process: it is dead, not out of reach.
            if gone and all(gone):
                self._confirm_if(self._electorate.died(peer.incarnation))
        except (OSError, RpcError, SecurityError, ProtocolError):  # TimeoutError is an OSError
            pass
        finally:
            await probe.close()

    async def _asks(self, probe: Agent, peer: PeerInfo, address: str) -> bool:
        """Ask at one address; True if the worker is not there any more."""
        try:
            found = await probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        if found.incarnation != peer.incarnation:
            return True
        probe.directory.add(found)
        term, leader, _ = await probe.request(found, "cluster.term", timeout=_PROBE)
        check_peer(leader, "cluster.term", found)
        if type(term) is int and term > self._member.succession.term and not self.resigned:
            self._give_way(leader, term)
        return False

    def _give_way(self, successor: PeerInfo, term: int) -> None:
        """Leave, because the others have elected a successor while this worker was cut off."""
        member, others = self._member, self._member.others
        why = f"{successor.name} became the coordinator (term {term}) while it was out of reach"
        _log.warning("%s: resigns: %s", self._agent.name, why)
        member.follow(successor)
        member.abandon(why)
        for peer in others:  # they have no coordinator any more, and leave as well
            self._agent.links.declare_lost(peer, why)

    def _resign(self, successor: PeerInfo) -> None:
        """End this worker's part as the coordinator."""
        self.resigned = True
        self._agent.lost.remove(self._on_lost)
        self._agent.watched.remove(self._watched)
        self._end(RpcError(f"{successor.name} is the coordinator of this cluster now"))

    # ── leaving ─────────────────────────────────────────────────────────────────────────────────

    def dismiss(self, peers: Iterable[PeerInfo], together: bool, timeout: float | None) -> None:
        """Ask members to leave: each alone, or all together with this worker."""
        for peer in peers:
            with contextlib.suppress(RpcError):
                self._agent.post(peer, "cluster.dismiss", together, timeout)

    async def report(self, outstanding: int, started: int) -> bool:
        """Report this worker's own counts of calls; True if no call is under way anywhere."""
        self._leaving = True
        return await self._take_report(self._agent.name, outstanding, started)

    def close(self) -> None:
        """Fail everything that waits for a decision of this coordinator."""
        self._end(WorkerClosed(f"{self._agent.name} was shut down", self._agent.name))

    def _end(self, error: Exception) -> None:
        for timer in (self._timer, self._loss_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._loss_timer = None
        for future in (*self._joining.values(), self._round):
            if not future.done():
                future.add_done_callback(mark_retrieved)
                future.set_exception(error)

    def _on_leave(self, sender: PeerInfo) -> None:
        self._apply(self._membership.leave(sender.incarnation))

    def _on_report(self, sender: PeerInfo, outstanding: int, started: int) -> Any:
        if not (type(outstanding) is int and type(started) is int):
            raise ProtocolError("cluster.report: malformed counts of calls", sender.name)
        # A report of anybody else would stay in the table until the round ends.
        member = self._membership.members.get(sender.name)
        if member is None or member.incarnation != sender.incarnation:
            raise NotAllowed(f"{sender.name} is not a member", self._agent.name)
        return self._take_report(sender.name, outstanding, started)

    def _take_report(self, name: str, outstanding: int, started: int) -> asyncio.Future[bool]:
        # Taken before the report, which may end the round and replace the future. Shielded: a
        # member that stops waiting must not cancel it for the others.
        last_round = asyncio.shield(self._round)
        self._termination.report(name, outstanding, started)
        self._end_round_if_complete()
        return last_round

    def _end_round_if_complete(self) -> None:
        if not self._member.roster.version:
            return  # the start has not completed: members are yet to come
        done = self._termination.decide(self._membership.members)
        if done is not None:
            self._terminated = done
            ended, self._round = self._round, self._agent.loop.create_future()
            ended.set_result(done)
