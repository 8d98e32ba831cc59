"""Forks that were sent and not heard of: when holders are asked, and what follows."""

from __future__ import annotations

from aiograd.rref.refcount.audit import Audit
from tests.support.refcount import party

A, B = party(0), party(1)
FIRST, SECOND, THIRD = (0, 1, 1), (0, 1, 2), (0, 1, 3)


def test_a_new_fork_is_asked_about_in_the_second_round() -> None:
    audit = Audit()
    audit.add(FIRST, A)
    assert audit.round() == []
    assert audit.round() == [(A, [FIRST])]


def test_at_shutdown_new_forks_are_asked_about_at_once_and_abandoned_by_one_answer() -> None:
    audit = Audit()
    audit.add(FIRST, A)
    assert audit.round(at_shutdown=True) == [(A, [FIRST])]
    assert audit.answered([FIRST], [FIRST], at_shutdown=True) == [FIRST]


def test_questions_are_grouped_by_holder() -> None:
    audit = Audit()
    for fork, holder in ((FIRST, A), (SECOND, B), (THIRD, A)):
        audit.add(fork, holder)
    assert audit.round(at_shutdown=True) == [(A, [FIRST, THIRD]), (B, [SECOND])]
    assert audit.held_by(A.incarnation) == [FIRST, THIRD]


def test_a_fork_is_abandoned_when_it_is_unknown_twice_in_a_row() -> None:
    audit = Audit()
    audit.add(FIRST, A)
    audit.round()
    assert audit.answered([FIRST], [FIRST]) == []
    assert audit.answered([FIRST], [FIRST]) == [FIRST]


def test_a_fork_that_was_known_in_between_starts_anew() -> None:
    audit = Audit()
    audit.add(FIRST, A)
    audit.answered([FIRST], [FIRST])
    audit.answered([FIRST], [])
    assert audit.round() == []
    assert audit.answered([FIRST], [FIRST]) == []


def test_an_answer_about_a_fork_that_was_heard_of_meanwhile_is_ignored() -> None:
    audit = Audit()
    audit.add(FIRST, A)
    audit.discard(FIRST)
    assert audit.answered([FIRST], [FIRST], at_shutdown=True) == []
    assert (len(audit), FIRST in audit) == (0, False)
