"""Functions of one script share their globals on a worker, whoever sent them."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest

import aiograd as ag


def script(text: str, file: str | None = "/work/train.py") -> dict:
    """Run a script as `__main__` of another process would be run: importable nowhere."""
    known = {"__name__": "__main__"}
    if file is not None:
        known["__file__"] = file
    exec(textwrap.dedent(text), known)
    return known


SERVER = """
    server = None
    lock = []

    class Server:
        def __init__(self):
            self.value = 0
        def add(self, x):
            self.value += x
            return self.value

    def get_server():
        global server
        if server is None:
            server = Server()
        return server

    def add(x):
        return get_server().add(x)

    def is_server():
        return isinstance(server, Server)

    async def add_from_here(to, x):
        import aiograd as ag
        return await ag.rpc_async(to, add, args=(x,))
"""


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(2, processes=False) as cluster:
        yield cluster


async def test_what_one_function_sets_with_global_the_others_see(cluster):
    main = script(SERVER)
    server = ag.remote("worker0", main["get_server"])
    assert await server.rpc_async().add(1) == 1
    assert await ag.rpc_async("worker0", main["add"], args=(1,)) == 2
    assert await ag.rpc_async("worker0", main["is_server"])
    # Another worker has its own.
    assert await ag.rpc_async("worker1", main["add"], args=(1,)) == 1
    assert main["server"] is None


async def test_the_globals_are_shared_whoever_sent_the_function(cluster):
    main = script(SERVER)
    assert await ag.rpc_async("worker0", main["add"], args=(1,)) == 1
    assert await ag.rpc_async("worker1", main["add"], args=(5,)) == 5  # state of worker1
    there = main["add_from_here"]
    assert await ag.rpc_async("worker1", there, args=("worker0", 1)) == 2
    assert await ag.rpc_async("worker1", there, args=("worker0", 1)) == 3


async def test_two_processes_that_run_one_script_share_on_a_worker(cluster):
    first, second = script(SERVER), script(SERVER)
    assert await ag.rpc_async("worker0", first["add"], args=(1,)) == 1
    other = next(w for w in cluster.workers if w.name == "worker1")
    assert other
    assert await ag.rpc_async("worker1", send, args=(second["add"], "worker0", 1)) == 2
    assert await ag.rpc_async("worker0", first["is_server"])


async def send(func, to, x):
    return await ag.rpc_async(to, func, args=(x,))


async def test_scripts_of_other_files_and_notebooks_have_their_own(cluster):
    one, other = script(SERVER, "/work/a.py"), script(SERVER, "/work/b.py")
    notebook, another = script(SERVER, None), script(SERVER, None)
    for main in (one, other, notebook, another):
        assert await ag.rpc_async("worker0", main["add"], args=(1,)) == 1


async def test_a_name_that_the_sender_defines_again_is_sent_anew(cluster):
    main = script("""
        rate = 1
        seen = 0
        def scale(x):
            global seen
            seen += 1
            return helper(x) * rate, seen
        def helper(x):
            return x
    """)
    assert await ag.rpc_async("worker0", main["scale"], args=(2,)) == (2, 1)
    main["rate"] = 10
    assert await ag.rpc_async("worker0", main["scale"], args=(2,)) == (20, 2)
    exec("def helper(x): return -x", main)
    assert await ag.rpc_async("worker0", main["scale"], args=(2,)) == (-20, 3)
    main["seen"] = 100
    assert await ag.rpc_async("worker0", main["scale"], args=(2,)) == (-20, 101)


async def test_objects_that_the_sender_changes_in_place_are_sent_anew(cluster):
    main = script("""
        options = {"rate": 1}
        def rate():
            return options["rate"]
    """)
    assert await ag.rpc_async("worker0", main["rate"]) == 1
    main["options"]["rate"] = 2
    assert await ag.rpc_async("worker0", main["rate"]) == 2


async def test_objects_that_functions_change_in_place_keep_the_change(cluster):
    main = script("""
        cache = {}
        def put(key, value):
            cache[key] = value
        def size():
            return len(cache)
    """)
    await ag.rpc_async("worker0", main["put"], args=("a", 1))
    await ag.rpc_async("worker0", main["put"], args=("b", 1))
    assert await ag.rpc_async("worker0", main["size"]) == 2
    assert main["cache"] == {}


async def test_functions_that_refer_to_each_other_arrive(cluster):
    main = script("""
        def even(n):
            return n == 0 or odd(n - 1)
        def odd(n):
            return n != 0 and even(n - 1)
    """)
    assert await ag.rpc_async("worker0", main["even"], args=(10,))
    assert not await ag.rpc_async("worker0", main["odd"], args=(10,))


async def test_large_arrays_and_tensors_as_globals_arrive_and_may_be_replaced(cluster):
    main = script("""
        def total():
            return float(table.sum()) + float(weights.sum())
        def forget():
            global table
            table = weights
    """)
    main["table"], main["weights"] = np.ones(100_000), ag.ones(2, requires_grad=True)
    assert await ag.rpc_async("worker0", main["total"]) == 100_002
    main["table"][:] = 2.0
    assert await ag.rpc_async("worker0", main["total"]) == 200_002
    main["table"] = np.zeros(100_000)
    assert await ag.rpc_async("worker0", main["total"]) == 2


async def test_a_function_as_an_argument_and_a_closure_see_the_same_globals(cluster):
    main = script("""
        count = 0
        def bump():
            global count
            count += 1
            return count
        def twice(f):
            f()
            return f()
        def make(step):
            def inner():
                return bump() + step
            return inner
    """)
    assert await ag.rpc_async("worker0", main["twice"], args=(main["bump"],)) == 2
    assert await ag.rpc_async("worker0", main["bump"]) == 3
    assert await ag.rpc_async("worker0", main["make"](100)) == 104
    assert main["count"] == 0
