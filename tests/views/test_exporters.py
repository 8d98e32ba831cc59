"""Prometheus and OpenTelemetry get the same numbers, from threads of their own."""

from __future__ import annotations

import asyncio
import time
import urllib.request

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest

import aiograd as ag
from aiograd.observe.snapshot import Data
from aiograd.views import otel, prometheus, scrape
from aiograd.views.numbers import families


async def scraped(port):
    def read():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return answer.read().decode()

    return await asyncio.to_thread(read)


async def test_prometheus_scrapes_a_worker_or_its_whole_cluster():
    async with ag.LocalCluster(1, processes=False):
        port, close = prometheus.serve(0)
        everything, close_all = prometheus.serve(0, cluster=True)
        try:
            text = await scraped(port)
            assert 'aiograd_pending_calls{worker="driver"} 0.0' in text
            assert 'worker="worker0"' not in text.replace('peer="worker0"', "")
            assert "# TYPE aiograd_calls_started_total counter" in text
            text = await scraped(everything)
            assert 'aiograd_pending_calls{worker="worker0"} 0.0' in text
            assert 'aiograd_workers{state="running"} 2.0' in text
        finally:
            await asyncio.to_thread(close)
            await asyncio.to_thread(close_all)


async def test_calls_and_passes_are_counted_by_outcome_from_the_first_scrape_on():
    async with ag.LocalCluster(1) as cluster:
        worker = cluster["worker0"]
        await worker.call(divmod, 7, 2)
        port, close = prometheus.serve(0, cluster=True)
        try:
            assert "divmod" not in await scraped(port)  # nobody collected when it was called
            for _ in range(3):
                await worker.call(divmod, 7, 2)
            with pytest.raises(ZeroDivisionError):
                await worker.call(divmod, 7, 0)
            forever = worker.call(asyncio.sleep, 60)
            w = ag.ones(2, requires_grad=True)
            async with ag.context() as ctx:
                await ctx.backward(await ag.rpc_async("worker0", ag.sum, args=(w,)))
                forever.cancel()
            await asyncio.sleep(scrape._FRESH)
            text = await scraped(port)
        finally:
            await asyncio.to_thread(close)
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#")

    def calls(function, outcome):
        labels = f'function="{function}",outcome="{outcome}",worker="worker0"'
        return float(found[f"aiograd_calls_total{{{labels}}}"])

    assert (calls("divmod", "ok"), calls("divmod", "error")) == (3, 1)
    assert (calls("sleep", "cancelled"), calls("sum", "ok")) == (1, 1)
    labels = 'function="divmod",worker="worker0"'
    most = 'function="divmod",le="+Inf",worker="worker0"'
    assert float(found[f"aiograd_call_seconds_bucket{{{most}}}"]) == 4
    assert float(found[f"aiograd_call_seconds_count{{{labels}}}"]) == 4
    assert 0 < float(found[f"aiograd_call_seconds_sum{{{labels}}}"]) < 10
    assert float(found['aiograd_backward_seconds_count{worker="driver"}']) == 1
    assert float(found['aiograd_passes_total{outcome="ok",worker="driver"}']) == 1


async def test_registering_takes_no_snapshot_and_a_closed_worker_has_no_numbers():
    async with ag.LocalCluster(1, processes=False):
        collector = prometheus.Collector()
        registry = CollectorRegistry()
        registry.register(collector)
    text = await asyncio.to_thread(generate_latest, registry)
    assert b'aiograd_workers{state="running"} 0.0' in text


async def test_a_blocked_loop_is_a_number_too(monkeypatch):
    monkeypatch.setattr(scrape, "TIMEOUT", 0.2)
    async with ag.LocalCluster(1, processes=False):
        found = asyncio.create_task(asyncio.to_thread(scrape.Scraper().snapshot))
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251  the thread asks, and gives up
        assert [row.state for row in (await found).workers] == ["blocked"]


async def test_otel_reads_the_same_names():
    async with ag.LocalCluster(1, processes=False):
        reader = InMemoryMetricReader()
        provider = MeterProvider([reader])
        names = otel.instrument(provider.get_meter("test"), cluster=True)
        assert {name.removesuffix(part) for name in names for part in otel.PARTS} >= {
            each.name.replace("_", ".", 1) for each in families(Data())
        }
        data = await asyncio.to_thread(reader.get_metrics_data)
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        found = {metric.name: metric for metric in metrics}
        points = found["aiograd.running_calls"].data.data_points
        assert {point.attributes["worker"]: point.value for point in points} == {
            "driver": 0,
            "worker0": 0,
        }
        assert found["aiograd.calls_started"].data.is_monotonic
        await ag.rpc_async("worker0", abs, args=(-1,))
        await asyncio.sleep(scrape._FRESH)  # snapshots are shared for so long
        data = await asyncio.to_thread(reader.get_metrics_data)
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        found = {metric.name: metric.data.data_points for metric in metrics}
        of_abs = {"worker": "worker0", "function": "abs"}
        (count,) = (p.value for p in found["aiograd.call_seconds.count"] if p.attributes == of_abs)
        buckets = {p.attributes["le"]: p.value for p in found["aiograd.call_seconds.bucket"]}
        assert count == buckets["+Inf"] == 1
        assert next(p.value for p in found["aiograd.call_seconds.sum"]) > 0
        await asyncio.to_thread(provider.shutdown)
