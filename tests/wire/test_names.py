"""Names: which there can be, and which of them look alike."""

from __future__ import annotations

import pytest

from aiograd.wire.names import check_name, is_name, look_alike


@pytest.mark.parametrize("name", ["a", "worker-1", "ps:0", "A_b", "x" * 127])
def test_letters_digits_and_three_signs_make_a_name(name):
    assert is_name(name)
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "ban\u212a", "a\n", "*", "x" * 128])
def test_everything_else_is_no_name(name):
    assert not is_name(name)
    with pytest.raises(ValueError, match="no name"):
        check_name(name)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bank", "BANK"),
        ("lab1", "labl"),
        ("lab1", "labI"),
        ("O2", "02"),
        ("go", "g0"),
        ("a-b", "a_b"),
    ],
)
def test_names_that_a_reader_takes_for_each_other_look_alike(first, second):
    assert look_alike(first, second)
    assert look_alike(second, first)


@pytest.mark.parametrize(
    ("first", "second"), [("i", "l"), ("worker1", "worker2"), ("worker1", "worker11"), ("a", "b")]
)
def test_names_of_usual_series_do_not(first, second):
    assert not look_alike(first, second)
