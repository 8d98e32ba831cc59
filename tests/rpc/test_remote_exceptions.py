"""Exceptions across the wire."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GradError, RemoteError, RpcError, WorkerLost
from aiograd.rpc.api import rpc_async
from aiograd.rpc.options import Options


def raise_it(error):
    raise error


async def raise_later(error):
    raise error


class Plain(Exception):
    pass


class Facts(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.a, self.b = a, b
        self.extra = "more"


class NeedsTwo(Exception):
    """Pickles, but cannot be rebuilt: its constructor wants what `args` does not have."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


class RefusesPickle(Exception):
    def __reduce__(self):
        raise RuntimeError("never")


class BadText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class BadRebuild(Exception):
    def __reduce__(self):
        return str, ("not an exception",)


class ExitsWhenRebuilt(Exception):
    def __reduce__(self):
        return _exit_now, ()


def _exit_now():
    raise ValueError("not rebuilt")


def boom(text):
    raise ValueError(text)


@pytest.mark.parametrize(("who", "lines"), [("caller", 0), ("both", 1)])
async def test_an_exception_arrives_as_its_own_type_and_is_shown_by_whom_the_options_say(
    agents, caplog, who, lines
):
    async with agents(2, options=Options(remote_tracebacks=who)):
        with pytest.raises(TypeError, match="positional argument"):
            await rpc_async("worker1", boom, (1, 2))
        with caplog.at_level(logging.INFO, "aiograd"), pytest.raises(ValueError, match="no way"):
            await rpc_async("worker1", boom, ("no way",))
        shown = [r.getMessage() for r in caplog.records if "no way" in r.getMessage()]
        assert len(shown) == lines
        assert all(text.startswith("worker1: boom() called by worker0 failed") for text in shown)


async def test_a_message_of_several_lines_arrives_unchanged(agents):
    async with agents(2):
        with pytest.raises(ValueError, match="first") as caught:
            await rpc_async("worker1", boom, ("first\nsecond",))
        assert str(caught.value) == "first\nsecond"


async def test_the_note_names_function_worker_and_traceback(agents):
    async with agents(2):
        with pytest.raises(ValueError, match="x") as caught:
            await rpc_async("worker1", boom, ("x",))
        (note,) = caught.value.__notes__
        assert note.startswith("raised by boom() on worker1:\n")
        assert "test_remote_exceptions.py" in note
        assert "raise ValueError(text)" in note


async def test_each_traceback_is_in_the_notes_once_however_many_hops_it_took(agents):
    async def hop(left):
        if left:
            return await rpc_async(f"worker{left % 2}", hop, (left - 1,))
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("deep") from error

    async with agents(2):
        with pytest.raises(ValueError, match="deep") as caught:
            await rpc_async("worker1", hop, (4,))
        assert len(caught.value.__notes__) == 5
        text = "".join(traceback.format_exception(caught.value))
        assert text.count('raise ValueError("deep") from error') == 1
        assert text.count("return await rpc_async") == 4


async def test_facts_cause_context_and_notes_survive(agents):
    async with agents(2):

        def chained():
            try:
                try:
                    raise KeyError("first")
                except KeyError as error:
                    raise Facts(1, "b") from error
            except Facts as error:
                error.add_note("mine")
                raise

        with pytest.raises(Facts) as caught:
            await rpc_async("worker1", chained)
        error = caught.value
        assert type(error) is Facts
        assert (error.a, error.b, error.extra, error.args) == (1, "b", "more", (1, "b"))
        assert isinstance(error.__cause__, KeyError)
        assert error.__suppress_context__
        assert error.__notes__[0] == "mine"
        assert len(error.__notes__) == 2


async def test_groups_arrive_with_their_members(agents):
    async with agents(2):
        inner = ExceptionGroup("inner", [KeyError("k"), Facts(1, 2)])
        with pytest.raises(ExceptionGroup) as caught:
            await rpc_async("worker1", raise_it, (ExceptionGroup("outer", [Plain("p"), inner]),))
        group = caught.value
        assert group.message == "outer"
        assert [type(e) for e in group.exceptions] == [Plain, ExceptionGroup]
        assert group.exceptions[1].exceptions[1].b == 2


async def test_a_task_group_failure_is_an_exception_group(agents):
    async with agents(2):

        async def work():
            async with asyncio.TaskGroup() as group:
                group.create_task(raise_later(Plain("inside")))

        with pytest.raises(ExceptionGroup) as caught:
            await rpc_async("worker1", work)
        assert isinstance(caught.value.exceptions[0], Plain)


@pytest.mark.parametrize("func", [raise_it, raise_later])
@pytest.mark.parametrize(
    "make",
    [
        lambda: NeedsTwo(1, 2),
        BadText,
        BadRebuild,
        ExitsWhenRebuilt,
        lambda: SystemExit(3),
        KeyboardInterrupt,
        StopAsyncIteration,
        asyncio.CancelledError,
        GeneratorExit,
    ],
)
async def test_an_exception_that_cannot_be_rebuilt_arrives_as_remote_error(agents, func, make):
    async with agents(2):
        cls = type(make())
        maker = (lambda: raise_it(make())) if func is raise_it else raised_later(make)
        expected = cls if cls is BadText else RemoteError
        with pytest.raises(expected) as caught:
            await rpc_async("worker1", maker)
        if expected is RemoteError:
            assert cls.__name__ in caught.value.type_name
            assert caught.value.worker == "worker1"
            assert caught.value.traceback_text or caught.value.__notes__
        assert await rpc_async("worker1", len, ("abc",)) == 3


def raised_later(make):
    async def work():
        raise make()

    return work


async def test_stop_iteration_of_a_plain_function_is_remote(agents):
    async with agents(2):
        with pytest.raises(RemoteError) as caught:
            await rpc_async("worker1", next, (iter(()),))
        assert caught.value.type_name == "StopIteration"


async def test_an_error_that_cannot_be_pickled_is_remote(agents):
    async with agents(2):
        with pytest.raises(RemoteError) as caught:
            await rpc_async("worker1", lambda: raise_it(RefusesPickle("why")))
        assert caught.value.type_name.endswith("RefusesPickle")
        assert caught.value.message == "why"
        assert "Traceback" in caught.value.traceback_text


async def test_a_local_class_of_exception_travels_by_value(agents):
    async with agents(2):

        class Local(Exception):
            pass

        def fail():
            raise Local("here")

        with pytest.raises(Local):
            await rpc_async("worker1", fail)


async def test_our_own_errors_keep_their_facts(agents):
    async with agents(2):
        with pytest.raises(GradError) as caught:
            await rpc_async("worker1", raise_it, (GradError("no", "freed"),))
        assert caught.value.reason == "freed"
        with pytest.raises(WorkerLost) as lost:
            await rpc_async("worker1", raise_it, (WorkerLost("x", "no"),))
        assert lost.value.executed == "no"
        assert isinstance(lost.value, RpcError)


async def test_an_error_through_two_hops_names_both(agents):
    async with agents(3):

        async def hop():
            return await rpc_async("worker2", boom, ("deep",))

        with pytest.raises(ValueError, match="deep") as caught:
            await rpc_async("worker1", hop)
        notes = "\n".join(caught.value.__notes__)
        assert "boom() on worker2" in notes
        assert "hop() on worker1" in notes


async def test_a_function_missing_at_the_callee_is_explained(agents, monkeypatch):
    async with agents(2) as (a, _):
        shipment = a.shipper.of(boom, a.info)
        assert shipment.data is not None
        shipment.data = shipment.data.replace(b"boom", b"gone")
        with pytest.raises(AttributeError) as caught:
            await rpc_async("worker1", boom, ("x",))
        assert "by reference" in "\n".join(caught.value.__notes__)


async def test_huge_tracebacks_are_cut(agents):
    async with agents(2):
        with pytest.raises(ValueError, match="xxx") as caught:
            await rpc_async("worker1", boom, ("x" * 300_000,))
        assert len(caught.value.__notes__[-1]) < 70_000


async def test_an_exception_before_the_first_await_arrives(agents):
    async with agents(2):
        with pytest.raises(Plain):
            await rpc_async("worker1", raise_later, (Plain("before any await"),))


def test_remote_errors_pickle():
    error = pickle.loads(pickle.dumps(RemoteError("T", "m", "tb", "w")))
    assert (error.type_name, error.message, error.traceback_text, error.worker) == (
        "T",
        "m",
        "tb",
        "w",
    )


class Measured(Exception):
    """Made of what was measured."""


def fail_with(what):
    error = Measured("too hot", what)
    error.more = [what]
    raise error


@pytest.mark.parametrize("make", [lambda: ag.tensor([1.0, 2.0], True), lambda: np.ones(50_000)])
async def test_an_exception_takes_copies_of_its_tensors_and_large_arrays_along(cluster, make):
    async with cluster(1), ag.context() as context:
        with pytest.raises(Measured, match="too hot") as caught:
            await ag.rpc_async("worker0", fail_with, (make(),))
        found = caught.value.args[1]
        assert found is caught.value.more[0]
        assert type(found) is type(make())
        np.testing.assert_array_equal(np.asarray(found), np.asarray(make()))
        assert getattr(found, "grad_fn", None) is None
        assert not context.recv_nodes


async def test_an_exception_with_a_reference_or_very_large_arrays_arrives_as_text(cluster):
    async with cluster(1):
        for what in (ag.RRef(1), np.ones(1_000_000)):
            with pytest.raises(RemoteError, match="too hot") as caught:
                await ag.rpc_async("worker0", fail_with, (what,))
            assert caught.value.type_name.endswith("Measured")
