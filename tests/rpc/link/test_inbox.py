"""The order in which messages take effect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiograd.errors import ProtocolError
from aiograd.rpc.link.receive import Inbox, Once
from aiograd.wire.messages import CALL, ITEM, POST, REPLY, REQUEST


class Log(list):
    def note(self, name):
        return lambda: self.append(name)


def test_calls_overtake_calls_but_posts_wait():
    inbox, log = Inbox(), Log()
    inbox.announce("big", CALL, 1, log.note("big call"))
    inbox.put(CALL, 2, log.note("call"))
    inbox.put(POST, 3, log.note("post"))
    inbox.put(CALL, 4, log.note("call behind post"))
    inbox.put(REPLY, 9, log.note("reply"))
    assert log == ["call", "reply"]
    inbox.complete("big")
    assert log == ["call", "reply", "big call", "post", "call behind post"]
    assert not inbox.entries


def test_a_large_post_holds_back_what_was_sent_later():
    inbox, log = Inbox(), Log()
    inbox.announce("big", POST, 1, log.note("big post"))
    inbox.put(CALL, 2, log.note("call"))
    inbox.put(REQUEST, 3, log.note("request"))
    assert log == []
    inbox.complete("big")
    assert log == ["big post", "call", "request"]


def test_a_stream_stays_in_order():
    inbox, log = Inbox(), Log()
    inbox.announce("big", ITEM, 5, log.note("large item"))
    inbox.put(ITEM, 6, log.note("item of another"))
    inbox.put(ITEM, 5, log.note("item"))
    inbox.put(REPLY, 5, log.note("end"))
    assert log == ["item of another"]
    inbox.complete("big")
    assert log == ["item of another", "large item", "item", "end"]


def test_a_large_message_is_known_from_its_announcement_to_its_end():
    inbox, log = Inbox(), Log()
    assert "big" not in inbox
    inbox.announce("big", CALL, 1, log.note("big call"))
    assert "big" in inbox
    assert "other" not in inbox
    inbox.complete("big")
    assert "big" not in inbox


def test_a_call_can_be_found_while_it_waits():
    inbox, log = Inbox(), Log()
    inbox.announce("big", POST, 1, log.note("post"))
    inbox.put(CALL, 2, log.note("call"))
    inbox.announce("answer", REPLY, 3, log.note("reply"))  # to a call of ours with that number
    assert [inbox.has_call(number) for number in (1, 2, 3, 4)] == [True, True, False, False]
    inbox.complete("big")
    assert not inbox.has_call(1)
    assert not inbox.has_call(2)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.booleans())))
def test_numbers_that_rise_are_fresh_and_copies_of_the_latest_are_not(steps):
    once, number = Once(), 0
    for step, copied in steps:  # a step above 1 leaves numbers out
        number += step
        assert once.fresh(number)
        if copied:
            assert not once.fresh(number)


@pytest.mark.parametrize("number", [0, 1, 6])
def test_a_number_that_falls_is_an_error_and_not_a_copy(number):
    once = Once()
    assert once.fresh(7)
    with pytest.raises(ProtocolError, match=f"message {number} was announced after message 7"):
        once.fresh(number)
    with pytest.raises(ProtocolError, match=f"message {number} was announced after message 7"):
        once.take_batch(number, 3)


def test_numbers_begin_with_one():
    with pytest.raises(ProtocolError, match="message 0"):
        Once().fresh(0)
    assert Once().fresh(1)


def test_a_row_takes_all_its_numbers():
    once = Once()
    once.take_batch(1, 3)
    with pytest.raises(ProtocolError, match="message 2 was announced after message 3"):
        once.fresh(2)
    with pytest.raises(ProtocolError, match="message 3 was announced after message 3"):
        once.take_batch(3, 2)
    once.take_batch(4, 0)  # says nothing, and takes nothing
    assert once.fresh(4)
