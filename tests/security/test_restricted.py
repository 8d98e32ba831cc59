"""Between partners everything works as plain data, and nothing is unpickled."""

from __future__ import annotations

import asyncio
import itertools
import logging

import numpy as np
import pytest

import aiograd as ag
from aiograd.dist.backward.credit import Credit
from aiograd.errors import (
    BackwardFailed,
    NotAllowed,
    Overloaded,
    ProtocolError,
    RemoteError,
    RRefExpired,
    SerializationError,
    WorkerLost,
)
from aiograd.rpc.callee.exposure import find_exposed, is_exposed
from aiograd.rref.refcount.records import pack_creation, pack_fork
from aiograd.rref.registry import RRefs
from aiograd.wire.framing import Frame
from aiograd.wire.messages import CALL, FAST
from tests.security import partner_functions as offer
from tests.support.waiting import until, until_not

MODES = [("restricted", "restricted"), ("trusted", "restricted"), ("restricted", "trusted")]


@pytest.fixture(params=MODES, ids="-".join)
def modes(request):
    return request.param


# ── what works ──────────────────────────────────────────────────────────────────────────────────


async def test_calls_streams_and_references_work_without_a_single_lookup(workers, modes, lookups):
    async with workers(*modes):
        large = np.arange(50_000.0).reshape(100, 500)
        got = await ag.rpc_async("worker1", offer.add, (large,), {"y": 2})
        np.testing.assert_array_equal(got, large + 2)
        data = [None, True, 1 << 80, 2.5, 1j, "text", b"bytes", [1, (2, "x")], {"k": [3]}]
        assert await ag.rpc_async("worker1", offer.echo, tuple(data), {"k": 1}) == [data, {"k": 1}]
        assert [i async for i in ag.rpc_stream("worker1", offer.count, (20,))] == list(range(20))
        rref = ag.remote("worker1", offer.make, ([1, 2],))
        assert await rref == [1, 2]
        assert await ag.rpc_async("worker1", offer.read, (rref,)) == [1, 2]
        lent = await ag.rpc_async("worker1", offer.lend, ("value",))
        assert await lent == "value"
        assert await ag.rpc_async("worker1", offer.read, (lent,)) == "value"
        mine = ag.RRef({"a": 1})
        assert await ag.rpc_async("worker1", offer.make, (mine,)) is not None
        await lent.release()
        await rref.release()
    assert lookups == []


async def test_gradients_cross_without_a_single_lookup(workers, modes, lookups):
    async with workers(*modes):
        x = ag.tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            await ctx.backward((y * y).sum())
            expected = 2 * (x.numpy() @ offer.WEIGHT.numpy())
            np.testing.assert_allclose(ctx.gradients[x].numpy(), expected @ offer.WEIGHT.numpy().T)
            there = await ag.rpc_async("worker1", offer.gradient_of_weight, (ctx.id,))
            np.testing.assert_allclose(there, x.numpy().T @ expected)
            (again,) = await ag.grad(
                (await ag.rpc_async("worker1", offer.project, (x,))).sum(), [x], create_graph=True
            )
            assert again.shape == x.shape
    assert lookups == []


async def test_sparse_gradients_cross_as_plain_data(workers, modes, lookups):
    async with workers(*modes):
        weight = ag.tensor(np.ones((5, 2)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.pick, (weight, [1, 3, 1]))
            await ctx.backward(y.sum())
            gradient = ctx.gradients[weight]
            assert gradient.is_sparse
            expected = np.array([0, 2, 0, 1, 0])[:, None] * np.ones((5, 2))
            np.testing.assert_array_equal(np.asarray(gradient.data), expected)
    assert lookups == []


async def test_a_chain_of_three_partners_trains(workers, lookups):
    async with workers("restricted", "restricted", "restricted"):
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            z = await ag.rpc_async("worker2", offer.add, (y, y))
            await ctx.backward(z.sum())
            np.testing.assert_allclose(ctx.gradients[x].numpy(), np.full((1, 3), 2.0))
        await asyncio.gather(*[ag.barrier(["worker0"])])
    assert lookups == []


async def test_a_context_left_is_gone_on_the_partners(workers):
    async with workers("restricted", "restricted") as found:
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context():
            await ag.rpc_async("worker1", offer.project, (x,))
            assert found[1].debug_info()["contexts"] == 1
        await until_not(lambda: found[1].debug_info()["contexts"])


async def test_everybody_knows_everybody_whatever_their_modes(workers):
    modes = (
        "trusted",
        "restricted",
        "trusted",
        "registered",
        {"*": "trusted", "worker1": "restricted"},
    )
    async with workers(*modes) as found:
        for worker in found:
            assert list(worker.agent.directory) == [each.agent.info for each in found]


# ── errors ──────────────────────────────────────────────────────────────────────────────────────


async def test_known_errors_arrive_as_themselves_and_others_as_text(workers, modes, lookups):
    async with workers(*modes):
        with pytest.raises(ValueError, match="a value") as caught:
            await ag.rpc_async("worker1", offer.fail, ("value",))
        assert caught.value.args == ("a value", 3)
        assert "partner_functions" not in "".join(caught.value.__notes__)
        with pytest.raises(Overloaded) as ours:
            await ag.rpc_async("worker1", offer.fail, ("ours",))
        assert ours.value.worker == "worker1"
        with pytest.raises(RemoteError) as own:
            await ag.rpc_async("worker1", offer.fail, ("own",))
        assert own.value.type_name.endswith("Secretive")
        assert own.value.message == "reason"
        assert own.value.traceback_text == ""
        for kind in ("object", "half"):
            with pytest.raises(RemoteError):
                await ag.rpc_async("worker1", offer.fail, (kind,))
    assert lookups == []


async def test_values_that_are_not_plain_data_cannot_be_sent_to_partners(workers, modes):
    async with workers(*modes):
        for value in (object(), {1, 2}, {1: 2}, print, np.array([object()]), 1 << 9000):
            with pytest.raises(SerializationError, match=r"args\[0\]"):
                await ag.rpc_async("worker1", offer.echo, (value,))
        assert await ag.rpc_async("worker1", offer.add, (1,)) == 2


async def test_a_failed_pass_is_told_in_plain_data(workers, lookups):
    async with workers("restricted", "restricted"):
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = (await ag.rpc_async("worker1", offer.project, (x,))).sum()
            await ctx.backward(y)
            with pytest.raises(BackwardFailed) as caught:
                await ctx.backward(y * 1)
            assert caught.value.worker
    assert lookups == []


async def test_credit_too_long_to_travel_fails_the_pass(workers, monkeypatch):
    share: Credit = (1 << 9000, 9000)  # all of it, as if it had been split a thousand times
    monkeypatch.setattr("aiograd.dist.backward.state.ALL", share)
    async with workers("restricted", "restricted"):
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            with pytest.raises(BackwardFailed, match="an int of more than 1024 bytes"):
                await ctx.backward(y.sum())


# ── functions ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["registered", "restricted"])
async def test_only_exposed_functions_can_be_called(workers, mode, lookups):
    async with workers(mode, mode):
        lookups.clear()
        for func in (offer.hidden, lambda: 1, print, "".join, offer._private, ag.add):
            with pytest.raises(NotAllowed):
                await ag.rpc_async("worker1", func)
        # In the mode "registered" the answer is unpickled here; nothing is at the callee.
        assert [
            each for each in lookups if "remote_excepti" not in each and "errors" not in each
        ] == []
        with pytest.raises(NotAllowed):
            await ag.remote("worker1", offer.hidden)
        with pytest.raises(NotAllowed):
            async for _ in ag.rpc_stream("worker1", offer.hidden):
                pass
        assert await ag.rpc_async("worker1", offer.Shelf.static, (4,)) == 8


MODULE = offer.__name__


@pytest.mark.parametrize(
    "name",
    [
        f"{MODULE}:hidden",
        f"{MODULE}:_private",
        f"{MODULE}:Shelf._private",
        f"{MODULE}:Shelf.__init__",
        f"{MODULE}:add.__globals__",
        f"{MODULE}:add.__call__",
        f"{MODULE}:ag.expose",
        f"{MODULE}:ag.sys.exit",
        f"{MODULE}:np.load",
        f"{MODULE}",
        f"{MODULE}:",
        f"{MODULE}:Shelf",
        "os:system",
        "builtins:eval",
        "not.imported:add",
        ":add",
        "",
        "sys:modules",
        "\0:\0",
    ],
)
def test_no_name_reaches_what_is_not_exposed(name):
    assert find_exposed(name) is None


def test_exposed_functions_are_found_by_their_own_name_only():
    assert find_exposed(f"{MODULE}:add") is offer.add
    assert find_exposed(f"{MODULE}:Shelf.static") is offer.Shelf.static
    assert find_exposed(f"{__name__}:offer.add") is None


def test_getattr_cannot_expose_a_function():
    class Eager:
        def __getattr__(self, name):
            return True

    class Marked:
        __aiograd_exposed__ = True

    assert not is_exposed(Eager())
    assert not is_exposed(Marked())


async def test_an_exposed_op_can_be_called_and_others_cannot(workers, monkeypatch):
    async with workers("restricted", "restricted"):
        with pytest.raises(NotAllowed):
            await ag.rpc_async("worker1", ag.multiply, (2.0, 3.0))
        monkeypatch.setitem(vars(ag.multiply), "__aiograd_exposed__", True)
    async with workers("restricted", "restricted"):
        assert float(await ag.rpc_async("worker1", ag.multiply, (2.0, 3.0))) == 6.0


async def test_methods_of_a_referenced_object_cannot_be_called(workers, modes):
    async with workers(*modes):
        rref = ag.remote("worker1", offer.make, ([3, 1],))
        with pytest.raises(NotAllowed):
            await rref.rpc_async().pop()
        with pytest.raises(NotAllowed):
            await rref._get_type(blocking=False)
        assert await rref == [3, 1]


# ── references of others ────────────────────────────────────────────────────────────────────────


async def test_a_reference_of_another_partner_cannot_be_used(workers):
    async with workers("restricted", "restricted", "restricted") as (a, b, c):
        rref = ag.remote("worker1", offer.make, ("private",))
        assert await rref == "private"
        held = rref.record
        stolen = pack_fork(held.id, held.fork, 1)
        for claim in (stolen, pack_fork(held.id, held.fork, 0), pack_fork(held.id, held.id, 1)):
            with pytest.raises(NotAllowed):
                await c.agent.request("worker1", "rref.fetch", claim)
            with pytest.raises(NotAllowed):
                await c.agent.request("worker1", "rref.fork", 0, 0, claim)
            with pytest.raises(NotAllowed):
                await c.agent.request("worker1", "rref.release", claim)
            with pytest.raises(NotAllowed):
                await c.agent.request("worker1", "rref.backward", claim, 5, False)
        assert await rref == "private"
        assert b.debug_info()["owner_rrefs"] == 1
        assert a.debug_info()["user_rrefs"] == 1
        await rref.release()
        with pytest.raises((NotAllowed, RRefExpired)):
            await a.agent.request("worker1", "rref.fetch", stolen)


async def test_a_forged_argument_is_refused(workers):
    async with workers("restricted", "restricted", "restricted") as (_, b, c):
        rref = ag.remote("worker1", offer.make, ("private",))
        await rref.future()
        thief = c.agent.parts[RRefs]
        ours = thief.protocol.new_id()
        owner = b.agent.info
        monkey = thief._depart
        try:
            thief._depart = lambda *_: (
                owner.name,
                owner.rank,
                owner.incarnation,
                rref.record.id,
                ours,
                1,
            )
            fake = thief._wrap(thief, thief.protocol.own(0))
            with pytest.raises(NotAllowed):
                await c.agent.call("worker1", offer.read, (fake,))
        finally:
            thief._depart = monkey
        token = pack_creation(rref.record.id, b"")
        with pytest.raises(NotAllowed):  # a creation under the id of another's value
            await c.agent.call("worker1", offer.make, ("mine",), keep=token)
        assert await rref == "private"


@pytest.mark.parametrize("fork", [b"", b"x" * 40, b"x" * 82, "text", None, [1]], ids=repr)
async def test_a_malformed_fork_is_a_protocol_error(workers, fork):
    async with workers("restricted", "restricted") as (a, _):
        for service, *rest in (("rref.fetch",), ("rref.has", "name"), ("rref.created",)):
            with pytest.raises(ProtocolError, match="malformed"):
                await a.agent.request("worker1", service, fork, *rest)
        assert await ag.rpc_async("worker1", offer.add, (1,)) == 2


async def test_references_are_not_passed_on_between_partners(workers):
    async with workers("restricted", "restricted", "restricted"):
        rref = ag.remote("worker1", offer.make, (1,))
        await rref.future()
        with pytest.raises(NotAllowed, match="only its owner"):
            ag.rpc_async("worker2", offer.make, (rref,))
        assert await rref == 1


# ── contexts of others ──────────────────────────────────────────────────────────────────────────


async def test_a_context_of_others_cannot_be_touched(workers, caplog):
    async with workers("restricted", "restricted", "restricted") as (_, b, c):
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            for service, *rest in (
                ("context.release",),
                ("gradients.abort", 1, ("ValueError", "", None, None)),
                ("gradients.waits",),
                ("context.graph",),
                (
                    "gradients",
                    1,
                    ("worker2", 0, bytes(16), False, False, True),
                    ([], None, (1, 0), 1),
                ),
            ):
                with pytest.raises(NotAllowed):
                    await c.agent.request("worker1", service, ctx.id, *rest)
            mine = ag.tensor(np.ones(1), requires_grad=True)
            rref = await c.agent.call("worker1", offer.lend, ((mine * 2).sum(),))
            claim = pack_fork(rref.record.id, rref.record.fork, 1)
            with pytest.raises(NotAllowed, match="takes no part"):
                await c.agent.request("worker1", "rref.backward", claim, ctx.id, False)
            assert b.debug_info()["contexts"] == 1
            await ctx.backward(y.sum())
            np.testing.assert_allclose(ctx.gradients[x].numpy(), np.ones((1, 3)))


STARTED = ("worker0", 0, bytes(16), True, False, True)  # a good invitation


@pytest.mark.parametrize(
    "rest",
    [
        # number, invitation, (answers, expected, credit, reached)
        ("1", None, ([], None, (0, 0), 1)),
        (1, None, ([], None, (1 << 200, 5), 1)),
        (1, None, ([], None, (0, 1 << 60), 1)),
        (1, None, ([], None, (0,), 1)),
        (1, None, ([], None, (0, 0), -1)),
        (1, None, ([], ["x"], (0, 0), 1)),
        (1, ("worker0", 0), ([], None, (0, 0), 1)),
        (1, (*STARTED[:2], b"short", *STARTED[3:]), ([], None, (0, 0), 1)),
        (1, (*STARTED[:3], 1, *STARTED[4:]), ([], None, (0, 0), 1)),
        (1, None, ([(1, ["text"])], None, (0, 0), 1)),
        (1, None, ([(1, None, 2)], None, (0, 0), 1)),
        (1, None, ([(1, [((1,), "f8", bytes(8))], None)], None, (0, 0), 1)),  # a packed array
        (1, None, (None, None, (0, 0), 1)),
        (1, None, ([], None, (0, 0))),
        (1, None, None),
    ],
)
async def test_malformed_gradients_are_refused(workers, rest):
    async with workers("restricted", "restricted") as (a, b):
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            with pytest.raises(ag.errors.ProtocolError):
                await a.agent.request("worker1", "gradients", ctx.id, *rest)
            await ctx.backward(y.sum())
            assert b.debug_info()["contexts"] == 1


async def test_ids_of_contexts_cannot_be_guessed(workers):
    async with workers("restricted"):
        ids = [ag.context().id for _ in range(50)]
        assert all(i >> 48 == 0 for i in ids)
        gaps = {b - a for a, b in itertools.pairwise(ids)}
        assert len(gaps) == 49


# ── pickles on the wire ─────────────────────────────────────────────────────────────────────────


async def test_a_pickle_in_a_fast_path_message_ends_the_connection(workers, lookups, caplog):
    caplog.set_level(logging.CRITICAL, "aiograd")
    async with workers("restricted", "restricted", "restricted") as (a, b, _):
        assert await ag.rpc_async("worker1", offer.add, (1,)) == 2
        link = a.agent.link("worker1")
        number = link.number(a.agent.shipper.named(offer.add, b.agent.info))
        link.outbox.put(Frame(CALL, FAST, 1000, 5.0, number, b"\x80\x05N."))
        await until(lambda: link.error)
        with pytest.raises(WorkerLost):
            await ag.rpc_async("worker1", offer.add, (1,))
        assert await ag.rpc_async("worker2", offer.add, (1,)) == 2
    assert lookups == []


# ── processes ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["registered", "restricted"])
async def test_a_cluster_of_processes_serves_what_is_exposed(mode):
    async with ag.LocalCluster(2, options=ag.Options(mode=mode)) as cluster:
        assert await cluster["worker1"].call(offer.add, 1) == 2
        assert await ag.Group(cluster.workers).call(offer.add, 1) == [2, 2]
        with pytest.raises(NotAllowed):
            await cluster["worker0"].call(offer.hidden)
        x = ag.tensor(np.ones((1, 3)), requires_grad=True)
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker1", offer.project, (x,))
            await ctx.backward(y.sum())
            np.testing.assert_allclose(ctx.gradients[x].numpy(), np.ones((1, 3)))
        rref = ag.remote("worker0", offer.make, ("kept",))
        assert await rref == "kept"
