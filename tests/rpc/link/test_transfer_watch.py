"""Large messages of a partner that come too slowly are overdue, and no others."""

from __future__ import annotations

from aiograd.rpc.link.transfer_watch import PATIENCE, TransferWatch


def test_a_message_of_which_nothing_comes_is_overdue_after_a_window():
    watch = TransferWatch(1000)
    for second in range(int(PATIENCE)):
        assert watch.overdue(second, 0, {1: 10**9}) == []
    assert watch.overdue(PATIENCE, 0, {1: 10**9}) == [1]


def test_a_message_that_comes_at_the_least_rate_is_in_time():
    watch = TransferWatch(1000)
    size = 100_000
    for second in range(100):
        assert watch.overdue(second, 1000 * second, {1: size - 1000 * second}) == []


def test_a_message_that_is_starved_by_others_has_a_deadline():
    watch = TransferWatch(1000)
    late = []
    for second in range(45):
        others = {100 + second: 500}  # one after the other, at twice the rate
        late += watch.overdue(second, 2000 * second, {1: 10_000} | others)
    assert late[0] == 1
    assert set(late) == {1}


def test_many_messages_share_the_rate():
    watch = TransferWatch(1000)
    sizes = dict.fromkeys(range(10), 10_000)
    received = 0
    for second in range(100):
        assert watch.overdue(second, received, {n: left for n, left in sizes.items() if left}) == []
        for _ in range(1000):
            number = received % 10
            sizes[number] -= 1
            received += 1


def test_a_window_begins_with_the_first_message_after_a_pause():
    watch = TransferWatch(1000)
    assert watch.overdue(0, 0, {1: 10}) == []
    assert watch.overdue(5, 10, {}) == []
    assert watch.overdue(PATIENCE, 10, {2: 10}) == []
    assert watch.overdue(PATIENCE + 5, 10, {2: 10}) == []
    assert watch.overdue(2 * PATIENCE, 10, {2: 10}) == [2]
