"""Which messages faults choose; what happens to them is tested with the agent."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.rpc.extension import DROP, DUPLICATE, FAIL, SEND, FaultAction
from aiograd.testing.fault_injection import CALLS, CONTROL, Faults


def actions(faults: Faults, kind: str, times: int, to: str = "b") -> list[str]:
    return [faults.on_send(kind, to).action for _ in range(times)]


def test_fi_options_by_default_the_first_three_control_messages_fail():
    faults = Faults()
    assert len(CONTROL) == 4
    for kind in CONTROL:
        assert actions(faults, kind, 5) == ["fail", "fail", "fail", "send", "send"]
    assert actions(faults, "call", 2) == ["send", "send"]
    assert faults.hit == {("fail", kind): 3 for kind in CONTROL}


def test_fi_options_the_default_delay_is_for_calls_and_ops():
    faults = Faults.delays()
    assert [faults.on_send(kind, "b") for kind in CALLS] == [FaultAction("delay", 1.5)] * 2
    assert faults.on_send("remote", "b") == SEND


def test_fi_options_lists_can_be_replaced_or_emptied():
    faults = Faults(fail={"rref.fetch": 1}, delay={"remote": 0.1})
    assert actions(faults, "rref.fetch", 2) == ["fail", "send"]
    assert actions(faults, CONTROL[0], 1) == ["send"]
    assert faults.on_send("remote", "b") == FaultAction("delay", 0.1)
    assert actions(Faults(fail={}), CONTROL[0], 4) == ["send"] * 4
    assert Faults.delays(kinds=[]).on_send("call", "b") == SEND


def test_counts_hold_for_each_receiver():
    faults = Faults(fail={"call": 1})
    assert actions(faults, "call", 2, to="b") == ["fail", "send"]
    assert actions(faults, "call", 2, to="c") == ["fail", "send"]


def test_kinds_without_a_count_are_always_hit():
    faults = Faults(fail={}, drop=["reply"])
    assert actions(faults, "reply", 50) == ["drop"] * 50


def test_faults_of_one_kind_follow_each_other():
    faults = Faults(fail={"x": 1}, drop={"x": 1}, duplicate={"x": 1}, delay={"x": 2.0})
    late = FaultAction("delay", 2.0)
    assert [faults.on_send("x", "b") for _ in range(5)] == [FAIL, DROP, DUPLICATE, late, late]


@pytest.mark.parametrize("wrong", [{"fail": "call"}, {"drop": "call"}])
def test_a_string_is_not_a_list_of_kinds(wrong):
    with pytest.raises(TypeError, match="not the string"):
        Faults(**wrong)


@pytest.mark.parametrize("wrong", [{"fail": {"call": -1}}, {"delay": {"call": -0.5}}])
def test_negative_counts_and_delays_are_refused(wrong):
    with pytest.raises(ValueError, match="call"):
        Faults(**wrong)


async def shout(text: str) -> str:
    return text.upper()


async def test_a_worker_s_messages_fail_are_lost_and_come_twice(cluster):
    async with cluster(1):
        faults = Faults(fail={"call": 1}, drop={"call": 1}, duplicate={"call": 1})
        ag.current_worker().faults = faults
        with pytest.raises(ag.errors.WorkerLost) as caught:
            await ag.rpc_async("worker0", shout, ("a",))
        assert caught.value.executed == "no"
        with pytest.raises(ag.errors.DeadlineExceeded):
            await ag.rpc_async("worker0", shout, ("b",), timeout=0.05)
        assert await ag.rpc_async("worker0", shout, ("c",)) == "C"
        assert faults.hit == {("fail", "call"): 1, ("drop", "call"): 1, ("duplicate", "call"): 1}


async def test_a_worker_s_messages_come_late(cluster):
    async with cluster(1):
        ag.current_worker().faults = Faults.delays(["call"], 0.1)
        with pytest.raises(ag.errors.DeadlineExceeded):
            await ag.rpc_async("worker0", shout, ("a",), timeout=0.02)
        assert await ag.rpc_async("worker0", shout, ("b",)) == "B"


async def test_faults_can_be_given_to_another_worker(cluster):
    async with cluster(1):
        await ag.rpc_async("worker0", give_faults)
        with pytest.raises(ag.errors.DeadlineExceeded):
            await ag.rpc_async("worker0", shout, ("a",), timeout=0.05)


async def give_faults() -> None:
    faults = Faults(fail={}, drop=["reply"])
    # After the answer to this very call has left.
    asyncio.get_running_loop().call_soon(setattr, ag.current_worker(), "faults", faults)


def test_fi_options_faults_belong_to_the_testing_tools():
    assert ag.testing.Faults is Faults
