"""Where references were made, as it travels."""

from __future__ import annotations

import sys

from aiograd.rref.refcount import records
from aiograd.rref.refcount.records import NOWHERE, Places


def test_a_place_is_read_as_it_was_named() -> None:
    frame = sys._getframe()
    named, line = Places().name(frame), frame.f_lineno
    assert Places().read(named) == (__file__, line)


def test_each_line_has_a_name_of_its_own() -> None:
    here = Places()
    first = here.name(sys._getframe())
    second = here.name(sys._getframe())
    assert first != second


def test_nothing_and_nonsense_mean_nowhere() -> None:
    here = Places()
    for named in (b"", b"no line", b"file.py:", b"file.py:x", b"\xff\xfe", b"f:" + b"9" * 5000):
        assert here.read(named) == NOWHERE


def test_a_place_of_any_length_is_cut_and_still_has_its_line() -> None:
    code = compile("import sys; frame = sys._getframe()", "d/" * 5000 + "app.py", "exec")
    space: dict[str, object] = {}
    exec(code, space)
    named = Places().name(space["frame"])  # type: ignore[arg-type]
    file, line = Places().read(named)
    assert len(named) <= records._LONGEST
    assert (file.endswith("d/app.py"), line) == (True, 1)


def test_only_so_many_places_are_remembered() -> None:
    here = Places()
    for number in range(3 * records._MOST):
        assert here.read(b"app.py:%d" % number) == ("app.py", number)
    assert len(here._read) <= records._MOST
