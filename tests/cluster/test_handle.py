"""Handles of workers: what they log names the user's line, not ours."""

from __future__ import annotations

import asyncio
import logging
import sys

import pytest

import aiograd as ag


def fail() -> None:
    raise ValueError("on purpose")


async def test_a_forgotten_call_of_a_handle_is_logged_with_the_users_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with ag.LocalCluster(1, processes=False) as cluster:
        with caplog.at_level(logging.WARNING, "aiograd"):
            call = cluster["worker0"].call(fail)
            line = sys._getframe().f_lineno - 1
            await asyncio.wait([call])
            del call
            await cluster["worker0"].call(int)
    assert any(f"{__file__}:{line}" in record.getMessage() for record in caplog.records)


def show(**given: int) -> dict[str, int]:
    return given


async def test_short_forms_take_arguments_of_any_name() -> None:
    given = {"func": 1, "self": 2, "to": 3}
    async with ag.LocalCluster(1, processes=False) as cluster:
        assert await cluster["worker0"].call(show, **given) == given
        assert await cluster["worker0"].remote(show, **given) == given
        assert await ag.Group(["worker0"]).call(show, **given) == [given]
