"""The order in which messages take effect."""

from __future__ import annotations

from hypothesis import example, given
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


@given(st.lists(st.integers(1, 30)))
@example([2, 1])
@example([1, 3, 2])
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
    assert len(once._ahead) == 4096
    assert not once.fresh(3)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5))))
@example([(1, 3), (2, 1), (4, 2)])
def test_numbers_in_a_row_are_fresh_exactly_once(rows):
    once, seen = Once(), set()
    for first, count in rows:
        numbers = range(first, first + count)
        fresh = once.fresh_row(first, count)
        if fresh:
            assert seen == set(range(1, first))
        else:
            for number in numbers:
                assert once.fresh(number) == (number not in seen)
        seen.update(numbers)
