"""Sessions that go on: bytes arrive once and in order, however often connections break."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiograd.errors import ProtocolError
from aiograd.wire.framing import FrameReader
from aiograd.wire.messages import PING
from aiograd.wire.session import (
    ACCEPTED,
    ACK_NOW,
    ACK_WITH_WRITE,
    DIAL,
    DUPLICATE,
    LOOK,
    LOST,
    NUDGE,
    RESUME,
    Offer,
    Session,
)

# ── bytes ───────────────────────────────────────────────────────────────────────────────────────


def test_what_was_sent_is_kept_until_it_is_known_to_have_come():
    session = Session()
    for piece in (b"one", b"two", b"three"):
        session.keep(piece)
    assert session.unacknowledged(0) == [b"one", b"two", b"three"]
    session.acknowledged(4)  # in the middle of the second
    assert (session.base, list(session.kept)) == (3, [b"two", b"three"])
    assert session.unacknowledged(4) == [b"wo", b"three"]
    session.acknowledged(11)
    assert (session.unacknowledged(11), session.base) == ([], 11)


def test_old_news_changes_nothing():
    session = Session()
    session.keep(b"one")
    session.acknowledged(3)
    session.acknowledged(1)
    assert session.base == 3


def test_news_of_bytes_that_were_never_sent_breaks_the_protocol():
    session = Session()
    session.keep(b"one")
    with pytest.raises(ProtocolError):
        session.acknowledged(4)


def test_memory_is_bounded_and_what_was_let_go_cannot_be_resumed():
    session = Session(limit=10)
    for _ in range(100):
        session.keep(b"abcd")
        assert sum(map(len, session.kept)) <= 10
    assert session.sent == 400
    assert not session.resumable(388)
    assert session.resumable(392)
    assert session.unacknowledged(392) == [b"abcd", b"abcd"]


def test_as_much_is_kept_as_there_is_memory_for_and_no_more():
    session = Session(limit=8)
    session.keep(b"abcd")
    session.keep(b"efgh")
    assert session.unacknowledged(0) == [b"abcd", b"efgh"]  # all of it fits
    session.keep(b"ij")
    assert not session.resumable(3)
    assert session.unacknowledged(4) == [b"efgh", b"ij"]
    session.keep(b"kl")
    assert session.unacknowledged(4) == [b"efgh", b"ij", b"kl"]  # what was let go has made room
    session.keep(b"m")
    assert session.unacknowledged(8) == [b"ij", b"kl", b"m"]


def test_what_has_come_makes_room_for_more():
    session = Session(limit=8)
    session.keep(b"abcd")
    session.acknowledged(4)
    session.keep(b"efgh")
    session.keep(b"ijkl")
    assert session.unacknowledged(4) == [b"efgh", b"ijkl"]
    session.keep(b"m")
    assert not session.resumable(7)


def test_news_is_due_as_soon_as_enough_has_come_and_not_before():
    session = Session()
    assert (session.acked, session.due, session.overdue) == (0, ACK_WITH_WRITE, ACK_NOW)
    session.received = 100
    session.acknowledge()
    assert (session.acked, session.due, session.overdue) == (
        100,
        100 + ACK_WITH_WRITE,
        100 + ACK_NOW,
    )


def test_without_memory_nothing_is_resumable_but_the_end():
    session = Session(limit=0)
    session.keep(b"abcd")
    assert not session.kept
    assert session.resumable(4)
    assert not session.resumable(3)


def test_an_acknowledgement_is_a_ping_that_says_how_much_came():
    session = Session()
    session.received = 1234
    (ping,) = FrameReader().feed(session.acknowledge())
    assert (ping.kind, ping.id) == (PING, 1234)
    assert (session.due, session.overdue) == (1234 + ACK_WITH_WRITE, 1234 + ACK_NOW)


def test_borrowed_memory_is_copied_when_nobody_knows_for_how_long():
    session, array = Session(), bytearray(b"values")
    session.keep(memoryview(array))
    session.copy_kept()
    array[:] = b"others"
    assert session.unacknowledged(0) == [b"values"]


# ── who dials ───────────────────────────────────────────────────────────────────────────────────


def connected(number=1):
    dials, waits = Session(), Session()
    assert waits.answer(dials.offer(number)) == ACCEPTED
    assert dials.accepted(Offer(DIAL, number, 0, number), waits.received, 0)
    return dials, waits


def test_the_side_that_dialled_dials_again_and_the_other_one_nudges():
    dials, waits = connected()
    assert dials.offer(2) == Offer(RESUME, 2, 0, 1)
    assert waits.offer(7) == Offer(NUDGE, 1, 0, 1)
    assert waits.answer(dials.offer(2)) == ACCEPTED
    assert waits.number == 2


def test_of_two_that_dial_at_once_one_is_preferred():
    session = Session()
    assert session.answer(Offer(DIAL, 5), dialling=True, first=True) == DUPLICATE
    assert session.answer(Offer(DIAL, 5), dialling=True, first=False) == ACCEPTED


def test_a_nudge_counts_for_the_connection_it_is_about():
    dials, waits = connected(4)
    nudge = waits.offer(9)
    assert dials.answer(nudge) == DUPLICATE
    assert dials.nudged(nudge)
    dials.accepted(Offer(RESUME, 5, 0, 4), 0, 0)
    assert not dials.nudged(nudge)


def test_a_dial_that_was_given_up_comes_too_late():
    _, waits = connected(3)
    assert waits.answer(Offer(RESUME, 3, 0, 3)) == DUPLICATE
    assert waits.answer(Offer(RESUME, 2, 0, 3)) == DUPLICATE


def test_the_first_connection_may_be_dialled_again_when_the_answer_got_lost():
    waits = Session()
    assert waits.answer(Offer(DIAL, 1, 0, 1)) == ACCEPTED
    waits.keep(b"hello")
    again = Offer(DIAL, 2, 0, 1)
    assert not waits.replaced_by(again)
    assert waits.answer(again) == ACCEPTED
    assert waits.unacknowledged(0) == [b"hello"]


def test_whoever_forgot_the_session_does_not_begin_it_anew():
    assert Session().answer(Offer(RESUME, 2, 0)) == LOST
    assert Session().answer(Offer(NUDGE, 2, 0)) == LOST


def test_positions_that_cannot_be_are_the_end():
    dials, waits = connected()
    assert waits.answer(Offer(RESUME, 2, 1, 1)) == LOST
    assert not dials.accepted(Offer(RESUME, 2, 0, 1), 1, 0)


def test_a_look_changes_nothing():
    _, waits = connected()
    assert waits.answer(Offer(LOOK)) == DUPLICATE
    assert (waits.role, waits.number) == ("waits", 1)


# ── the session after a lost one ────────────────────────────────────────────────────────────────


def test_a_dial_of_another_session_says_that_this_one_is_lost():
    dials, waits = connected(4)
    assert waits.replaced_by(Offer(DIAL, 5, 0, 5))
    assert dials.replaced_by(Offer(DIAL, 1, 0, 1))  # the other side numbers its own dials
    for session in (dials, waits):
        for word in (RESUME, NUDGE, LOOK):
            assert not session.replaced_by(Offer(word, 5, 0, 5))
    assert not Session().replaced_by(Offer(DIAL, 1, 0, 1))  # nothing has begun


def test_a_dial_that_crossed_ours_does_not_end_the_session_that_ours_began():
    """It was made before the peer took our dial, and says nothing about the session."""
    ours = Session()
    offer = ours.offer(1)
    assert ours.accepted(offer, 0, latest=7)
    crossed, later = Offer(DIAL, 7, 0, 6), Offer(DIAL, 8, 0, 8)
    assert not ours.replaced_by(crossed)
    assert ours.answer(crossed) == DUPLICATE
    assert ours.replaced_by(later)


def test_a_dial_that_is_older_than_the_loss_comes_too_late():
    fresh = Session(fence=5)
    assert fresh.answer(Offer(DIAL, 5, 0, 5)) == DUPLICATE
    assert fresh.role == ""
    assert fresh.answer(Offer(DIAL, 6, 0, 6)) == ACCEPTED


def test_nothing_of_an_old_session_goes_on_in_a_new_one():
    dials, waits = connected(9)
    assert waits.answer(Offer(RESUME, 10, 0, 3)) == LOST
    assert waits.number == 9
    assert dials.answer(Offer(NUDGE, 9, 0, 3)) == LOST
    assert dials.answer(Offer(NUDGE, 9, 0, 9)) == DUPLICATE


class End:
    """One of two workers, as `Links` treats its sessions; what it says goes into `sent`."""

    def __init__(self, first: bool) -> None:
        self.first, self.dials, self.fence = first, 0, 0
        self.session: Session | None = None
        self.state = "lost"
        self.attempt: Offer | None = None  # the dial under way
        self.sent: list[Any] = []

    def dial(self) -> None:
        if self.session is None:
            self.session, self.state = Session(fence=self.fence), "dialling"
        if self.state in ("dialling", "away"):
            self.dials += 1
            self.attempt = self.session.offer(self.dials)
            self.sent.append(("offer", self.session, self.attempt))

    def lose(self) -> None:
        if self.session is not None:
            self.fence, self.session, self.state = self.session.fence, None, "lost"

    def cut(self) -> None:
        if self.state == "open":
            self.state = "away"

    def asked(self, client: Session, offer: Offer) -> None:
        if self.session is not None and self.session.replaced_by(offer):
            self.lose()
        if self.session is None:
            if offer.word != DIAL or offer.number <= self.fence:
                status = LOST if offer.word != DIAL else DUPLICATE
                self.sent.append(("answer", client, offer, status, None, self.dials))
                return
            self.session, self.state = Session(fence=self.fence), "new"
        status = self.session.answer(offer, dialling=self.state == "dialling", first=self.first)
        if status == ACCEPTED:
            self.state, self.attempt = "open", None
        elif self.state == "open" and self.session.nudged(offer):
            self.state = "away"
        self.sent.append(("answer", client, offer, status, self.session, self.dials))

    def answered(
        self, client: Session, offer: Offer, status: int, server: Any, latest: int
    ) -> Session | None:
        """The session at the other end of the one that goes on now, if one does."""
        if client is not self.session or offer is not self.attempt:
            return None  # it gave that attempt up, and closed its connection
        if status == LOST:
            self.lose()
        elif status == ACCEPTED:
            client.accepted(offer, 0, latest)
            self.state, self.attempt = "open", None
            return server  # type: ignore[no-any-return]
        return None


class TwoEnds:
    """Runs a list of choices: losses, cuts and dials at both ends, late and lost messages."""

    def __init__(self) -> None:
        self.ends = (End(True), End(False))
        self.partners: dict[Session, Session] = {}  # which two sessions ever shared a connection

    def step(self, choice: int) -> None:
        which, what = choice % 2, choice // 2
        end, other = self.ends[which], self.ends[1 - which]
        if what < 3:
            (end.dial, end.lose, end.cut)[what]()
        elif end.sent and what == 3:
            end.sent.pop(0)
        elif end.sent:
            self.deliver(end, other, 0 if what == 4 else -1)

    def deliver(self, end: End, other: End, at: int) -> None:
        kind, client, *rest = end.sent.pop(at)
        if kind == "offer":
            other.asked(client, *rest)
        elif (server := other.answered(client, *rest)) is not None:
            assert self.partners.setdefault(client, server) is server
            assert self.partners.setdefault(server, client) is client

    def settle(self) -> None:
        """The network is back: whoever has no open session dials, and nothing gets lost."""
        for _ in range(12):
            for end, other in (self.ends, self.ends[::-1]):
                if end.state != "open":
                    end.dial()
                while end.sent:
                    self.deliver(end, other, 0)
                while other.sent:
                    self.deliver(other, end, 0)
            if {end.state for end in self.ends} == {"open"}:
                # One whose partner has lost it finds out by its connection, which ends.
                one, two = (end.session for end in self.ends)
                assert one is not None
                if self.partners.get(one) is two:
                    return
                self.ends[0].cut()
        raise AssertionError("two live workers do not find each other")


def check_two_ends(choices: Iterable[int]) -> None:
    ends = TwoEnds()
    for choice in choices:
        ends.step(choice)
    ends.settle()


def test_two_ends_meet_in_one_session_whatever_was_lost_or_late_before():
    """Every short order of events, and many long ones: never are two sessions mixed up."""
    for choices in itertools.product(range(12), repeat=4):
        check_two_ends((0, 8, 9, *choices))  # from an open session on
    chance = random.Random(15)
    for _ in range(4_000):
        check_two_ends(chance.randrange(12) for _ in range(chance.randrange(5, 40)))


# ── any order ───────────────────────────────────────────────────────────────────────────────────


class Side:
    def __init__(self) -> None:
        self.session = Session(limit=400)
        self.written = bytearray()  # everything ever meant for the other side
        self.read = bytearray()
        self.online = 0  # number of the connection it believes in, 0: none


class Sessions(RuleBasedStateMachine):
    """Two sides, connections that break anywhere, handshakes that end halfway."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Side(), Side()  # a dials
        self.wires: dict[tuple[int, str], bytearray] = {}  # bytes on their way, by connection
        self.proofs: list[Offer] = []  # of a, on their way to b
        self.answers: list[tuple[Offer, int, int]] = []  # of b: to what, status, received
        self.dials = 0
        self.over = False

    def side(self, name: str) -> Side:
        return self.a if name == "a" else self.b

    @rule()
    def connect(self) -> None:
        """A handshake that nothing disturbs, after both have noticed."""
        if not self.over:
            self.a.online = self.b.online = 0
            self.dial()
            self.prove(len(self.proofs) - 1, False)
            self.answer()

    @precondition(lambda self: self.a.online or self.b.online)
    @rule(name=st.sampled_from("ab"), data=st.binary(min_size=1, max_size=40))
    def write(self, name: str, data: bytes) -> None:
        """Only while online: an outbox holds everything back otherwise."""
        side = self.side(name)
        if side.online and not self.over:
            side.written += data
            side.session.keep(data)
            self.wires[side.online, name] += data

    @precondition(lambda self: self.a.online or self.b.online)
    @rule(name=st.sampled_from("ab"), count=st.integers(1, 60))
    def deliver(self, name: str, count: int) -> None:
        """Bytes of `name` reach the other side over the connection that side believes in."""
        other = self.side("b" if name == "a" else "a")
        wire = self.wires.get((other.online, name))
        if wire:
            piece = bytes(wire[:count])
            del wire[:count]
            other.read += piece
            other.session.received += len(piece)

    @precondition(lambda self: self.a.online or self.b.online)
    @rule(name=st.sampled_from("ab"))
    def acknowledge(self, name: str) -> None:
        """News that was on its way when it was true, and may be old when it comes."""
        side, other = self.side(name), self.side("b" if name == "a" else "a")
        if side.online and not self.over:
            other.session.acknowledged(side.session.received)

    @precondition(lambda self: self.a.online or self.b.online)
    @rule(name=st.sampled_from("ab"))
    def cut(self, name: str) -> None:
        """One side notices that its connection is broken; the other may still read from it."""
        self.side(name).online = 0

    @precondition(lambda self: not self.a.online and not self.over)
    @rule()
    def dial(self) -> None:
        self.dials += 1
        self.answers.clear()  # it looks at nothing else than this attempt
        self.proofs.append(self.a.session.offer(self.dials))

    @precondition(lambda self: self.proofs and not self.over)
    @rule(which=st.integers(0, 5), lost=st.booleans())
    def prove(self, which: int, lost: bool) -> None:
        """A proof arrives, perhaps one that was given up; the answer may get lost."""
        offer = self.proofs.pop(which % len(self.proofs))
        status = self.b.session.answer(offer)
        if status == ACCEPTED:
            self.b.online = offer.number
            for name in "ab":
                self.wires[offer.number, name] = bytearray()
            for piece in self.b.session.unacknowledged(offer.received):
                self.wires[offer.number, "b"] += piece
        if offer.number == self.dials and not lost:
            self.answers.append((offer, status, self.b.session.received))

    @precondition(lambda self: self.answers and not self.a.online)
    @rule()
    def answer(self) -> None:
        offer, status, received = self.answers.pop()
        if status == LOST:
            assert self.a.session.received < self.b.session.base  # only what was let go
            self.over = True
        elif status == ACCEPTED:
            if not self.a.session.accepted(offer, received, 0):
                assert received < self.a.session.base
                self.over = True
                return
            self.a.online = offer.number
            for piece in self.a.session.unacknowledged(received):
                self.wires[offer.number, "a"] += piece

    @rule()
    def nudge(self) -> None:
        offer = self.b.session.offer(0)
        if self.b.session.role and not self.b.online and self.a.session.nudged(offer):
            assert self.a.session.answer(offer) == DUPLICATE
            self.a.online = 0

    @invariant()
    def every_byte_came_once_and_in_order(self) -> None:
        for side, other in ((self.a, self.b), (self.b, self.a)):
            assert side.written.startswith(other.read)
            assert len(other.read) == other.session.received
            assert sum(map(len, side.session.kept)) <= 400

    @invariant()
    def what_may_be_needed_is_kept(self) -> None:
        for side in (self.a, self.b):
            session = side.session
            kept = b"".join(session.kept)
            assert bytes(side.written[session.base : session.sent]) == kept
            assert session.sent == len(side.written)


EXAMPLES = int(os.environ.get("AIOGRAD_EXAMPLES", "200"))
TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)
