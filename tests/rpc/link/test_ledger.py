"""The ledger: one account per partner's name, and what is kept gives back its part."""

from __future__ import annotations

import gc
import threading

import pytest

from aiograd.errors import Overloaded
from aiograd.rpc.link.inbound_budget import Budget
from aiograd.rpc.link.ledger import MEMORY, REMEMBERED, SHARES, Accounts
from aiograd.rpc.observe.metrics import NAMES, Limits
from aiograd.rpc.options import Options


class Ledger:
    def __init__(self, whole: int = 100, **options: int) -> None:
        self.limits, self.now = Limits(), 0.0
        self.whole = Budget(whole, self.limits)
        settings = Options(**{"partner_memory": 40, "partner_contexts": 2} | options)
        self.accounts = Accounts("here", self.whole, settings, self.limits, lambda: self.now)


def test_accounts_give_back_to_the_whole():
    ledger = Ledger()
    clinic, lab = ledger.accounts.of("clinic"), ledger.accounts.of("lab")
    assert ledger.accounts.of("clinic") is clinic
    assert clinic.reserve(40)
    assert not clinic.reserve(1)
    assert lab.reserve(40)
    assert not lab.reserve(30)
    clinic.release(40)
    assert (ledger.whole.used, clinic.used) == (40, 0)
    lab.unavailable(40)
    assert (ledger.whole.used, lab.used) == (0, 0)


@pytest.mark.parametrize("what", SHARES)
def test_every_share_has_a_limit_a_counter_and_an_error_that_names_it(what):
    ledger = Ledger(partner_values=80)
    clinic = ledger.accounts.of("clinic")
    hold = clinic.hold()
    most = SHARES[what](Options(partner_contexts=2, partner_values=80))
    hold.take(what, most)
    with pytest.raises(Overloaded, match=rf"clinic has {most} {what} of {most}"):
        hold.take(what)
    assert what in NAMES
    assert ledger.limits[what] == 1
    ledger.accounts.of("lab").hold().take(what)
    hold.close()
    clinic.hold().take(what)


def test_a_hold_gives_back_once():
    ledger = Ledger()
    clinic = ledger.accounts.of("clinic")
    hold = clinic.hold()
    hold.take("contexts")
    hold.take(MEMORY, 30)
    hold.give_back(MEMORY, 10)
    assert clinic.as_dict() | {"contexts": 1, MEMORY: 20} == clinic.as_dict()
    hold.close()
    hold.close()
    hold.give_back("contexts")
    hold.give_back(MEMORY, 20)
    assert not any(clinic.as_dict().values())
    assert ledger.whole.used == 0


def test_what_is_dropped_in_another_thread_is_given_back_when_it_is_needed():
    ledger = Ledger(whole=50)
    clinic = ledger.accounts.of("clinic")
    holds = [clinic.hold() for _ in range(2)]
    for hold in holds:
        hold.take(MEMORY, 20)
    del hold
    thread = threading.Thread(target=holds.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert clinic.used == 40  # only the loop changes it
    assert ledger.whole.reserve(50)  # a trusted peer needs it
    assert clinic.used == 0


def test_memory_that_is_used_up_is_refused_by_name():
    ledger = Ledger()
    hold = ledger.accounts.of("clinic").hold()
    with pytest.raises(Overloaded, match="no memory for what is kept for it, 41 bytes"):
        hold.take(MEMORY, 41)
    assert ledger.limits[MEMORY] == 1


def test_a_name_has_one_account_as_long_as_anything_of_it_is_kept():
    ledger = Ledger()
    hold = ledger.accounts.of("clinic").hold()
    hold.take("contexts", 2)
    for number in range(REMEMBERED + 1):
        ledger.accounts.of(f"w{number}")
    with pytest.raises(Overloaded):
        ledger.accounts.of("clinic").check("contexts")
    assert len(ledger.accounts.as_dict()) <= REMEMBERED + 1


def test_a_partner_begins_few_sessions_within_a_lease():
    ledger = Ledger(partner_links=2)
    clinic = ledger.accounts.of("clinic")
    assert [clinic.may_begin() for _ in range(9)] == [True] * 8 + [False]
    assert ledger.limits["partner_sessions"] == 1
    assert ledger.accounts.of("lab").may_begin()
    ledger.now = 10.0
    assert clinic.may_begin()
