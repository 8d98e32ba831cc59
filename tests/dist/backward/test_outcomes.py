"""What a worker knows of the outcomes of passes, in any order of reports."""

from __future__ import annotations

import itertools

from aiograd.dist.backward.outcomes import Outcomes, Report

ME = ("a", b"a")


def reports(outcomes: Outcomes, peer: bytes) -> list[Report]:
    return list(outcomes.tell(peer, ME))


def test_a_pass_is_undecided_until_its_originator_says_how_it_ended():
    home, there = Outcomes(), Outcomes()
    home.begun(7)
    assert home.version == 0  # nothing to tell
    assert there.outcome(b"a", 7) is None
    home.decided(7, well=True)
    (report,) = reports(home, b"b")
    there.learn(report, b"a")
    assert there.outcome(b"a", 7) is True
    assert there.outcome(b"a", 8) is None  # it had not begun
    assert there.outcome(b"other start of a", 7) is None


def test_a_report_tells_running_passes_failed_ones_and_those_that_ended_well_apart():
    home, there = Outcomes(), Outcomes()
    for number in (3, 5, 8, 9):  # the numbers between belong to other contexts
        home.begun(number)
    home.decided(8, well=False)
    home.decided(3, well=True)
    (report,) = reports(home, b"b")
    there.learn(report, b"a")
    found = {number: there.outcome(b"a", number) for number in (3, 5, 8, 9)}
    assert found == {3: True, 5: None, 8: False, 9: None}
    assert there.best(b"a") == 3


def test_an_outcome_is_decided_once():
    home = Outcomes()
    home.begun(1)
    assert home.decided(1, well=False)
    assert not home.decided(1, well=True)
    (report,) = reports(home, b"b")
    assert report.outcome(1) is False


def test_reports_that_come_in_any_order_leave_the_latest():
    home = Outcomes()
    sent = []
    for number in range(4):
        home.begun(number)
        home.decided(number, well=number % 2 == 0)
        sent += reports(home, b"b")
    for order in itertools.permutations(sent):
        there = Outcomes()
        for report in order:
            there.learn(report, b"a")
        assert [there.outcome(b"a", n) for n in range(4)] == [True, False, True, False]


def test_a_peer_is_told_once_and_never_what_it_said_itself():
    home, there = Outcomes(), Outcomes()
    home.begun(1)
    home.decided(1, well=True)
    assert not home.knows_all(b"b")
    (report,) = reports(home, b"b")
    assert home.knows_all(b"b")
    assert not home.knows_all(b"c")
    assert there.learn(report, b"a")
    assert not there.learn(report, b"c")  # no news
    assert there.knows_all(b"a")  # who said it
    assert not there.knows_all(b"c")
    assert reports(there, b"c") == [report]  # passed on as it is


def test_what_an_originator_said_is_not_told_to_it_again():
    home, there = Outcomes(), Outcomes()
    home.begun(1)
    home.decided(1, well=True)
    (report,) = reports(home, b"b")
    there.learn(report, b"c")  # by way of another
    assert reports(there, b"a") == []


def test_a_report_stays_small_in_a_context_with_many_passes():
    home = Outcomes()
    for number in range(10_000):
        home.begun(number)
        home.decided(number, well=True)
    (report,) = reports(home, b"b")
    assert (report.running, report.failed, report.best) == ((), (), 9_999)
