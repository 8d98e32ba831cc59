"""Methods of a value, called at its owner through the four proxies."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiograd.errors import DeadlineExceeded, OwnerLost, RRefReleased, WrongThread
from aiograd.rpc.api import rpc_async
from aiograd.rref import RRef, remote
from aiograd.rref.refcount.records import OwnerRecord
from aiograd.rref.services import ValueServices

PEERS = pytest.mark.parametrize("to", ["worker0", "worker1"])


class Account:
    """All kinds of methods."""

    made = 0

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance
        self.only_on_the_instance = lambda more: self.balance + more
        self.release_me = threading.Event()

    def deposit(self, amount: int, *, fee: int = 0) -> int:
        self.balance += amount - fee
        return self.balance

    def nothing(self) -> None:
        return None

    async def deposit_later(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.deposit(amount)

    @staticmethod
    def twice(value: int) -> int:
        return 2 * value

    @classmethod
    def count(cls) -> int:
        cls.made += 1
        return cls.made

    @staticmethod
    async def static_later(value: int) -> int:
        return value

    @classmethod
    async def class_later(cls, value: int) -> tuple[str, int]:
        return cls.__name__, value

    def statements(self) -> Iterator[int]:
        yield self.balance

    async def statements_later(self) -> AsyncIterator[int]:
        yield self.balance

    def where(self) -> str:
        return threading.current_thread().name

    async def never(self) -> None:
        await asyncio.get_running_loop().create_future()

    def wait_in_a_thread(self) -> str:
        self.release_me.wait(20)
        return "late"

    async def let_go(self) -> None:
        self.release_me.set()


def use_all_kinds(rref: RRef, name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """The three proxies, from a thread; run with asyncio.to_thread."""
    from aiograd.rpc.api import run_sync

    return [
        getattr(rref.rpc_sync(), name)(*args, **kwargs),
        run_sync(getattr(rref.rpc_async(), name)(*args, **kwargs)),
        run_sync(getattr(rref.remote(), name)(*args, **kwargs).to_here()),
    ]


@PEERS
async def test_proxy_missing(workers: Any, to: str) -> None:
    async with workers(2) as w:
        rref = remote(to, Account)
        await rref.future()
        with pytest.raises(AttributeError, match="overdraw"):
            await rref.rpc_async().overdraw(1)
        with pytest.raises(AttributeError, match="overdraw"):
            await asyncio.to_thread(rref.rpc_sync().overdraw, 1)
        with pytest.raises(AttributeError, match="overdraw"):  # at once, off the loop
            await asyncio.to_thread(rref.remote().overdraw, 1)
        if to == "worker0":
            with pytest.raises(AttributeError, match="overdraw"):  # the owner needs not ask
                rref.remote().overdraw(1)
        else:
            with pytest.raises(AttributeError, match="overdraw"):
                await rref.remote().overdraw(1)
        del rref
        await w.at_rest()


@PEERS
async def test_proxy_array(workers: Any, to: str) -> None:
    async with workers(2) as w:
        rref = remote(to, np.arange, args=(6,))
        for result in await asyncio.to_thread(use_all_kinds, rref, "reshape", 2, 3):
            assert result.shape == (2, 3)
        proxy = rref.rpc_async()
        assert await proxy.sum() == 15
        assert await proxy.max() == 5
        assert (await proxy.astype("float32")).dtype == np.float32
        del rref, proxy
        await w.at_rest()


@PEERS
async def test_proxy_class(workers: Any, to: str) -> None:
    async with workers(2) as w:
        rref = remote(to, Account, args=(10,))
        assert await asyncio.to_thread(use_all_kinds, rref, "deposit", 2, fee=1) == [11, 12, 13]
        assert await asyncio.to_thread(use_all_kinds, rref, "twice", 4) == [8, 8, 8]
        first, second, third = await asyncio.to_thread(use_all_kinds, rref, "count")
        assert (second - first, third - second) == (1, 1)
        assert await asyncio.to_thread(use_all_kinds, rref, "nothing") == [None, None, None]
        assert await rref.rpc_async().only_on_the_instance(1) == 14
        assert await (await asyncio.to_thread(rref.remote().only_on_the_instance, 2)) == 15
        del rref
        await w.at_rest()


@PEERS
async def test_async_rref_proxy(workers: Any, to: str) -> None:
    async with workers(2) as w:
        rref = remote(to, Account, args=(10,))
        assert await asyncio.to_thread(use_all_kinds, rref, "deposit_later", 1) == [11, 12, 13]
        assert await asyncio.to_thread(use_all_kinds, rref, "static_later", 4) == [4, 4, 4]
        assert await asyncio.to_thread(use_all_kinds, rref, "class_later", 4) == [
            ("Account", 4),
            ("Account", 4),
            ("Account", 4),
        ]
        del rref
        await w.at_rest()


@PEERS
async def test_generator_methods_are_refused_with_advice(workers: Any, to: str) -> None:
    async with workers(2):
        rref = remote(to, Account)
        for name in ("statements", "statements_later"):
            with pytest.raises(TypeError, match=f"{name}.* is a generator.*rpc_stream"):
                await getattr(rref.rpc_async(), name)()
            with pytest.raises(TypeError, match="is a generator"):
                await getattr(rref.remote(), name)()


async def test_plain_methods_run_off_the_loop(workers: Any) -> None:
    async with workers(2):
        rref = remote("worker1", Account)
        assert await rref.rpc_async().where() != threading.current_thread().name


async def test_to_proxy(workers: Any) -> None:
    async with workers(2) as w:
        rref = remote("worker1", Account)
        await rref.future()
        with pytest.raises(DeadlineExceeded, match="never"):
            await rref.rpc_async(timeout=0.02).never()
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(rref.rpc_sync(timeout=0.02).never)
        late = rref.remote(timeout=0.02).never()
        with pytest.raises(DeadlineExceeded):
            await late.future()
        with pytest.raises(DeadlineExceeded):
            await rref.rpc_async(timeout=0.02).wait_in_a_thread()
        await rref.rpc_async().let_go()
        del rref, late
        await w.at_rest()


async def never_made() -> None:
    await asyncio.get_running_loop().create_future()


async def test_a_proxy_call_of_a_value_that_is_not_made_yet_times_out(workers: Any) -> None:
    async with workers(2):
        rref = remote("worker1", never_made)
        with pytest.raises(DeadlineExceeded):
            await rref.rpc_async(timeout=0.02).anything()


async def test_a_proxy_call_abandoned_before_its_first_step_leaves_no_unretrieved_error(
    workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner loses the caller right after it has decoded the call."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c["message"]))
    async with workers(2) as w:
        owner = w[1]
        services = owner.value_services
        waits: list[asyncio.Future[Any]] = []

        def later(record: OwnerRecord, look: Any) -> asyncio.Future[Any]:
            # Scheduled ahead of the first step of the call's task.
            link = owner.agent.links.get(w[0].agent.incarnation)
            asyncio.get_running_loop().call_soon(link.callee.close)
            waits.append(ValueServices.later(services, record, look))
            return waits[0]

        monkeypatch.setattr(services, "later", later)
        rref = remote("worker1", never_made)
        call = rref.rpc_async().anything()
        await w.until(lambda: bool(waits) and waits[0].done())
        wait = weakref.ref(waits.pop())
        await w.until(lambda: gc.collect() >= 0 and wait() is None)
        assert not complaints
        call.cancel()


async def test_the_blocking_proxy_refuses_to_stop_a_loop(workers: Any) -> None:
    async with workers(2):
        rref = remote("worker1", Account)
        with pytest.raises(WrongThread, match="rpc_async"):
            rref.rpc_sync().count()


async def test_a_proxy_call_keeps_the_value_alive_until_it_is_answered(workers: Any) -> None:
    async with workers(2) as w:
        assert await remote("worker1", Account, args=(1,)).rpc_async().deposit_later(2) == 3
        assert await remote("worker1", Account, args=(1,)).remote().deposit_later(2) == 3
        await w.at_rest()


async def use_proxy(rref: RRef, amount: int) -> int:
    result: int = await rref.rpc_async().deposit(amount)
    return result


async def test_a_proxy_works_where_the_reference_was_sent(workers: Any) -> None:
    async with workers(3) as w:
        rref = remote("worker1", Account, args=(1,))
        assert await rpc_async("worker2", use_proxy, args=(rref, 2)) == 3
        assert await rpc_async("worker1", use_proxy, args=(rref, 2)) == 5
        own = RRef(Account(7))
        assert await rpc_async("worker2", use_proxy, args=(own, 1)) == 8
        assert own.local_value().balance == 8
        await own.release()
        call: Callable[..., Any] = own.rpc_async().deposit
        with pytest.raises(RRefReleased):
            call(1)
        del rref
        await w.at_rest()


async def test_references_are_arguments_of_proxy_calls_too(workers: Any) -> None:
    async with workers(3) as w:
        rref = remote("worker1", Account, args=(1,))
        amount = remote("worker2", int, args=("5",))
        result_store = remote("worker1", Purse)
        assert await result_store.rpc_async().take(rref, amount) == 6
        del rref, amount, result_store
        await w.at_rest()


class Purse:
    async def take(self, account: RRef, amount: RRef) -> int:
        result: int = await account.rpc_async().deposit(await amount)
        return result


class Source:
    def __init__(self) -> None:
        self.closed = threading.Event()

    async def tokens(self, n: int, *, start: int = 0) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield start + i
        finally:
            self.closed.set()

    def plain_tokens(self, n: int) -> Iterator[int]:
        yield from range(n)

    def no_generator(self) -> list[int]:
        return [1]

    def was_closed(self) -> bool:
        return self.closed.wait(5)


@PEERS
async def test_a_generator_method_is_read_item_by_item(workers: Any, to: str) -> None:
    async with workers(2):
        rref = remote(to, Source)
        assert [x async for x in rref.rpc_stream().tokens(20, start=3)] == list(range(3, 23))
        assert [x async for x in rref.rpc_stream(timeout=5).plain_tokens(3)] == [0, 1, 2]


@PEERS
async def test_leaving_the_loop_closes_the_generator_at_the_owner(workers: Any, to: str) -> None:
    async with workers(2):
        rref = remote(to, Source)
        async with rref.rpc_stream().tokens(1000) as stream:
            async for token in stream:
                if token == 2:
                    break
        assert await rref.rpc_async().was_closed()


async def test_a_method_that_is_no_generator_is_not_run_as_a_stream(workers: Any) -> None:
    async with workers(2):
        rref = remote("worker1", Source)
        with pytest.raises(TypeError, match=r"no generator: call it by rref.rpc_async\(\)"):
            await anext(rref.rpc_stream().no_generator())
        with pytest.raises(AttributeError):
            await anext(rref.rpc_stream().missing())


async def test_a_stream_keeps_its_value_and_says_when_the_owner_is_lost(workers: Any) -> None:
    async with workers(2) as (_, b):
        stream = remote("worker1", Source).rpc_stream().tokens(1000)
        gc.collect()
        assert await anext(stream) == 0
        await b.agent.close()
        with pytest.raises(OwnerLost):
            async for _ in stream:
                pass


# ── rref.call ───────────────────────────────────────────────────────────────────────────────────


class Savings(Account):
    """Has a method of its own under the name of its base's."""

    def deposit(self, amount: int, *, fee: int = 0) -> int:
        return -amount


@PEERS
async def test_call_runs_a_method_of_the_class_at_the_owner(workers: Any, to: str) -> None:
    async with workers(2):
        account = remote(to, Account, (1,))
        assert await account.call(Account.deposit, 2, fee=1) == 2
        assert await account.call(Account.deposit_later, amount=3) == 5
        assert await account.call(Account.twice, 4) == 8  # type: ignore[arg-type]
        # By its name: what an object of a subclass does is up to the subclass.
        assert await remote(to, Savings, (1,)).call(Account.deposit, 2) == -2
        assert await RRef([1]).call(list.append, 2) is None


async def test_call_refuses_what_is_no_method(workers: Any) -> None:
    def function(account: Account) -> int:
        return account.balance

    async with workers(2):
        account = remote("worker1", Account)
        for wrong in (function, lambda account: 1, len, Account, "deposit"):
            with pytest.raises(TypeError, match="a method of the value's class"):
                account.call(wrong)  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match="upper"):
            await account.call(str.upper)  # type: ignore[arg-type]


async def test_a_failed_call_that_nobody_awaits_names_the_line_of_the_user(
    workers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers(2):
        account = remote("worker1", Account)
        call = account.call(Account.deposit, "text")  # type: ignore[arg-type]
        await asyncio.wait([call])
        del call
        await account.release()
    assert any("test_proxy.py" in record.getMessage() for record in caplog.records)
