"""Credit can be split without end, and none of it is ever lost."""

from __future__ import annotations

import random

from aiograd.dist.backward.credit import ALL, NONE, is_all, split, together


def test_credit_is_never_lost_however_often_it_is_split() -> None:
    dice = random.Random(7)
    purses = [ALL]
    for _ in range(2000):
        purse = purses.pop(dice.randrange(len(purses)))
        parts = dice.randint(1, 5)
        share, rest = split(purse, parts)
        purses += [share] * (parts - 1) + [rest]
        if len(purses) > 40:
            total = NONE
            for purse in purses:
                total = together(total, purse)
            assert is_all(total)
            purses = [total]


def test_both_halves_of_all_credit_together_are_all_credit() -> None:
    share, rest = split(ALL, 2)
    assert not is_all(share)
    assert is_all(together(share, rest))
    assert is_all((2, 1))


def test_no_credit_adds_nothing() -> None:
    assert together(NONE, (3, 4)) == (3, 4)
    assert split(ALL, 1) == (NONE, ALL)
