"""Methods of values, modules and optimisers of a partner, as far as their classes are exposed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import NotAllowed, ProtocolError, SerializationError
from aiograd.nn.remote import create_module
from aiograd.optim import owned
from aiograd.rpc.callee.exposure import exposed_method
from aiograd.rref.proxy import Subject, call_method
from aiograd.rref.refcount.records import pack_fork
from tests.security import partner_functions as offer

MODES = [
    ("restricted", "restricted"),
    ("trusted", "restricted"),
    ("restricted", "trusted"),
    ("trusted", "registered"),
]


@pytest.fixture(params=MODES, ids="-".join)
def modes(request):
    return request.param


@pytest.fixture
def silent(lookups, modes):
    """What was unpickled, where nothing may be."""
    yield
    if "restricted" in modes:
        assert lookups == []


# ── methods ─────────────────────────────────────────────────────────────────────────────────────


async def test_exposed_methods_can_be_called(workers, modes, silent):
    async with workers(*modes):
        account = ag.remote("worker1", offer.Account, (5,))
        assert await account.rpc_async().deposit(3, fee=1) == 7
        assert await account.rpc_async(timeout=5.0).later(1) == 8
        assert await account.rpc_async().named() == "Account"
        assert await account.rpc_async().double(4) == 8
        kept = account.remote().opened()
        assert await (await kept) == [7]
        loop = asyncio.get_running_loop()
        there = await loop.run_in_executor(None, lambda: account.rpc_sync().deposit(1))
        assert there == 8
        made = await loop.run_in_executor(None, lambda: account.remote().deposit(1))
        assert await made == 9


@pytest.mark.parametrize("name", ["hidden", "_inner", "__len__", "__enter__", "balance", "rate"])
async def test_attributes_that_are_not_exposed_methods_are_refused(workers, modes, name):
    async with workers(*modes):
        account = ag.remote("worker1", offer.Account, (5,))
        with pytest.raises(NotAllowed, match="not exposed") as caught:
            await getattr(account.rpc_async(), name)()
        assert caught.value.worker == "worker1"
        with pytest.raises(NotAllowed):
            await getattr(account.remote(), name)()
        assert await account.rpc_async().deposit(0) == 5


async def test_an_override_without_a_mark_hides_an_exposed_method(workers, modes):
    async with workers(*modes):
        savings = ag.remote("worker1", offer.open_savings)
        with pytest.raises(NotAllowed, match=r"Savings\.deposit"):
            await savings.rpc_async().deposit(1)
        assert await savings.rpc_async().double(1) == 2


def test_instance_attributes_cannot_expose_a_method():
    class Eager:
        def __getattr__(self, name):
            return ag.expose(lambda: "never")

    eager = Eager()
    eager.method = ag.expose(lambda: "never")
    assert exposed_method(eager, "method") is None
    assert exposed_method(eager, "other") is None
    assert exposed_method(offer, "add") is None
    assert exposed_method(offer.Account, "deposit") is None
    assert exposed_method(offer.Account(), ["deposit"]) is None


async def test_a_method_needs_an_object(workers):
    async with workers("restricted", "restricted"):
        for subject in ("text", [1, 2], 5, None):
            with pytest.raises(ProtocolError):
                await ag.rpc_async("worker1", call_method, (subject, "upper", (), {}))


async def test_methods_of_what_others_hold_cannot_be_called(workers, monkeypatch):
    async with workers("restricted", "restricted", "restricted") as (_, _, thief):
        account = ag.remote("worker1", offer.Account, (5,))
        assert await account.rpc_async().deposit(1) == 6
        held = account.record
        traveller = thief.agent.travellers.of(Subject)
        for claim in (held.fork, held.id):
            stolen = pack_fork(held.id, claim, 1)
            monkeypatch.setattr(traveller, "depart", lambda value, departure, data=stolen: data)
            with pytest.raises(NotAllowed):
                await thief.agent.call(
                    "worker1", call_method, (Subject(account), "deposit", (1,), {})
                )
        assert await account.rpc_async().deposit(0) == 6


async def test_a_guest_is_known_as_one_wherever_its_call_runs(workers, modes):
    functions = (offer.guest_in_thread, offer.guest_in_task, offer.guest_inline)
    async with workers(*modes) as (_, there):
        for x in (1, np.ones(3), np.ones(100_000)):  # by every road through the codec
            for function in functions:
                assert await ag.rpc_async("worker1", function, (x,)) == "worker0"
                assert await ag.remote("worker1", function, (x,)) == "worker0"
            assert [who async for who in ag.rpc_stream("worker1", offer.guest_in_stream, (x,))] == [
                "worker0"
            ]
        there.make_current()
        for function in functions:
            assert await ag.rpc_async("worker1", function, (1,)) == (
                None if there.options.mode == "trusted" else "worker1"
            )


# ── classes ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_class_that_is_not_exposed_cannot_be_made(workers, modes):
    async with workers(*modes):
        with pytest.raises(NotAllowed):
            await ag.remote("worker1", offer.Savings)
        with pytest.raises(NotAllowed, match="not exposed"):
            await ag.nn.RemoteModule("worker1", offer.SecretLayer, args=(3,))
        for cls in (dict, type, ag.nn.Linear, offer.Savings):
            with pytest.raises(NotAllowed):
                await ag.rpc_async("worker1", create_module, (cls, (), {}))


async def test_an_instance_made_elsewhere_is_no_plain_data(workers):
    async with workers("restricted", "restricted"):
        with pytest.raises(SerializationError, match=r"args\[0\]"):
            await ag.rpc_async("worker1", offer.echo, (offer.Account(),))
        with pytest.raises(SerializationError, match="worker1"):
            await ag.rpc_async("worker1", offer.Account)


# ── modules and optimisers ──────────────────────────────────────────────────────────────────────


async def test_a_module_is_trained_at_a_partner(workers, modes, silent):
    async with workers(*modes):
        module = await ag.nn.RemoteModule("worker1", offer.Layer, args=(3,))
        parameters = await module.remote_parameters()
        optimizer = await ag.optim.DistributedOptimizer(
            offer.Descent, parameters, lr=0.1, momentum=0.9, staleness=0
        )
        x = ag.tensor(np.ones((1, 3)))
        weight, speed = np.full((3, 3), 0.5), np.zeros((3, 3))
        for _ in range(3):
            async with ag.context() as ctx:
                y = await module(x, scale=2.0)
                await ctx.backward((y * y).sum())
                await optimizer.step(ctx)
            out = 2 * np.ones((1, 3)) @ weight
            speed = 0.9 * speed + np.ones((3, 1)) @ (4 * out)
            weight = weight - 0.1 * speed
            np.testing.assert_allclose((await parameters[0]).numpy(), weight)
        state = await optimizer.state_dict()
        np.testing.assert_allclose(state["worker1"]["state"][0]["momentum_buffer"], speed)
        await optimizer.load_state_dict(state)
        await optimizer.set_lr(0.5)
        assert (await optimizer.state_dict())["worker1"]["param_groups"][0]["lr"] == 0.5
        async with ag.context() as ctx:
            await ctx.backward((await module(x)).sum())
            assert await optimizer.clip_grad_norm(ctx, 1.0) == pytest.approx(3.0)
        assert await (await module.eval())(x) is not None


async def test_a_module_may_let_itself_be_run_and_no_more(workers, modes):
    async with workers(*modes):
        rref = await ag.rpc_async("worker1", offer.lend_layer, ("own",))
        module = ag.nn.RemoteModule.init_from_module_rref("worker1", rref)
        y = await module(ag.tensor(np.ones((1, 3))))
        np.testing.assert_allclose(y.numpy(), np.full((1, 3), 1.5))
        for refused in (module.remote_parameters, module.train, module.eval):
            with pytest.raises(NotAllowed, match="OwnLayer"):
                await refused()
        rref = await ag.rpc_async("worker1", offer.lend_layer, ("secret",))
        module = ag.nn.RemoteModule.init_from_module_rref("worker1", rref)
        with pytest.raises(NotAllowed, match="SecretLayer"):
            await module(ag.tensor(np.ones((1, 3))))


async def test_only_exposed_optimisers_can_be_made_and_used(workers, modes):
    async with workers(*modes):
        module = await ag.nn.RemoteModule("worker1", offer.Layer, args=(3,))
        parameters = await module.remote_parameters()
        with pytest.raises(NotAllowed):
            await ag.optim.DistributedOptimizer(ag.optim.SGD, parameters, lr=0.1)
        for cls in (offer.Account, offer.Layer):
            with pytest.raises(NotAllowed, match="no optimiser"):
                await ag.rpc_async("worker1", owned.make, (cls, parameters, (), {}))
        lent = await ag.rpc_async("worker1", offer.lend_optimizer, (parameters,))
        account = ag.remote("worker1", offer.Account)
        async with ag.context() as ctx:
            await ctx.backward((await module(ag.tensor(np.ones((1, 3))))).sum())
            for rref in (lent, account, module.module_rref):
                with pytest.raises(NotAllowed, match="no optimiser"):
                    await ag.rpc_async("worker1", owned.step, (rref, ctx.id, []))
        np.testing.assert_array_equal((await parameters[0]).numpy(), np.full((3, 3), 0.5))


async def test_an_optimiser_takes_no_gradients_of_a_context_of_others(workers):
    async with workers("restricted", "restricted", "restricted") as (a, _, c):
        c.make_current()
        theirs = await ag.nn.RemoteModule("worker1", offer.Layer, args=(3,))
        optimizer = await ag.optim.DistributedOptimizer(
            offer.Descent, await theirs.remote_parameters(), lr=0.1
        )
        (local,) = (await optimizer._made()).values()
        a.make_current()
        async with ag.context() as ctx:
            x = ag.tensor(np.ones((1, 3)), requires_grad=True)
            y = await ag.rpc_async("worker1", offer.project, (x,))
            await ctx.backward(y.sum())
            with pytest.raises(NotAllowed, match="takes no part"):
                await c.agent.call("worker1", owned.step, (local, ctx.id, []))


async def test_a_partner_cannot_hold_an_optimisers_turn_for_long(workers):
    async with workers("trusted", "restricted", "trusted", timeout=1.0) as (_, _, guest):
        guest.make_current()
        module = await ag.nn.RemoteModule("worker1", offer.Layer, args=(3,))
        parameters = await module.remote_parameters()
        optimizer = await ag.optim.DistributedOptimizer(offer.Descent, parameters, lr=0.1)
        (local,) = (await optimizer._made()).values()
        async with ag.context() as ctx:
            await ctx.backward((await module(ag.tensor(np.ones((1, 3))))).sum())
            greedy = ag.rpc_stream("worker1", owned.take_turn, (local, ctx.id))
            assert await anext(greedy) == 0
            patient = ag.rpc_stream("worker1", owned.take_turn, (local, ctx.id), timeout=20.0)
            assert await anext(patient) == 0
            with pytest.raises(TimeoutError):
                await anext(greedy)
            await patient.aclose()
