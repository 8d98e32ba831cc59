"""aiograd with torch tensors: the programs of peer_torch.py, through the public API.

usage: peer_aiograd_torch.py [rpc] [tensor] [e2e] [dist]   (dist starts 8 workers, the others 1; this process is the driver)
BENCH_AIOGRAD_TRANSPORT and BENCH_LOOP as in peer_aiograd.py. `condense` holds the cost of condensing a torch graph
against torch.autograd.grad, in this process.
"""
import asyncio, statistics, sys, time
from common import *
import torch
import aiograd as ag
import aiograd.torch
from peer_aiograd import options, surroundings

torch.set_num_threads(1)
TO = "worker0"


def echo(t):
    return t


def tsum(t):
    return t.sum()


_W = None


def weight():
    global _W
    if _W is None:
        _W = torch.randn(256, 256, requires_grad=True)
    return _W


def weight_values():
    return weight().detach()


async def chain(x, rank, last):
    y = x @ weight()
    if rank < last:
        return await ag.rpc_async(f"worker{rank + 1}", chain, args=(y, rank + 1, last))
    return y


def work(x):
    return (x @ weight()).sum()


def dense_work(x):
    y = x @ weight()
    return (y * y).sum()


def threads():
    return torch.get_num_threads()


async def bench_rpc():
    a = torch.ones(3, 3)
    assert ((await ag.rpc_async(TO, torch.add, args=(a, a))) == 2).all()
    if want("rpc.builtin_add3x3.rtt"):
        emit_latency("rpc.builtin_add3x3.rtt", await time_loop_async(lambda: ag.rpc_async(TO, torch.add, args=(a, a)), warm=50))
    if want("rpc.builtin_add3x3.tput.256"):
        emit("rpc.builtin_add3x3.tput.256", await tput_window_async(lambda: ag.rpc_async(TO, torch.add, args=(a, a)), 256), "calls/s")


async def bench_tensor():
    r = torch.randn(MB)
    back = await ag.rpc_async(TO, echo, args=(r,))
    assert back is not r and torch.equal(back, r) and back.data_ptr() != r.data_ptr()
    for label, n in SIZES:
        t = torch.ones(n // 4)
        for kind, fn in (("echo", echo), ("sum", tsum)):
            if want(f"tensor.{kind}.{label}"):
                lat = await time_loop_async(lambda: ag.rpc_async(TO, fn, args=(t,)), tensor_seconds(n), warm=2, min_n=4)
                emit_tensor(kind, label, n, lat)
        del t


async def bench_e2e():
    a, b = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)

    async def e2e():
        async with ag.context() as ctx:
            x = a
            for _ in range(6):
                x = await ag.rpc_async(TO, torch.add, args=(x, b))
            r = ag.remote(TO, torch.add, args=(x, b))
            y = await r.to_here()
            await ctx.backward(y.sum())
            g = ctx.gradients
            return g[a], g[b]

    ga, gb = await e2e()
    assert (ga == 1).all() and (gb == 7).all(), (ga, gb)
    if want("dist.e2e_loop"):
        lat = await time_loop_async(e2e, SECONDS * 2, warm=10, settle=SETTLE)
        emit("dist.e2e_loop.rate", len(lat) / sum(lat), "iter/s")
        emit_latency("dist.e2e_loop", lat)
    if want("dist.retain_backward.rate"):
        async with ag.context() as ctx:
            y = await ag.rpc_async(TO, torch.add, args=(a, b))
            loss = (y * await ag.rpc_async(TO, torch.add, args=(a, b))).sum()
            for _ in range(20):
                await ctx.backward(loss, retain_graph=True)
            t = time.perf_counter()
            for _ in range(1000):
                await ctx.backward(loss, retain_graph=True)
            emit("dist.retain_backward.rate", 1000 / (time.perf_counter() - t), "1/s")
            assert (ctx.gradients[a] == 1020 * 4).all()


async def bench_dist(nw):
    x = torch.randn(256, 256, requires_grad=True)

    async def run_chain(depth, dense=False):
        async with ag.context() as ctx:
            y = await ag.rpc_async("worker0", chain, args=(x, 0, depth - 1))
            await ctx.backward((y * y if dense else y).sum())
            return ctx.gradients[x]

    async def run_fan(fn, width):
        async with ag.context() as ctx:
            loss = sum(await asyncio.gather(*[ag.rpc_async(f"worker{i}", fn, args=(x,)) for i in range(width)]))
            await ctx.backward(loss)
            return ctx.gradients[x]

    ws = [await ag.rpc_async(f"worker{i}", weight_values) for i in range(nw)]
    through = one = torch.ones(256, 256)
    for w in reversed(ws):
        through = through @ w.T
    for g, expected in ((await run_chain(nw), through), (await run_fan(work, nw), one @ sum(ws).T)):
        assert (g - expected).abs().max() < 1e-3 * expected.abs().max(), "wrong gradient"
    for n in (2, 4, 8):
        if want(f"dist.chain{n}"):
            emit_latency(f"dist.chain{n}", await time_loop_async(lambda: run_chain(n), warm=5, settle=SETTLE))
        if want(f"dist.chain_dense{n}"):
            emit_latency(f"dist.chain_dense{n}", await time_loop_async(lambda: run_chain(n, dense=True), warm=5, settle=SETTLE))
    for name, fn in (("fanout", work), ("fanout_dense", dense_work)):
        for n in (2, 4, 8):
            if want(f"dist.{name}{n}"):
                emit_latency(f"dist.{name}{n}", await time_loop_async(lambda: run_fan(fn, n), warm=5, settle=SETTLE))


def bench_condense():
    """A 4-layer transformer of usual proportions: one pass by torch, and condensing its graph into stages."""
    from aiograd.torch import TORCH
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    leaves, x = list(model.parameters()), torch.randn(4, 32, 128)
    plain, made = [], []
    for _ in range(30):
        loss = model(x).square().mean()
        port, _ = TORCH.entry(loss, None, False, False)
        t = time.perf_counter()
        TORCH.condense([port], {}, [], True)
        t2 = time.perf_counter()
        torch.autograd.grad(loss, leaves)
        plain.append(time.perf_counter() - t2)
        made.append(t2 - t)
    emit("local.condense", statistics.median(made) * 1e6, "us")
    emit("local.condense.grad", statistics.median(plain) * 1e6, "us")


async def cluster(nw, what):
    async with ag.LocalCluster(nw, options=options()):
        env, loop = await ag.rpc_async(TO, surroundings)
        assert await ag.rpc_async(TO, threads) == 1, f"the worker does not compute on one thread: {env}"
        print(f"# loop: driver {type(asyncio.get_running_loop()).__module__}, worker {loop}", file=sys.stderr)
        for name, bench in (("rpc", bench_rpc), ("tensor", bench_tensor), ("e2e", bench_e2e)):
            if name in what:
                await bench()
        if "dist" in what:
            await bench_dist(nw)


async def main(what):
    if "condense" in what:
        bench_condense()
    if small := [w for w in what if w not in ("dist", "condense")]:
        await cluster(1, small)
    if "dist" in what:
        await cluster(dist_workers(), ["dist"])


if __name__ == "__main__":
    import peer_aiograd_torch  # under its importable name, so that functions travel by reference, as torch's do
    run_async(peer_aiograd_torch.main(sys.argv[1:] or ["rpc", "tensor", "e2e", "dist", "condense"]))
