"""References as a part of the agent: `attach(agent)` plugs them in.

`RRefs` makes references, sends them along with calls (as a traveller) and asks owners. Who still
uses what is decided in `protocol` and told to others by `control`; owners keep results in
`keeping`, and answer in `serving`.

Results that stay where they were made: the owner's side of `remote`.

The agent tells its *result store* of every call whose result stays, when it begins and ends; the
token that came with the call says under which id, for whom, and which line of theirs asked for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from aiograd.errors import (
    AiogradError,
    DeadlineExceeded,
    NotAllowed,
    Overloaded,
    OwnerLost,
    RemoteError,
    RRefError,
    RRefLeak,
    RRefReleased,
    WorkerClosed,
    WorkerLost,
)
from aiograd.rpc import scope
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.future import CallInfo, Future
from aiograd.rpc.scope import SCOPE
from aiograd.rref.futures import CreateFuture, LocalWait, OwnerFuture, wake
from aiograd.rref.refcount.records import (
    ID_SIZE,
    CallSite,
    CallSites,
    OwnerRecord,
    RefId,
    Use,
    UserRecord,
    fresh_copy,
    pack_creation,
    pack_fork,
    stamp_of,
    unpack_id,
    with_callback,
)
from aiograd.rref.services import BackwardHook, Messenger, ValueServices, owner_lost

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.extension import Arrival, Departure
    from aiograd.rref.rref import RRef


_log = logging.getLogger("aiograd")


class RRefs:
    """All references of one worker."""

    def __init__(self, agent: Agent, wrap: Callable[..., RRef]) -> None:
        self.agent = agent
        self.messenger = Messenger(agent)
        self.protocol = self.messenger.protocol
        self.value_services = ValueServices(agent, self.messenger)
        self.closed = False
        self._wrap = wrap
        self._call_sites = CallSites()
        agent.result_store = ValueStore(agent, self.messenger, self._call_sites)

    @property
    def backward_hook(self) -> BackwardHook | None:
        """Starts a backward pass from a value; set by the autograd layer."""
        return self.value_services.backward_hook

    @backward_hook.setter
    def backward_hook(self, hook: BackwardHook | None) -> None:
        self.value_services.backward_hook = hook

    # ── making ──────────────────────────────────────────────────────────────────────────────

    def remote(
        self,
        to: Any,
        func: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
        frame: FrameType | None = None,
        subject: RRef | None = None,
    ) -> RRef:
        """Call `func` on `to` and leave the result there; keep `subject` until then."""
        agent, protocol = self.agent, self.protocol
        link = agent.links.routes.get(to) if type(to) is str else None
        if link is None:
            link = agent.link(to)
        owner = self.messenger.party(link.peer)
        # Our paths are nothing to a partner.
        place = b"" if frame is None or link.restricted else self._call_sites.encode(frame)
        made: OwnerRecord | UserRecord
        if owner is protocol.me:
            made = protocol.create_here(self._call_sites.decode(place))
        else:
            made = protocol.create(owner)
        future = CreateFuture(loop=agent.loop)
        future._refs, future._made, future._subject = self, made, subject
        future._rref = None
        future._limited, future._inherited = timeout is not None, SCOPE.get().deadline
        future._held = None if agent.baggage is None else agent.baggage.current()
        token = pack_creation(made.id, place)
        try:
            agent.call(
                to, func, args, kwargs, timeout=timeout, keep=token, frame=frame, future=future
            )
        except BaseException:
            protocol.discard_creation(made)
            raise
        return self._wrap(self, made, future)

    def creation_ended(self, made: OwnerRecord | UserRecord, error: Exception | None) -> None:
        """The owner has answered, or never will."""
        if error is not None:
            error = self._creation_error(made, error)
        if isinstance(made, UserRecord):
            self.protocol.user_table.answered(made, error)
        else:
            self.protocol.created_here(made, error)
        self.messenger.schedule_flush()

    def _creation_error(self, made: OwnerRecord | UserRecord, error: Exception) -> Exception:
        if isinstance(error, DeadlineExceeded):
            where = made.owner.name if isinstance(made, UserRecord) else self.agent.name
            late = RRefError(
                f"RRef creation timed out: {error.function}() did not end on {where} within "
                f"{error.seconds:g} s, so its value may not exist",
                where,
            )
            late.__cause__ = error
            return late
        if type(error) is WorkerLost:  # if the owner is gone for good, `check` will say so
            failed = RRefError(f"RRef creation failed: {error}", error.worker)
            failed.__cause__ = owner_lost(error)
            return failed
        return error

    # ── travelling ──────────────────────────────────────────────────────────────────────────

    tag = "rref"

    def depart(self, rref: RRef, departure: Departure) -> Any:
        to = self.messenger.party(departure.to)
        data = self.messenger.on_loop(self._depart, rref, to, departure.plain)
        departure.undo.append(functools.partial(self._undo, data))
        return data

    def _depart(self, rref: RRef, to: Any, plain: bool = False) -> Any:
        ref = self.usable(rref)
        if plain or (isinstance(ref, UserRecord) and self._is_partner(ref.owner)):
            self.messenger.access.may_send(ref, to)
        data = self.protocol.depart(ref, to)
        self.messenger.schedule_audit()
        return data

    def _is_partner(self, party: PeerInfo) -> bool:
        peer = self.agent.directory.get(party.name)
        return peer is not None and self.agent.restricts(peer)

    def _undo(self, data: Any) -> None:
        def undo() -> None:
            self.protocol.undo(data)
            self.messenger.flush()

        if threading.get_ident() == self.agent.thread:
            undo()
        else:
            self.agent.from_thread(undo)

    def arrive(self, data: Any, arrival: Arrival) -> RRef:
        ref = self.receive(data, arrival.sender)
        if isinstance(ref, UserRecord) and ref.use is Use.CONFIRMING:
            arrival.waits.append(self._confirmation(ref))
        return self._wrap(self, ref)

    def receive(self, data: Any, sender: PeerInfo) -> OwnerRecord | UserRecord:
        """Take in a reference that a message brought."""
        party = self.messenger.party(sender)
        if self.agent.restricts(sender):
            self.messenger.access.may_bring(party, data)
        ref = self.protocol.arrive(data, party)
        self.messenger.schedule_flush()
        return ref

    def _confirmation(self, held: UserRecord) -> asyncio.Future[None]:
        """What a function that was given this reference waits for."""
        future: asyncio.Future[None] = self.agent.loop.create_future()

        def answered() -> None:
            if future.done():
                return
            if held.error is None:
                future.set_result(None)
            else:
                future.set_exception(fresh_copy(held.error))
                future.exception()  # not the only one perhaps; the first is the outcome

        held.on_confirmed = with_callback(held.on_confirmed, answered)
        return future

    # ── using ───────────────────────────────────────────────────────────────────────────────

    def usable(self, rref: RRef) -> OwnerRecord | UserRecord:
        """What a reference stands for; raises why it cannot be used."""
        ref = rref.record
        if rref.released:
            owner = rref.owner_name()
            raise RRefReleased(
                f"this reference to a value on {owner} was used after deletion: it was released; "
                "make another one, or release it later",
                owner,
            )
        self.protocol.check(ref)
        return ref

    def ask(
        self, rref: RRef, service: str, *args: Any, timeout: float | None, carry: bool = False
    ) -> Future[Any]:
        """Ask the owner of a `UserRecord` reference. Errors are in the future."""
        held = rref.record
        answer = OwnerFuture(loop=self.agent.loop)
        answer._rref = rref
        assert isinstance(held, UserRecord)
        try:
            if held.error is not None or rref.released or held.use >= Use.RELEASING:
                self.usable(rref)
            name = self.messenger.reach(held.owner)
            self.agent.request(
                name,
                service,
                pack_fork(held.id, held.fork, held.known),
                *args,
                timeout=timeout,
                carry=carry,
                future=answer,
            )
            answer.follow(held)
        except (RRefError, OwnerLost) as error:
            # The traceback would hold this frame, and us.
            answer.info = CallInfo(service)
            answer.set_exception(error.with_traceback(None))
        return answer

    def piggyback_fetch(self, rref: RRef, creation: CreateFuture) -> bool:
        """Let the value come along with the reply to its creation, if that has not been sent yet.

        Then creating and fetching is one message, one reply and one future.
        """
        agent, info, inherited = self.agent, creation.info, creation._inherited
        caller, scope = info.caller, SCOPE.get()
        if (
            caller is None
            or scope.deadline != inherited  # the creation must not end later than the fetch may
            or (inherited == math.inf and info.seconds > agent.options.timeout)
            or threading.get_ident() != agent.thread
            or scope.recording is not None
            or (agent.baggage is not None and agent.baggage.current() is not creation._held)
            or not caller.piggyback(creation)
        ):
            return False
        creation._until = agent.loop.time() + info.seconds
        creation._rref = rref
        return True

    def fetch_separately(self, answer: OwnerFuture, deadline: float) -> None:
        """The value did not come along: it cannot travel, or there is none."""
        rref = answer._rref
        assert rref is not None
        held = rref.record
        assert isinstance(held, UserRecord)
        # In a context of its own: who reads the reply may have a deadline, too.
        left = max(deadline - self.agent.loop.time(), 0.001)
        request = functools.partial(self.agent.request, timeout=left, future=answer)
        fork = pack_fork(held.id, held.fork, held.known)
        try:
            self.agent.context.copy().run(request, held.owner.name, "rref.fetch", fork)
        except AiogradError as error:
            answer.set_exception(error.with_traceback(None))

    def wait(self, rref: RRef, timeout: float | None, what: str) -> Future[Any]:
        """The outcome of a value of this worker. Errors are in the future."""
        agent, owned = self.agent, rref.record
        assert isinstance(owned, OwnerRecord)
        wait = LocalWait(agent.loop, owned, agent.name)
        wait.info.name = what
        try:
            self.usable(rref)
        except RRefError as error:
            wait.set_exception(error.with_traceback(None))
            return wait
        if owned.ready:
            wait.end()
            return wait
        wait.info.seconds, deadline = agent.deadline(timeout)
        if threading.get_ident() == agent.thread:
            self._enter(wait, deadline)
        else:
            agent.from_thread(self._enter, wait, deadline)
        return wait

    def _enter(self, wait: LocalWait, deadline: float) -> None:
        wait.begin(self.agent.deadlines.bucket(deadline) if deadline != math.inf else None)

    async def created(self, rref: RRef) -> None:
        """Wait until a value is there; raise what prevented it."""
        ref = rref.record
        if isinstance(ref, OwnerRecord):
            if ref.id in ref.forks:  # sent to ourselves, and not answered
                told = self.agent.loop.create_future()
                ref.on_answered = with_callback(ref.on_answered, wake(told))
                await told
            if ref.creator_error is not None:
                raise _first(ref.creator_error)
            await self.wait(rref, math.inf, "RRef.future")
            return
        if ref.unanswered:
            told = self.agent.loop.create_future()
            ref.on_confirmed = with_callback(ref.on_confirmed, wake(told))
            await told
        if ref.error is not None:
            raise _first(ref.error)
        await self.ask(rref, "rref.created", timeout=math.inf)

    # ── ending ──────────────────────────────────────────────────────────────────────────────

    async def settle(self, deadline: float) -> None:
        """Give back all that is held here, and wait for the others to do so; report leaks.

        `deadline` is loop time; others that never give back may use up half of what is left.
        """
        now = self.agent.loop.time()
        limit = now + (deadline - now) / 2 if deadline != math.inf else now + 60.0
        await self.messenger.release_all(limit)
        leaks = self.protocol.owner_table.leaks()
        if not leaks:
            return
        sites = [leak.call_site for leak in leaks]
        where = [f"{file}:{line}" for file, line in sites if file]
        text = (
            f"Leaking RRef: {len(leaks)} value(s) on {self.agent.name} were still in use elsewhere "
            f"at shutdown, made at {', '.join(sorted(set(where))[:20]) or 'unknown lines'}"
        )
        if self.agent.options.strict_leaks:
            raise RRefLeak(text, self.agent.name)
        _log.warning(text)

    async def close(self) -> None:
        self.closed = True
        self.messenger.close()

    def counters(self) -> dict[str, int]:
        """For `debug_info`; all 0 at rest."""
        return {
            "owner_rrefs": len(self.protocol.owner_table.records),
            "user_rrefs": len(self.protocol.user_table.records),
        }


def _first(error: Exception) -> Exception:
    """What the creation future ends with: the cause, where the error is what it means for uses."""
    cause = error.__cause__
    return fresh_copy(cause if isinstance(cause, Exception) else error)


def current_rrefs() -> RRefs:
    """The references of the current worker."""
    refs = scope.current().parts.get(RRefs)
    if refs is None:
        raise WorkerClosed("this worker was started without references")
    return refs  # type: ignore[no-any-return]


def attach(agent: Agent) -> RRefs:
    """Plug references into an agent."""
    from aiograd.rref.proxy import Subject, SubjectTraveller
    from aiograd.rref.rref import RRef, wrap

    refs = agent.parts[RRefs] = RRefs(agent, wrap)
    agent.travellers.add(RRef, refs)
    agent.travellers.add(Subject, SubjectTraveller(refs))
    return refs


MAX_VALUES = 65_536  # kept at once by a worker before it takes no more from partners


class ValueStore:
    """Keeps what others create on one worker."""

    def __init__(self, agent: Agent, messenger: Messenger, places: CallSites) -> None:
        self._agent, self._messenger, self._call_sites = agent, messenger, places
        self._owner_table, self._me = messenger.protocol.owner_table, messenger.protocol.me

    def expect(self, sender: PeerInfo, token: Any) -> None:
        self._owner_table.expect(sender.incarnation, *self._announced(sender, token))

    def keep(self, sender: PeerInfo, token: Any, value: Any) -> None:
        self._owner_table.settle(unpack_id(token), value)
        self._messenger.check_rest()

    def fail(self, sender: PeerInfo, token: Any, error: BaseException) -> None:
        self._owner_table.settle(unpack_id(token), None, self._outcome(error))
        self._messenger.check_rest()

    def made(self, sender: PeerInfo, token: Any, value: Any) -> None:
        ref_id, fork, place = self._announced(sender, token)
        self._owner_table.made(sender.incarnation, ref_id, fork, place, value)

    def _announced(self, sender: PeerInfo, token: bytes) -> tuple[RefId, RefId, CallSite]:
        """What somebody creates here: the id, the creator's fork, and the line."""
        rank, stamp, number = ref_id = unpack_id(token)
        creator = self._messenger.party(sender)
        if stamp != stamp_of(sender.incarnation):
            raise NotAllowed("a value is created under an id of its creator", self._agent.name)
        if len(self._owner_table.records) >= MAX_VALUES and self._agent.restricts(sender):
            self._agent.limits.reached("values")
            raise Overloaded(self._agent.name, f"{MAX_VALUES} values are kept for others already")
        # The creator's own fork: see `Protocol.create`, `create_here`.
        fork = ref_id if creator is self._me else (rank, stamp, number + 1)
        return ref_id, fork, self._call_sites.decode(token[ID_SIZE:])

    def _outcome(self, error: BaseException) -> Exception:
        """What users of a value get that could not be made."""
        name = self._agent.name
        abandoned = isinstance(error, DeadlineExceeded) and (error.worker, error.seconds) == (
            name,
            0,
        )
        if abandoned:
            return RRefError(f"RRef creation on {name} timed out, or was cancelled", name)
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return error
        return RemoteError(type(error).__name__, str(error), worker=name)
