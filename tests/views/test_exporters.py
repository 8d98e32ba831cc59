"""Prometheus and OpenTelemetry get the same numbers, from threads of their own."""

from __future__ import annotations

import asyncio
import time
import urllib.request

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
        assert names == [each.name.replace("_", ".", 1) for each in families(Data())]
        data = await asyncio.to_thread(reader.get_metrics_data)
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        found = {metric.name: metric for metric in metrics}
        points = found["aiograd.running_calls"].data.data_points
        assert {point.attributes["worker"]: point.value for point in points} == {
            "driver": 0,
            "worker0": 0,
        }
        assert found["aiograd.calls_started"].data.is_monotonic
        await asyncio.to_thread(provider.shutdown)
