"""Credit: how the originator of a pass knows that nothing of it is under way any more.

The originator starts with a credit of 1. Every message carries a share, and what is not needed any
more goes home; when all of it is home, the pass is over (Mattern's credit recovery). A share is a
binary fraction of any length instead of a part of a fixed pool: it can always be split further, so
no worker ever has to ask the originator for more.
"""

from __future__ import annotations

Credit = tuple[int, int]  # a share of the originator's 1, as number / 2**places
NONE: Credit = (0, 0)
ALL: Credit = (1, 0)


def together(one: Credit, other: Credit) -> Credit:
    """Return two shares as one, in lowest terms."""
    if not one[0]:
        return other
    places = max(one[1], other[1])
    number = (one[0] << places - one[1]) + (other[0] << places - other[1])
    # Shortened, or the numbers would grow with every message of a long pass.
    zeros = min((number & -number).bit_length() - 1, places)
    return number >> zeros, places - zeros


def split(credit: Credit, parts: int) -> tuple[Credit, Credit]:
    """Return one of `parts` equal shares, and the rest when `parts - 1` of them are gone."""
    if parts == 1:
        return NONE, credit
    number, places = credit
    bits = parts.bit_length()
    # Rounded down: the remainder stays in the rest, so that nothing is lost.
    share = (number << bits) // parts
    return (share, places + bits), ((number << bits) - share * (parts - 1), places + bits)


def is_all(credit: Credit) -> bool:
    """Tell whether every share is in this one."""
    number, places = credit
    return number == 1 << places
