"""torch's own tests pass on the drop-in, but for a list of exceptions (`exceptions.py`)."""

from __future__ import annotations

import fnmatch
import os
import warnings

import pytest

from tests.compat.exceptions import EXCEPTIONS, OUT_OF_SCOPE
from tests.compat.upstream import load, names_of, run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch says about itself
    SUITES = load()
TESTS = names_of(SUITES)
# Never to be raised.
MISSING = 1
LISTED = {**OUT_OF_SCOPE, **EXCEPTIONS}
# Slow, because most of them hang until they are ended: only on demand.
TRY_EXCEPTIONS = "AIOGRAD_TRY_EXCEPTIONS" in os.environ


def reason_of(test: str, table: dict[str, str]) -> str | None:
    return next((why for name, why in table.items() if fnmatch.fnmatchcase(test, name)), None)


def marked(test: str) -> object:
    why = reason_of(test, LISTED)
    if why is None:
        return test
    # Strict: an exception that passes has to leave the list.
    return pytest.param(test, marks=pytest.mark.xfail(run=TRY_EXCEPTIONS, reason=why, strict=True))


@pytest.mark.parametrize("test", [marked(test) for test in TESTS])
def test_torchs_own_test_passes(test: str) -> None:
    suite, _, method = test.partition(".")
    outcome = run(SUITES[suite], method)
    if outcome.state == "skipped":
        pytest.skip("torch skips it")
    assert outcome.state == "passed", outcome.output


def test_every_exception_is_a_test_of_torch() -> None:
    for name in LISTED:
        assert fnmatch.filter(TESTS, name), f"{name} names no test"


def test_the_list_of_missing_tests_has_not_grown() -> None:
    promised = [test for test in TESTS if reason_of(test, OUT_OF_SCOPE) is None]
    missing = [test for test in promised if reason_of(test, EXCEPTIONS) is not None]
    assert len(missing) <= MISSING, missing
