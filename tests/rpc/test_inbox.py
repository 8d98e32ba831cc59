"""The order in which messages take effect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiograd.rpc.inbox import Inbox, Once
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
    assert not inbox


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


@given(st.lists(st.integers(1, 30)))
def test_every_number_is_fresh_exactly_once(numbers):
    once, seen = Once(), set()
    for number in numbers:
        assert once.fresh(number) == (number not in seen)
        seen.add(number)


def test_gaps_do_not_grow_without_end():
    once = Once()
    for number in range(10, 20_000, 2):  # every second one was lost
        assert once.fresh(number)
        assert not once.fresh(number)
    assert len(once._ahead) <= 4097
    assert not once.fresh(3)
