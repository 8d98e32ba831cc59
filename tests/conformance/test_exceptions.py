"""Exceptions raised by remote functions."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time

import pytest

import aiograd as ag
from aiograd.errors import RemoteError, WorkerLost
from tests.conformance.forms import FORMS, call, plus

WITHIN = 1.0 * 4  # seconds; a lost worker is promised to be known within 1


def takes_nothing() -> None:
    return None


def raises() -> None:
    raise ValueError("Expected error")


@pytest.mark.parametrize("form", FORMS)
async def test_exc_py(workers, form, caplog):
    async with workers(2):
        with pytest.raises(TypeError, match="takes_nothing"):
            await call(form, "worker1", takes_nothing, 10)
        with pytest.raises(ValueError, match="Expected error") as caught:
            await call(form, "worker1", raises)
        notes = "\n".join(caught.value.__notes__)
        assert "raises" in notes
        assert "worker1" in notes
        assert 'raise ValueError("Expected error")' in notes  # the remote traceback
        assert "Expected error" not in caplog.text  # the caller has it, and decides


async def test_exc_py_is_in_the_output_of_the_callee_if_wanted(workers):
    async with workers(1, processes=True, remote_tracebacks="both") as cluster:
        with pytest.raises(ValueError, match="Expected error"):
            await cluster["worker0"].call(raises)
        async with asyncio.timeout(5):
            while "ValueError: Expected error" not in cluster.logs("worker0"):
                await cluster["worker0"].call(takes_nothing)


LINES = "first line of error \nnext line of error \nlast line of error"


def raises_lines() -> None:
    raise ValueError(LINES)


@pytest.mark.parametrize("form", FORMS)
async def test_exc_escape(workers, form):
    async with workers(2):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
            await call(form, "worker1", raises_lines)
        assert str(caught.value) == LINES


class TakesTwo(Exception):
    """Pickles, but cannot be made again from what `BaseException` remembers."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def raises_two() -> None:
    raise TakesTwo(7, "some text")


@pytest.mark.parametrize("form", FORMS)
async def test_exc_unrebuildable(workers, form):
    async with workers(2):
        with pytest.raises(RemoteError, match="some text") as caught:
            await call(form, "worker1", raises_two)
        assert caught.value.type_name.endswith("TakesTwo")
        assert caught.value.worker == "worker1"
        assert "raise TakesTwo" in caught.value.traceback_text
        assert await call(form, "worker1", plus, 1, 2) == 3


@pytest.fixture
def vanishing(tmp_path, monkeypatch):
    """A module of which the workers will find less than this process has."""
    file = tmp_path / "vanishing_module.py"
    file.write_text("def here():\n    return 1\n\ndef gone():\n    return 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("vanishing_module")
    file.write_text("def here():\n    return 1\n")
    yield module
    sys.modules.pop("vanishing_module")


async def test_exc_missing_function(workers, vanishing):
    async with workers(1, processes=True) as cluster:
        with pytest.raises((AttributeError, RemoteError), match="gone") as caught:
            await cluster["worker0"].call(vanishing.gone)
        assert "worker0" in str(caught.value) + "".join(caught.value.__notes__)
        with pytest.raises((AttributeError, RemoteError), match="gone"):
            await ag.remote("worker0", vanishing.gone).to_here()
        assert await cluster["worker0"].call(vanishing.here) == 1
        assert await cluster["worker0"].call(lambda: 3) == 3  # by value


@pytest.mark.parametrize("to", ["worker1", "driver"])
async def test_exc_remote(workers, to):
    async with workers(2):
        rref = ag.remote(to, raises)
        for _ in range(2):
            with pytest.raises(ValueError, match="Expected error"):
                await rref.to_here()
        wrong = ag.remote(to, takes_nothing, args=(10,))
        with pytest.raises(TypeError):
            await wrong.to_here()
        with pytest.raises(TypeError):
            await wrong.future()


async def forever() -> None:
    await asyncio.Event().wait()


async def test_exc_dead_peer(workers):
    async with workers(2, processes=True, rest=False) as cluster:
        under_way = cluster["worker1"].call(forever)
        rref = ag.remote("worker1", forever)
        assert await cluster["worker1"].call(plus, 1, 2) == 3
        await cluster.kill("worker1")
        began = time.monotonic()
        with pytest.raises(WorkerLost) as caught:
            await under_way
        assert (caught.value.worker, caught.value.executed) == ("worker1", "unknown")
        assert isinstance(caught.value, ConnectionError)
        with pytest.raises(WorkerLost):
            await rref.to_here()
        for _ in range(2):
            with pytest.raises((WorkerLost, LookupError), match="worker1"):
                await ag.rpc_async("worker1", plus, args=(1, 2))
        assert time.monotonic() - began < WITHIN
        assert await cluster["worker0"].call(plus, 1, 2) == 3
