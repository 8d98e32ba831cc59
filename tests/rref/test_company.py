"""What comes up one by one is told together."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from aiograd.rref.company import Company
from tests.support.waiting import until


@pytest.fixture
async def told():
    return []


@pytest.fixture
async def company(told):
    loop = asyncio.get_running_loop()
    company = Company(loop, contextvars.copy_context(), lambda: told.append(loop.time()))
    yield company
    company.close()


async def test_the_first_is_told_of_in_the_next_tick(company, told):
    company.expect()
    assert not told
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(told) == 1


async def test_those_that_follow_are_told_of_together(company, told, monkeypatch):
    monkeypatch.setattr("aiograd.rref.company.WHILE", 0.1)
    company.expect()
    await until(lambda: told)
    for _ in range(20):
        company.expect()
        await asyncio.sleep(0)
    await until(lambda: len(told) > 1)
    assert told[1] - told[0] >= 0.09, "they waited for each other"


async def test_things_come_up_in_any_thread(company, told):
    thread = threading.Thread(target=company.expect)
    thread.start()
    thread.join()
    await until(lambda: told)
    assert len(told) == 1


async def test_nobody_is_told_after_the_end(company, told, monkeypatch):
    monkeypatch.setattr("aiograd.rref.company.WHILE", 3600.0)
    company.expect()
    await until(lambda: told)
    company.expect()
    await until(lambda: company._later is not None)
    company.close()
    assert company._later.cancelled()
    assert len(told) == 1
