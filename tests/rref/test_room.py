"""Room: a table is counted only when the last count is used up, and not all the time."""

from __future__ import annotations

from aiograd.rref.room import PAUSE, Room


class Table:
    def __init__(self, most: int) -> None:
        self.entries = {"clinic": 0, "lab": 0}
        self.counts = 0
        self.now = 0.0
        self.takes = 0.0  # seconds of a count
        self.room = Room(self.count, lambda: most, lambda: self.now)

    def count(self, name: str) -> int:
        self.counts += 1
        self.now += self.takes
        return self.entries[name]

    def add(self, name: str, more: int = 1) -> bool:
        if self.room.take(name, more):
            self.entries[name] += more
            return True
        return False


def test_each_partner_has_room_of_its_own():
    table = Table(10)
    assert [table.add("clinic") for _ in range(12)] == [True] * 10 + [False] * 2
    assert table.add("lab", 10)
    assert not table.add("lab")


def test_what_was_given_back_is_found_by_the_next_count():
    table = Table(10)
    assert table.add("clinic", 10)
    table.entries["clinic"] = 4
    assert not table.add("clinic")  # too soon
    table.now += PAUSE
    assert table.add("clinic", 6)
    assert not table.add("clinic")


def test_a_partner_at_its_limit_does_not_make_us_count_all_day():
    table = Table(10)
    table.takes = 0.05
    table.add("clinic", 10)
    for _ in range(1000):
        table.add("clinic")
        table.now += 0.01
    assert table.counts <= 12  # ten seconds, of which half a second is counting
