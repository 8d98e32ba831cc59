"""F12: exceptions that cannot be sent. F13: arguments and results that cannot be sent."""

from __future__ import annotations

import statistics
import threading
import time

import pytest

import aiograd as ag
from aiograd.errors import RemoteError, SerializationError
from tests.failures.work import echo, outcome


class Stubborn(Exception):
    def __init__(self, lock):
        super().__init__(lock)


class Rebuilt(ValueError):
    """Travels as itself."""


@ag.inline
def fail_stubbornly():
    raise Stubborn(threading.Lock())


@ag.inline
def fail_well():
    raise Rebuilt("as itself")


@ag.inline
def give_a_lock():
    return {"a": [1, threading.Lock()]}


async def duration(call, good: bool) -> float:
    times = []
    for _ in range(30):
        began = time.perf_counter()
        if good:
            await call()
        else:
            await outcome(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def test_f12_f13_unserializable_values_raise_and_the_connection_stays(cluster, figure):
    async with cluster(1):
        connection = ag.current_worker().agent.link("worker0").connection
        error, _ = await outcome(ag.rpc_async("worker0", fail_stubbornly))
        assert type(error) is RemoteError
        assert error.type_name.endswith("Stubborn")
        assert error.worker == "worker0"
        assert "fail_stubbornly" in error.traceback_text
        error, _ = await outcome(ag.rpc_async("worker0", fail_well))
        assert type(error) is Rebuilt
        replies = await duration(lambda: ag.rpc_async("worker0", echo, (1,)), True)
        faults = await duration(lambda: ag.rpc_async("worker0", fail_stubbornly), False)
        what = "an error that cannot travel: `RemoteError`, later than a reply"
        figure("F12", what, 5.0, max(0.0, faults - replies) * 1e3, "ms")

        began = time.perf_counter()
        with pytest.raises(SerializationError, match=r"\['a'\]\[1\]|args") as caught:
            ag.rpc_async("worker0", echo, ({"a": [1, threading.Lock()]},))
        here = time.perf_counter() - began
        assert "lock" in str(caught.value)
        figure("F13", "an argument that cannot travel: raised here", 5.0, here * 1e3, "ms")
        error, _ = await outcome(ag.rpc_async("worker0", give_a_lock))
        assert isinstance(error, SerializationError)
        assert "['a'][1]" in str(error)
        assert error.worker == "worker0"
        assert await ag.rpc_async("worker0", echo, (2,)) == 2
        assert ag.current_worker().agent.link("worker0").connection is connection
