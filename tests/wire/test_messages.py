"""The kinds of messages and their flags."""

from __future__ import annotations

from aiograd.rpc.callee.functions import EXPOSED, SERVICE
from aiograd.wire import messages

FLAGS = "LARGE TRAVELLED METADATA OP STREAM EMPTY FAST BAGGAGE SHARED NESTED KEEP PIGGYBACK".split()
FLAGS += ["LAZY", "BATCH"]


def test_every_flag_is_a_bit_of_its_own():
    values = [getattr(messages, name) for name in FLAGS] + [EXPOSED, SERVICE]
    assert all(value.bit_count() == 1 and value < 1 << 16 for value in values)
    assert len(set(values)) == len(values)


def test_every_kind_has_a_number_of_its_own_and_a_name():
    kinds = [
        value
        for name, value in vars(messages).items()
        if name.isupper() and isinstance(value, int) and name not in FLAGS
    ]
    assert sorted(kinds) == sorted(messages.KINDS)
    assert len(set(messages.KINDS.values())) == len(messages.KINDS)
