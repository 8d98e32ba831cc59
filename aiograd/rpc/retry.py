"""Retries: how long to wait between attempts, how many there are, and who drives them.

Everything in the library that tries again uses the same two pure parts:

    RetryPolicy   how many attempts, and how long the pause before each one is
    Backoff       one use of a policy: which attempt is next, and whether time is left for it

A coroutine (dialling, reconnecting, start-up) loops, and gives up when `await backoff.pause()` is
False. Calls and requests are futures without a loop; `Attempts` drives them:

    idempotent calls   attempt ──retryable error──▶ pause ──▶ attempt …         `retry_call`
    control requests   attempt ──▶ pause ──▶ attempt … until the first answer   `retry_request`

Retries of all callers at once are what keeps an overloaded cluster overloaded. So the pauses of
two callers differ (jitter), and calls have a `RetryBudget`.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from random import Random
from types import FrameType
from typing import Any, Final, Protocol

from aiograd.errors import DeadlineExceeded, Overloaded, WorkerClosed, WorkerLost
from aiograd.rpc.directory import Directory, PeerInfo
from aiograd.rpc.future import CallInfo, Future, fail
from aiograd.wire.fastcodec import decode_call, encode_call

_log = logging.getLogger("aiograd.link")

# ── deciding ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How often to try, and how long to wait before each further attempt.

    The pauses grow exponentially, and each one is drawn at random around its nominal length, so
    that clients which failed together do not come back together. The defaults are those of calls
    to `@idempotent` functions:

        >>> policy = ag.RetryPolicy(attempts=10, first_pause=0.5)
        >>> ag.Options(retry=policy).retry.attempts
        10
    """

    attempts: float = 5
    """Attempts in all, the first one included: 1 for no retry, `math.inf` to let time decide."""
    first_pause: float = 0.2
    """Seconds before the first retry. With four retries, a worker has 3 s to restart."""
    factor: float = 2.0
    """How many times as long each pause is as the one before."""
    longest_pause: float = 5.0
    """Seconds that no pause exceeds (before jitter): a worker that is back should be noticed."""
    jitter: float = 0.5
    """The part of a pause that is random: 0.5 for anything between half and one and a half of it,
    0 for none."""
    time_limit: float = math.inf
    """Seconds after the first attempt in which another one may begin. A call also ends at its own
    deadline, whatever this says."""

    def __post_init__(self) -> None:
        """Refuse what is no policy: TypeError or ValueError names the field."""
        # Checked here, not at the first failure: a policy is used when something else goes wrong.
        for name in ("attempts", "first_pause", "factor", "longest_pause", "jitter", "time_limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"RetryPolicy.{name} is a number, not {type(value).__name__}")
            if math.isnan(value) or value < 0:
                raise ValueError(f"RetryPolicy.{name} must not be negative, not {value!r}")
        if self.attempts < 1 or (self.attempts != math.inf and self.attempts % 1):
            raise ValueError(
                f"RetryPolicy.attempts is a whole number from 1 (no retry), or math.inf, "
                f"not {self.attempts!r}"
            )
        if self.factor < 1:
            raise ValueError(f"RetryPolicy.factor is at least 1, not {self.factor!r}")
        if self.jitter > 1:
            raise ValueError(f"RetryPolicy.jitter is at most 1, not {self.jitter!r}")
        if math.isinf(self.first_pause):
            raise ValueError("RetryPolicy.first_pause must be finite")
        if self.attempts == math.inf == self.time_limit and not self.first_pause:
            raise ValueError("RetryPolicy without any limit or pause would never stop trying")

    def delay(self, retry: int, random: Random) -> float:
        """Draw the seconds to wait before a retry, counted from 0."""
        try:
            pause = min(self.first_pause * self.factor**retry, self.longest_pause)
        except OverflowError:
            # After about a thousand retries: the power of floats raises instead of giving inf.
            pause = self.longest_pause
        # Without jitter nothing is drawn: a simulation replays a seed, and a number that is drawn
        # and not used would change everything that follows.
        return (
            pause * random.uniform(1.0 - self.jitter, 1.0 + self.jitter) if self.jitter else pause
        )


class Backoff:
    """One use of a policy: counts attempts, and keeps them within a deadline.

    `deadline` is a time of `clock`, and may be moved while attempts go on. With `clip`, the last
    pause ends at the deadline, and one more attempt is made then: right where an attempt takes no
    time to speak of. Without, a pause that would reach the deadline is not begun, because there
    would be no time left to get an answer.
    """

    __slots__ = ("_clip", "_clock", "_policy", "_random", "attempts", "deadline")

    def __init__(
        self,
        policy: RetryPolicy,
        random: Random,
        clock: Callable[[], float],
        deadline: float = math.inf,
        *,
        clip: bool = True,
    ) -> None:
        self._policy, self._random, self._clock, self._clip = policy, random, clock, clip
        # Begun so far. The first attempt asks nobody, and is counted before it begins: `next` is
        # about the one that follows.
        self.attempts: int = 1
        self.deadline: float = deadline
        if policy.time_limit != math.inf:
            self.deadline = min(deadline, clock() + policy.time_limit)

    def next(self) -> float | None:
        """Count one more attempt, and give the seconds to wait before it; None if there is none."""
        if self.attempts >= self._policy.attempts:
            return None
        left = self.deadline - self._clock() if self.deadline != math.inf else math.inf
        if left <= 0.0:
            return None
        # With jitter first, so that a clipped pause ends exactly at the deadline.
        pause = self._policy.delay(self.attempts - 1, self._random)
        if pause >= left:
            if not self._clip:
                return None
            pause = left
        self.attempts += 1
        return pause

    async def pause(self) -> bool:
        """Wait until the next attempt is due; False, at once, if there is none."""
        pause = self.next()
        if pause is None:
            return False
        await asyncio.sleep(pause)
        return True


class RetryBudget:
    """How many retries the calls to one worker may make.

    Each call earns a tenth of a retry, so that retries add at most a tenth to the load of a worker
    that fails because it is overloaded. A caller that was quiet has a few saved.
    """

    # Of a retry, by each call. A fixed number of retries for each call would multiply the load of a
    # worker that fails every call, just when it can bear the least.
    EARNED: Final = 0.1
    # Retries that a caller may make at once after it was quiet.
    SAVED: Final = 10.0

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = self.SAVED

    def earn(self) -> None:
        """Count a first attempt."""
        self._left = min(self.SAVED, self._left + self.EARNED)

    def spend(self) -> bool:
        """Take one retry; False if none is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


# ── driving ─────────────────────────────────────────────────────────────────────────────────────


class Cancellable(Protocol):
    """A timer or a task."""

    def cancel(self) -> Any:
        """Stop it before it has done anything."""


class Operation(Protocol):
    """What `Attempts` tries again."""

    def begin(self, attempt: Future[Any]) -> None:
        """Begin an attempt, which ends a future; raises if it cannot begin, which is final."""

    def is_retryable(self, error: BaseException) -> bool:
        """Whether another attempt may go better than the one that ended like this."""

    def wait(self, pause: float, then: Callable[[], None]) -> Cancellable:
        """Call `then` after a pause, if nothing cancels it."""


class Attempts:
    """All attempts at one operation; `future` gets the outcome.

    Sequential attempts follow each other: each one begins after an error of the last, and the last
    error is the outcome. Hedged ones do not wait for errors: a message without an answer may be
    lost or late, so another one is sent, and the first answer counts. `expired` makes attempts
    hedged, and gives the error for a deadline that comes before an answer.
    """

    __slots__ = (
        "_backoff",
        "_budget",
        "_context",
        "_expired",
        "_open",
        "_operation",
        "_waiting",
        "future",
    )

    def __init__(
        self,
        operation: Operation,
        future: Future[Any],
        backoff: Backoff,
        context: contextvars.Context,
        budget: RetryBudget | None = None,
        expired: Callable[[], Exception] | None = None,
    ) -> None:
        self.future: Future[Any] = future
        self._operation, self._backoff, self._context = operation, backoff, context
        self._budget, self._expired = budget, expired
        # Attempts without an outcome. A dict, because it keeps their order, in which they are
        # cancelled: a set would make simulations depend on addresses of memory.
        self._open: dict[Future[Any], None] = {}
        self._waiting: Cancellable | None = None  # the pause before the next attempt
        future.add_done_callback(self._finish, context=context)

    def begin(self) -> None:
        """Begin one attempt; raises what is known before sending."""
        pause = None
        # Asked before the attempt begins: at the deadline, nothing more is sent.
        if self._expired is not None and (pause := self._backoff.next()) is None:
            raise self._expired()
        attempt: Future[Any] = Future(loop=self.future.get_loop())
        attempt.info = CallInfo()
        # Before the attempt begins: in another thread, the loop may end it at any time after that,
        # and a callback that is added to a future that is done does not wake the loop.
        attempt.add_done_callback(self._ended, context=self._context)
        self._open[attempt] = None
        self._operation.begin(attempt)
        if pause is not None:
            self._waiting = self._operation.wait(pause, self.begin_or_fail)

    def begin_or_fail(self) -> None:
        """Begin one attempt unless there is an outcome; an error known before sending is one."""
        if self.future.done():
            return
        try:
            self.begin()
        except Exception as error:
            fail(self.future, error)

    def _ended(self, attempt: Future[Any]) -> None:
        self._open.pop(attempt, None)
        if attempt.cancelled():
            # The callee's side cancelled it. After `_finish` there is an outcome, and this is void.
            self.future.cancel()
        elif (error := attempt.exception()) is None:
            if not self.future.done():
                self.future.set_result(attempt.result())
        elif not self.future.done() and not self._goes_on(error):
            fail(self.future, error)

    def _goes_on(self, error: BaseException) -> bool:
        """Whether there is another attempt after this error; begins the pause before it."""
        if not self._operation.is_retryable(error):
            return False
        # Hedged: the pause before the next attempt began with this one.
        if self._expired is not None:
            return True
        pause = self._backoff.next()
        # The budget comes last: a retry that cannot be made costs nothing.
        if pause is None or (self._budget is not None and not self._budget.spend()):
            return False
        self._waiting = self._operation.wait(pause, self.begin_or_fail)
        return True

    def _finish(self, future: Future[Any]) -> None:
        """Stop everything when there is an outcome, which a caller that cancels `future` makes."""
        if self._waiting is not None:
            self._waiting.cancel()
        for attempt in list(self._open):
            attempt.cancel()


class Environment(Protocol):
    """What of the `Runtime` counts here."""

    @property
    def random(self) -> Random:
        """Where jitter comes from."""


class Worker(Protocol):
    """What of the agent calls and requests need alike."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop this worker lives on."""

    @property
    def closed(self) -> bool:
        """Whether this worker was shut down."""

    @property
    def directory(self) -> Directory:
        """Who is a member."""

    @property
    def runtime(self) -> Environment:
        """Where randomness comes from."""


# ── idempotent calls ────────────────────────────────────────────────────────────────────────────


class Settings(Protocol):
    """What of `Options` counts here."""

    @property
    def retry(self) -> RetryPolicy:
        """The policy of idempotent calls."""


class Caller(Worker, Protocol):
    """What of the agent `retry_call` needs."""

    @property
    def name(self) -> str:
        """The name of this worker."""

    @property
    def options(self) -> Settings:
        """Where the policy is."""

    @property
    def parts(self) -> dict[type, Any]:
        """Where the budgets of this worker are kept."""

    def deadline(self, timeout: float | None) -> tuple[float, float]:
        """Give the seconds a call made now may take, and the loop time when they are over."""

    def call(
        self,
        to: Any,
        func: Any,
        args: Any,
        kwargs: dict[str, Any] | None,
        *,
        timeout: float | None,
        frame: FrameType | None,
        future: Future[Any] | None,
        once: bool,
    ) -> Future[Any]:
        """Make one attempt."""

    def spawn(
        self, work: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """Run a task that is cancelled when this worker closes."""


def is_worth_a_retry(error: BaseException, worker: str) -> bool:
    """Whether that worker failed the call, and another attempt may succeed."""
    # Not their subclasses: an owner that is gone, or one that is silent, stays so. And no loss of
    # another worker, which the function may have met while it ran.
    return type(error) in (WorkerLost, Overloaded) and getattr(error, "worker", "") == worker


def retry_call(
    agent: Caller,
    to: Any,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    timeout: float | None,
    frame: FrameType,
    future: Future[Any] | None,
) -> Future[Any]:
    """Call an `@idempotent` function; raises what is known before sending.

    A call runs at most once unless its author says that twice does no harm. Then it is made again
    when the worker is lost or overloaded, also at the next start of a worker of that name, within
    `Options.retry` and never past its deadline. `future`, if given, is the one to answer with.
    """
    if future is None:
        future = Future(loop=agent.loop)
    future.info = CallInfo()
    call = _IdempotentCall(agent, future, to, func, frame, timeout)
    call.arguments = args, kwargs
    # Plain values are taken as they are now: the caller may change a list or an array after the
    # call was sent. Other objects are pickled anew for each attempt, as they are then.
    call.frozen = encode_call(args, kwargs)
    budgets: dict[str, RetryBudget] = agent.parts.setdefault(RetryBudget, {})
    budget = budgets.setdefault(call.worker, RetryBudget())
    budget.earn()
    policy, random = agent.options.retry, agent.runtime.random
    backoff = Backoff(policy, random, agent.loop.time, call.deadline, clip=False)
    Attempts(call, future, backoff, call.context, budget).begin()
    return future


class _IdempotentCall:
    """What is needed to make the same call again."""

    __slots__ = (
        "_agent",
        "_frame",
        "_func",
        "_future",
        "_timeout",
        "_to",
        "arguments",
        "context",
        "deadline",
        "frozen",
        "worker",
    )

    def __init__(
        self,
        agent: Caller,
        future: Future[Any],
        to: Any,
        func: Any,
        frame: FrameType,
        timeout: float | None,
    ) -> None:
        self._agent, self._future, self._to, self._func = agent, future, to, func
        self._frame = frame
        self._timeout: float | None = timeout  # of the first attempt; then there is `deadline`
        _, self.deadline = agent.deadline(timeout)
        self.worker = agent.directory.find(to).name
        self.arguments: tuple[tuple[Any, ...], dict[str, Any] | None] = (), None
        self.frozen: bytes | None = None  # the arguments, if they are plain
        self.context = contextvars.copy_context()  # in which the caller made the call

    def begin(self, attempt: Future[Any]) -> None:
        """Make the call once more."""
        args, kwargs = self.arguments
        self._agent.call(
            self._to,
            self._func,
            args,
            kwargs,
            timeout=self._timeout,
            frame=self._frame,
            future=attempt,
            once=True,
        )
        # The caller has only this future: an error that nobody awaits names function and line.
        self._future.info = attempt.info

    def is_retryable(self, error: BaseException) -> bool:
        """Whether another attempt may go better."""
        return not self._agent.closed and is_worth_a_retry(error, self.worker)

    def wait(self, pause: float, then: Callable[[], None]) -> Cancellable:
        """Make another attempt after a pause."""
        _log.info("%s calls %s again in %.2g s", self._agent.name, self.worker, pause)
        # A task of the agent's, not a timer: closing the agent must end the call, too.
        return self._agent.spawn(self._attempt_after(pause, then), self.context)

    async def _attempt_after(self, pause: float, then: Callable[[], None]) -> None:
        try:
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            # By the caller, whose future is done then; or because the agent closes.
            fail(self._future, WorkerClosed(f"{self._agent.name} was shut down", self._agent.name))
            raise
        left = self.deadline - self._agent.loop.time()
        # The sleep may have ended a little late. 0 and less are refused as a timeout; an attempt
        # that has no time left fails by its deadline, as it should.
        self._timeout = math.inf if left == math.inf else max(left, 1e-3)
        if self.frozen is not None:
            self.arguments = decode_call(self.frozen)
        then()


# ── control requests ────────────────────────────────────────────────────────────────────────────


class Requester(Worker, Protocol):
    """What of the agent `retry_request` needs."""

    @property
    def context(self) -> contextvars.Context:
        """The context of what runs here for no caller."""

    def request(
        self,
        to: Any,
        service: str,
        *args: Any,
        timeout: float | None,
        carry: bool,
        future: Future[Any] | None,
    ) -> Future[Any]:
        """Send one request."""

    def from_thread(self, func: Callable[..., Any], *args: Any) -> None:
        """Let the loop call a function."""


class RequestLink(Protocol):
    """What of a link `retry_request` needs."""

    @property
    def peer(self) -> PeerInfo:
        """The worker at the other end."""

    @property
    def error(self) -> Exception | None:
        """Why the session is over, if it is."""


# An answer takes far less than the first pause, and lost messages are rare: hardly any request is
# sent twice. The deadline ends the attempts, or the loss of the session; no number of them does.
_REQUEST: Final = RetryPolicy(attempts=math.inf, first_pause=0.2, longest_pause=2.0, jitter=0.0)


def retry_request(
    agent: Requester,
    future: Future[Any],
    link: RequestLink,
    service: str,
    args: tuple[Any, ...],
    deadline: float,
    carry: bool,
) -> None:
    """Send a request until it is answered, and answer `future` with the first answer.

    For the library's own idempotent messages only. Ends at the deadline, or when the session is
    lost: in another session the peer may be told the same thing after it was taken back.
    """
    # Not the caller's context: attempts would inherit its deadline, and its recording.
    context = agent.context.copy()
    request = _ControlRequest(agent, link, service, args, carry, context)
    backoff = Backoff(_REQUEST, agent.runtime.random, agent.loop.time, deadline)
    expired = functools.partial(_expired, future, link.peer.name, service)

    def start() -> None:
        Attempts(request, future, backoff, context, expired=expired).begin_or_fail()

    if asyncio._get_running_loop() is agent.loop:
        context.run(start)
    else:
        agent.from_thread(context.run, start)


def _expired(future: Future[Any], peer: str, service: str) -> Exception:
    return DeadlineExceeded(peer, service, future.info.seconds)


class _ControlRequest:
    """What is needed to send the same request again."""

    __slots__ = ("_agent", "_args", "_carry", "_context", "_link", "_peer", "_service")

    def __init__(
        self,
        agent: Requester,
        link: RequestLink,
        service: str,
        args: tuple[Any, ...],
        carry: bool,
        context: contextvars.Context,
    ) -> None:
        self._agent, self._link, self._peer = agent, link, link.peer
        self._service, self._args, self._carry = service, args, carry
        self._context = context

    def begin(self, attempt: Future[Any]) -> None:
        """Send the request once more; WorkerLost if the session that it belongs to is over."""
        # The directory may name another start of the worker. It has a session of its own, in which
        # the request means nothing, or something else.
        peer, member = self._peer, self._agent.directory.get(self._peer.name)
        if member is not peer and (member is None or member.incarnation != peer.incarnation):
            raise WorkerLost(peer.name, why="it left, or was restarted")
        if not self._has_session():
            raise WorkerLost(peer.name, why="the session with it was lost")
        # Without a deadline of its own: `Attempts` ends the request, and with it all attempts.
        self._agent.request(
            peer,
            self._service,
            *self._args,
            timeout=math.inf,
            carry=self._carry,
            future=attempt,
        )

    def is_retryable(self, error: BaseException) -> bool:
        """Whether the request never left: then the peer is not lost, and said nothing to it."""
        return isinstance(error, WorkerLost) and self._has_session()

    def _has_session(self) -> bool:
        return not self._agent.closed and self._link.error is None

    def wait(self, pause: float, then: Callable[[], None]) -> Cancellable:
        """Send another request after a pause."""
        # A timer, not a task: there are many requests, and nearly all are answered the first time.
        return self._agent.loop.call_later(pause, then, context=self._context)
