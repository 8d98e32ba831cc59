"""How functions travel, and that they are sent anew when they changed."""

from __future__ import annotations

import gc
import math
import sys
import types
import weakref

import numpy as np
import pytest

from aiograd.errors import NotAllowed
from aiograd.rpc.api import expose, idempotent, inline, rpc_async
from aiograd.rpc.callee.functions import TABLE, Shipper, function_name
from aiograd.rpc.options import Options
from aiograd.wire.codec import Codec, Travellers
from aiograd.wire.messages import DEFINE, OP


@pytest.fixture
def shipper():
    return Shipper(Codec(Travellers()))


def module_of(source, name="__main__"):
    """A stand-in for a notebook: what it defines cannot be imported elsewhere."""
    module = types.ModuleType(name)
    module.run = lambda code: exec(code, module.__dict__)  # what a cell does
    exec(source, module.__dict__)
    return module


def helper(x):
    return x + 1


def test_importable_functions_go_by_reference_and_are_known(shipper):
    first = shipper.of(helper, None)
    assert shipper.of(helper, None) is first
    assert len(first.data) < 80
    assert shipper.of(math.sqrt, None).data
    assert shipper.of(np.linalg.norm, None) is shipper.of(np.linalg.norm, None)


def test_ops_go_by_name(shipper):
    def add(x, y):
        return x + y

    add.op_name = "add"
    shipment = shipper.of(add, None)
    assert (shipment.data, shipment.flags, shipment.kind) == (b"add", OP, "op")


def test_functions_of_main_go_by_value(shipper):
    cell = module_of("def f(x):\n    return x * 2")
    shipment = shipper.of(cell.f, None)
    assert b"co_" in shipment.data or len(shipment.data) > 200
    assert shipper.of(cell.f, None) is shipment


def test_the_same_content_is_the_same_shipment(shipper):
    makers = [lambda x: x + 1 for _ in range(3)]
    assert len({id(shipper.of(f, None)) for f in makers}) == 1


@pytest.mark.parametrize(
    "change",
    [
        "def f(x):\n    return x * 3",
        "def g(x):\n    return 100",
        "N = 7",
        "import math as m",
        "f.__defaults__ = (5,)",
        "f.__code__ = (lambda x: x).__code__",
        "f.mark = 1",
        "f.limit = 4",
        "g.limit = 4",
        "g.__defaults__ = (1,)",
    ],
)
def test_a_change_anywhere_is_noticed(shipper, change):
    source = "import cmath as m\nN = 2\ndef g(x):\n    return x\n"
    source += "def f(x):\n    return g(x) * N + m.pi\nf.limit = g.limit = 3"
    cell = module_of(source)
    before = shipper.of(cell.f, None)
    assert shipper.of(cell.f, None) is before
    cell.run(change)
    assert shipper.of(cell.f, None).data != before.data


def test_changed_closures_and_mutated_globals_are_noticed(shipper):
    count = 1

    def f():
        return count

    before = shipper.of(f, None).data
    count = 2
    assert shipper.of(f, None).data != before

    cell = module_of("SETTINGS = {'a': 1}\ndef f():\n    return SETTINGS['a']")
    before = shipper.of(cell.f, None).data
    assert shipper.of(cell.f, None).data == before
    cell.SETTINGS["a"] = 2
    assert shipper.of(cell.f, None).data != before


def test_a_recursive_function_is_fine(shipper):
    cell = module_of("def f(n):\n    return n and f(n - 1)")
    assert shipper.of(cell.f, None) is shipper.of(cell.f, None)


def test_functions_are_not_kept_alive(shipper):
    def f():
        return 1

    gone = weakref.ref(f)
    shipper.of(f, None)
    del f
    gc.collect()
    assert gone() is None
    assert not shipper._known


def test_what_holds_large_arrays_goes_inside_the_call(shipper):
    big = np.zeros(100_000)
    assert shipper.of(lambda: big.sum(), None).data is None
    assert shipper.of([].append, None).data is None


def test_only_callables_are_called(shipper):
    for wrong in (None, 5, "f"):
        with pytest.raises(TypeError, match="called"):
            shipper.of(wrong, None)


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (helper, "helper"),
        (min, "min"),
        (dict, "dict"),
        ([].append, "list.append"),
        (type("C", (), {"__call__": lambda self: 1})(), "C"),
    ],
)
def test_functions_have_names(func, name):
    assert function_name(func) == name


# ── between agents ──────────────────────────────────────────────────────────────────────────────


class Definitions:
    """Counts what is sent."""

    def __init__(self, link):
        self.count = 0
        put = link.outbox.put

        def counting(frame, *rest):
            self.count += frame.kind == DEFINE
            put(frame, *rest)

        link.outbox.put = counting


async def test_a_function_is_sent_once_per_peer_and_content(agents):
    async with agents(2) as (a, _):
        cell = module_of("def g(x):\n    return x + 1\ndef f(x):\n    return g(x)")
        sent = Definitions(a.link("worker1"))
        for _ in range(5):
            assert await rpc_async("worker1", cell.f, (1,)) == 2
        assert sent.count == 1
        cell.run("def g(x):\n    return x + 10")
        assert await rpc_async("worker1", cell.f, (1,)) == 11
        assert sent.count == 2
        cell.run("def f(x):\n    return 0")
        assert await rpc_async("worker1", cell.f, (1,)) == 0


async def test_closures_over_arrays_are_up_to_date(agents):
    async with agents(2):
        for size in (3, 100_000):
            array = np.zeros(size)
            func = lambda: float(array.sum())  # noqa: B023, E731
            assert await rpc_async("worker1", func) == 0
            array[0] = 5
            assert await rpc_async("worker1", func) == 5


async def test_both_tables_stay_bounded(agents, monkeypatch):
    monkeypatch.setattr("aiograd.rpc.link.link.TABLE", 10)
    monkeypatch.setattr("aiograd.rpc.link.receive.TABLE", 10)
    async with agents(2) as (a, b):
        for i in range(40):
            code = f"@mark\ndef f(x):\n    return x + {i}"
            cell = types.ModuleType("__main__")
            cell.mark = inline
            exec(code, cell.__dict__)
            assert await rpc_async("worker1", cell.f, (1,)) == i + 1
        assert len(a.link("worker1").numbers) <= 10
        assert len(b.link("worker0").receiver._targets) <= 12
        assert TABLE > 10


async def test_the_inline_mark_travels_with_a_function(agents):
    async with agents(2) as (_, b):
        import threading

        cell = module_of("import threading\ndef f():\n    return threading.get_ident()")
        assert await rpc_async("worker1", cell.f) != threading.get_ident()
        assert await rpc_async("worker1", inline(cell.f)) == b.thread


async def test_registered_ops_run_by_name_on_the_loop(agents):
    def add(x, y):
        return x + y

    add.op_name = "add"
    async with agents(2, ops={"add": lambda x, y: ("op", x + y)}):
        assert await rpc_async("worker1", add, (1, 2)) == ("op", 3)
        add.op_name = "unknown"


async def test_an_unknown_op_is_not_allowed(agents):
    def nothing():
        pass

    nothing.op_name = "nothing"
    async with agents(2):
        with pytest.raises(NotAllowed):
            await rpc_async("worker1", nothing)


@expose
def exposed(x):
    return x * 2


async def test_registered_peers_may_only_call_what_is_exposed(agents):
    async with agents(2, options=Options(mode="registered")):
        assert await rpc_async("worker1", exposed, (4,)) == 8
        for func in (helper, lambda x: x, [].append):
            with pytest.raises(NotAllowed):
                await rpc_async("worker1", func, (1,))


@pytest.mark.parametrize("mode", ["trusted", "registered", "restricted"])
async def test_what_a_script_exposes_may_be_called_in_every_mode(agents, mode, monkeypatch):
    source = "import aiograd as ag\n@ag.expose\ndef visit(x): return x + step\nstep = 1"
    script = module_of(source)
    async with agents(2, options=Options(mode=mode)):
        with monkeypatch.context() as patch:  # both sides run the same script
            patch.setitem(sys.modules, "__main__", script)
            assert await rpc_async("worker1", script.visit, (4,)) == 5
            script.run("step = 2")
            assert await rpc_async("worker1", script.visit, (4,)) == 6
        other = module_of(source.replace("visit", "stay")).stay  # only one of them runs that
        if mode == "trusted":
            assert await rpc_async("worker1", other, (4,)) == 5
        else:
            with pytest.raises(NotAllowed, match="__main__:stay is not exposed here"):
                await rpc_async("worker1", other, (4,))


@pytest.mark.parametrize("mark", [expose, inline, idempotent])
def test_what_cannot_be_marked_says_so(mark):
    assert mark(fresh := lambda: 1) is fresh
    for wrong in ("a name", 3, len):
        with pytest.raises(TypeError, match="cannot be marked"):
            mark(wrong)
