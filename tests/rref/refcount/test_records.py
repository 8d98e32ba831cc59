"""Records of references: formats of ids and call sites, copies of errors."""

from __future__ import annotations

import struct
import sys

import pytest

from aiograd.rref.refcount import records
from aiograd.rref.refcount.records import (
    FORK_SIZE,
    UNKNOWN_SITE,
    CallSites,
    OwnerRecord,
    fresh_copy,
    pack_fork,
    pack_ids,
    unpack_fork,
    unpack_forks,
    unpack_ids,
)

REF, FORK = (3, 2**64 - 1, 7), (4, 1, 2**40)


def test_a_call_site_is_decoded_as_it_was_encoded() -> None:
    frame = sys._getframe()
    encoded, line = CallSites().encode(frame), frame.f_lineno
    assert CallSites().decode(encoded) == (__file__, line)


def test_two_lines_are_two_call_sites() -> None:
    sites = CallSites()
    first = sites.encode(sys._getframe())
    second = sites.encode(sys._getframe())
    assert first != second


def test_malformed_call_sites_are_decoded_as_unknown() -> None:
    sites = CallSites()
    for encoded in (b"", b"no line", b"file.py:", b"file.py:x", b"\xff\xfe", b"f:" + b"9" * 5000):
        assert sites.decode(encoded) == UNKNOWN_SITE


def test_a_long_call_site_is_cut_and_keeps_its_line() -> None:
    code = compile("import sys; frame = sys._getframe()", "d/" * 5000 + "app.py", "exec")
    space: dict[str, object] = {}
    exec(code, space)
    encoded = CallSites().encode(space["frame"])  # type: ignore[arg-type]
    file, line = CallSites().decode(encoded)
    assert len(encoded) <= records._LONGEST_SITE
    assert (file.endswith("d/app.py"), line) == (True, 1)


def test_the_cache_of_decoded_call_sites_is_bounded() -> None:
    sites = CallSites()
    for number in range(3 * records._MOST_SITES):
        assert sites.decode(b"app.py:%d" % number) == ("app.py", number)
    assert len(sites._decoded) <= records._MOST_SITES


def test_packed_ids_and_forks_are_unpacked_as_they_were() -> None:
    assert unpack_ids(pack_ids([REF, FORK])) == [REF, FORK]
    assert unpack_fork(pack_fork(REF, FORK, 1)) == (REF, FORK, 1)
    assert unpack_forks(pack_fork(REF, FORK, 1) + pack_fork(FORK, REF, 0)) == [
        (REF, FORK, 1),
        (FORK, REF, 0),
    ]


@pytest.mark.parametrize("size", [1, FORK_SIZE - 1, FORK_SIZE + 1])
def test_bytes_of_another_size_are_no_forks(size: int) -> None:
    for unpack in (unpack_fork, unpack_forks):
        with pytest.raises(struct.error):
            unpack(bytes(size))


class Stubborn(Exception):
    def __reduce__(self) -> tuple[object, ...]:
        return ValueError, ("another type",)


def test_a_copy_of_an_error_has_its_cause_and_the_given_traceback() -> None:
    try:
        raise KeyError("x") from ValueError("why")
    except KeyError as caught:
        error, trace = caught, caught.__traceback__
    twin = fresh_copy(error, trace)
    assert twin is not error
    assert (type(twin), twin.args, twin.__cause__) == (KeyError, ("x",), error.__cause__)
    assert twin.__traceback__ is trace
    assert fresh_copy(error).__traceback__ is None


def test_an_error_that_cannot_be_copied_is_used_itself() -> None:
    error = Stubborn()
    assert fresh_copy(error) is error


def test_a_waiter_may_leave_while_all_are_woken() -> None:
    record = OwnerRecord(REF)
    woken = []
    record.waiters["first"] = lambda: record.waiters.pop("second", None)
    record.waiters["second"] = lambda: woken.append(record.value)
    record.settle("value", None)
    record.settle("later", None)
    assert woken == ["value"]
    assert record.result() == "value"
