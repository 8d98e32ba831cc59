"""`@ag.inline` functions and registered ops, where torch has TorchScript functions."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

import aiograd as ag
from aiograd.errors import AiogradError, DeadlineExceeded, NotAllowed, NotOwner
from aiograd.testing.fault_injection import Faults
from tests.conformance.forms import FORMS, call
from tests.support.waiting import until

# ── references ──────────────────────────────────────────────────────────────────────────────────


@ag.inline
def make_list() -> list[int]:
    return [0]


@ag.inline
def owns(rref: ag.RRef) -> bool:
    return rref.is_owner()


@ag.inline
def read(rref: ag.RRef) -> Any:
    return rref.local_value()


async def mutate(rref: ag.RRef) -> list[int]:
    rref.local_value().append(1)
    (await rref.to_here()).append(2)
    (await rref.to_here(timeout=5.0)).append(3)
    assert await rref.to_here() is rref.local_value()
    return rref.local_value()


async def test_jit_rref_api(workers):
    async with workers(2):
        rref = ag.remote("worker1", make_list)
        assert not rref.is_owner()
        assert await ag.rpc_async("worker1", owns, args=(rref,))
        assert not await ag.rpc_async("worker0", owns, args=(rref,))
        with pytest.raises(NotOwner) as caught:
            rref.local_value()
        assert caught.value.owner == "worker1"
        assert await ag.rpc_async("worker1", read, args=(rref,)) == [0]
        with pytest.raises(NotOwner):
            await ag.rpc_async("worker0", read, args=(rref,))
        assert await ag.rpc_async("worker1", mutate, args=(rref,)) == [0, 1, 2, 3]
        assert await rref.to_here(timeout=5.0) == [0, 1, 2, 3]
        assert await rref.to_here() is not await rref.to_here()
        assert await mutate(ag.RRef([7])) == [7, 1, 2, 3]


@ag.inline
def is_confirmed(rref: ag.RRef) -> bool:
    return rref.confirmed_by_owner()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to", ["worker0", "worker1", "driver"])
async def test_jit_rref_confirmed(workers, form, to):
    async with workers(2):
        rref = ag.remote("worker1", make_list)
        assert await call(form, to, is_confirmed, rref)
        assert await call(form, to, is_confirmed, ag.RRef(1))


@ag.inline
def pass_on(rref: ag.RRef) -> ag.RRef:
    return rref


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("to", ["worker0", "worker1"])
async def test_jit_rref_arg_return(workers, form, to):
    async with workers(2):
        rref = ag.remote("worker1", make_list)
        returned = await call(form, to, pass_on, rref)
        assert returned.owner_name() == "worker1"
        assert await returned.to_here() == [0]
        nested = ag.remote(to, pass_on, args=(rref,))
        assert await (await nested.to_here()).to_here() == [0]


class Locked:
    """Cannot be pickled: it holds a lock, an event and a thread."""

    def __init__(self) -> None:
        self.lock, self.event = threading.Lock(), threading.Event()
        self.thread = threading.current_thread()
        self.count = 0

    def increase(self, by: int) -> int:
        with self.lock:
            self.event.set()
            self.count += by
            return self.count


async def test_rref_unpicklable_object(workers):
    async with workers(2):
        rref = ag.remote("worker1", Locked)
        assert await rref.rpc_async().increase(2) == 2
        assert await rref.remote().increase(3).to_here() == 5
        assert await asyncio.to_thread(rref.rpc_sync().increase, 4) == 9
        with pytest.raises(TypeError, match="lock"):
            await rref.to_here()
        assert await rref.rpc_async().increase(0) == 9


# ── arguments ───────────────────────────────────────────────────────────────────────────────────


@ag.inline
def three(first: ag.Tensor, second: int = 2, third: float = 5.0) -> float:
    return float(first.sum()) + second + third


@ag.inline
def nothing_needed() -> int:
    return 0


@ag.inline
def of_all_kinds(
    tensor: ag.Tensor, text: str, pair: tuple[int, float], *, flags: dict[str, bool], none: None
) -> tuple[Any, ...]:
    return tensor.tolist(), text, pair, flags, none


@pytest.mark.parametrize("form", FORMS)
async def test_jit_kwargs(workers, form):
    one = ag.ones(3)
    async with workers(2):
        assert await call(form, "worker1", three, one) == 10.0
        assert await call(form, "worker1", three, one, second=1) == 9.0
        assert await call(form, "worker1", three, one, second=1, third=4.0) == 8.0
        assert await call(form, "worker1", three, first=one, third=4.0, second=1) == 8.0
        assert await call(form, "worker1", nothing_needed) == 0
        arguments: dict[str, Any] = {"flags": {"a": True}, "none": None}
        found = await call(form, "worker1", of_all_kinds, one, "text", (1, 2.0), **arguments)
        assert found == ([1.0] * 3, "text", (1, 2.0), {"a": True}, None)


async def test_jit_kwargs_may_be_left_out(workers):
    async with workers(2):
        assert await ag.rpc_async("worker1", nothing_needed) == 0
        assert await ag.rpc_async("worker1", nothing_needed, kwargs=None) == 0
        assert await ag.rpc_async("worker1", nothing_needed, args=(), kwargs={}) == 0
        assert await ag.remote("worker1", nothing_needed).to_here() == 0


@pytest.mark.parametrize("form", FORMS)
async def test_jit_arg_errors(workers, form):
    one = ag.ones(3)
    async with workers(2):
        with pytest.raises(TypeError, match="first"):
            await call(form, "worker1", three)
        with pytest.raises(TypeError, match="positional"):
            await call(form, "worker1", three, one, 1, 4.0, 5)
        with pytest.raises(TypeError, match="unexpected keyword"):
            await call(form, "worker1", three, one, fourth=1)
        assert await call(form, "worker1", three, one) == 10.0


class Unregistered:
    """Looks like an op, but is not registered under its name."""

    op_name = "no_such_op"

    def __call__(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("form", FORMS)
async def test_jit_remote_lookup_errors(workers, form):
    async with workers(2):
        for _ in range(2):
            with pytest.raises(NotAllowed, match="no_such_op"):
                await call(form, "worker1", Unregistered(), 1)
        rref = ag.remote("worker1", Unregistered(), args=(1,))
        for use in (rref.to_here, rref.rpc_async().bit_length, rref.future):
            with pytest.raises(NotAllowed, match="no_such_op"):
                await use()
        assert (await call(form, "worker1", ag.add, 1, 2)).item() == 3


# ── calls and errors ────────────────────────────────────────────────────────────────────────────


@ag.inline
def raises(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("form", FORMS)
async def test_jit_remote_raise(workers, form, to):
    async with workers(2):
        with pytest.raises(ValueError, match="Expected error") as caught:
            await call(form, to, raises, "Expected error")
        if (form, to) != ("remote", "driver"):  # there the very exception is at hand
            assert to in "".join(caught.value.__notes__)
        with pytest.raises(TypeError):
            await call(form, to, raises)
        with pytest.raises(ValueError, match="matmul"):
            await call(form, to, ag.matmul, ag.ones(2, 2), ag.ones(3, 3))


async def with_a_task_of_its_own(x: ag.Tensor) -> ag.Tensor:
    async def later() -> ag.Tensor:
        await asyncio.sleep(0)
        return x * 2.0

    return await asyncio.create_task(later()) + 1.0


@ag.inline
def doubled_and_one(x: ag.Tensor) -> ag.Tensor:
    return x * 2.0 + 1.0


@pytest.mark.parametrize("func", [doubled_and_one, with_a_task_of_its_own])
@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("form", FORMS)
async def test_jit_calls(workers, form, to, func):
    async with workers(2):
        assert (await call(form, to, func, ag.ones(2))).tolist() == [3.0, 3.0]


async def test_jit_calls_with_callbacks(workers):
    async with workers(2):
        order = []
        future = ag.rpc_async("worker1", doubled_and_one, args=(ag.ones(2),))
        future.add_done_callback(lambda done: order.append(("first", done.result().tolist())))
        future.add_done_callback(lambda done: order.append(("second", done.result().tolist())))
        await future
        await until(lambda: len(order) == 2)
        assert order == [("first", [3.0, 3.0]), ("second", [3.0, 3.0])]


async def add_elsewhere(to: str, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
    return await ag.rpc_async(to, ag.add, args=(x, y))


@pytest.mark.parametrize("form", FORMS)
async def test_jit_async(workers, form):
    async with workers(2):
        found = await call(form, "worker1", add_elsewhere, "worker0", ag.ones(2), ag.ones(2))
        assert found.tolist() == [2.0, 2.0]


async def test_jit_async_twenty_references(workers):
    async with workers(2):
        references = [
            ag.remote("worker1", add_elsewhere, args=("worker0", ag.ones(2), ag.full((2,), n)))
            for n in range(20)
        ]
        for n, each in enumerate(references):
            assert (await each.to_here()).tolist() == [1.0 + n] * 2


# ── late and lost messages ──────────────────────────────────────────────────────────────────────

DELAY = 0.1  # seconds by which messages leave late below
SHORT = 0.5  # seconds; as a default, it also has to do for starting the cluster


async def ask_inside(timeout: float | None) -> str:
    """Wait for a delayed call inside a called function."""
    return await ag.rpc_async("worker1", doubled_text, args=("a",), timeout=timeout)


@ag.inline
def doubled_text(text: str) -> str:
    return text * 2


async def suffer(faults: Faults) -> None:
    ag.current_worker().agent.fault_injector = faults


@pytest.mark.parametrize("where", ["inside", "outside"])
async def test_jit_fi_timeouts(workers, where):
    async with workers(2) as cluster:
        victim = "worker0" if where == "inside" else "driver"
        await ag.rpc_async(victim, suffer, args=(Faults.delays(["call"], DELAY),))
        run = cluster["worker0"].call if where == "inside" else call_here
        with pytest.raises(DeadlineExceeded) as caught:
            await run(ask_inside, 0.02)
        assert caught.value.worker == "worker1"
        assert await run(ask_inside, None) == "aa"
        assert await run(ask_inside, math.inf) == "aa"


async def call_here(func: Any, *args: Any) -> Any:
    return await func(*args)


async def test_jit_fi_timeouts_by_default(workers):
    async with workers(2, timeout=SHORT) as cluster:
        await suffer(Faults.delays(["call"], 1.5 * SHORT))
        impatient = ag.rpc_async("worker1", doubled_text, args=("a",))
        patient = [
            ag.rpc_async("worker1", doubled_text, args=("a",), timeout=seconds)
            for seconds in (20.0, math.inf)
        ]
        with pytest.raises(DeadlineExceeded):
            await impatient
        assert await asyncio.gather(*patient) == ["aa", "aa"]
        cluster.driver.agent.fault_injector = None


async def use(rref: ag.RRef) -> Any:
    return await rref.to_here()


async def test_jit_fi_rref_whose_creation_was_lost(workers):
    async with workers(2) as cluster:
        await suffer(Faults(fail={}, drop=["remote"]))
        rref = ag.remote("worker1", make_list, timeout=0.02)
        with pytest.raises(DeadlineExceeded):
            await rref.future()
        cluster.driver.agent.fault_injector = None
        with pytest.raises(AiogradError, match=r"creat|did not answer"):
            await rref.to_here()
        with pytest.raises(AiogradError, match=r"creat|did not answer"):
            await ag.rpc_async("worker0", use, args=(rref,))


async def test_jit_fi_rref_whose_fetch_is_late(workers):
    async with workers(2):
        rref = ag.remote("worker1", make_list)
        await rref.future()
        await suffer(Faults.delays(["rref.fetch"], DELAY))
        with pytest.raises(DeadlineExceeded):
            await rref.to_here(timeout=0.01)
        assert await rref.to_here(timeout=100.0) == [0]


# ── delayed calls ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["async", "sync"])
async def test_fi_call_delayed(workers, form):
    async def run(timeout: float | None) -> Any:
        args = (ag.ones(2), ag.ones(2))
        if form == "async":
            return await ag.rpc_async("worker1", ag.add, args=args, timeout=timeout)
        return await asyncio.to_thread(ag.rpc_sync, "worker1", ag.add, args, timeout=timeout)

    async with workers(2):
        await suffer(Faults.delays(seconds=DELAY))
        with pytest.raises(DeadlineExceeded):
            await run(0.02)
        for patient in (None, math.inf):
            assert (await run(patient)).tolist() == [2.0, 2.0]


async def test_fi_call_delayed_by_default(workers):
    async with workers(2, timeout=SHORT) as cluster:
        await suffer(Faults.delays(seconds=1.5 * SHORT))
        impatient = ag.rpc_async("worker1", ag.add, args=(1, 2))
        patient = ag.rpc_async("worker1", ag.add, args=(1, 2), timeout=math.inf)
        with pytest.raises(DeadlineExceeded):
            await impatient
        assert (await patient).item() == 3
        cluster.driver.agent.fault_injector = None


async def test_fi_call_delayed_registered(workers):
    async with workers(2):
        await suffer(Faults.delays(seconds=DELAY))
        with pytest.raises(DeadlineExceeded):
            await ag.rpc_async("worker1", doubled_text, args=("a",), timeout=0.02)
        assert await ag.rpc_async("worker1", doubled_text, args=("a",)) == "aa"


@pytest.mark.parametrize("to", ["worker1", "driver"])
async def test_fi_remote_delayed_registered(workers, to):
    async with workers(2) as cluster:
        await suffer(Faults.delays(["remote"], 5 * DELAY))
        rref = ag.remote(to, make_list, timeout=4 * DELAY)
        with pytest.raises(DeadlineExceeded):
            await rref.to_here(timeout=0.01)
        with pytest.raises(DeadlineExceeded):
            await rref.future()
        with pytest.raises(AiogradError):
            await rref.to_here()
        cluster.driver.agent.fault_injector = None
        assert await ag.remote(to, make_list).to_here() == [0]
