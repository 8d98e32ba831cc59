"""The numbers of workers for Prometheus. Needs `aiograd[metrics]`.

    from aiograd.views import prometheus
    prometheus.serve(9100)                        # this worker, at http://127.0.0.1:9100/metrics
    prometheus.serve(9100, cluster=True)          # all workers, from one of them
    REGISTRY.register(prometheus.Collector())     # beside metrics of your own

Everything is read when Prometheus asks. Calls and passes are counted in between, by outcome and
duration, from the first scrape until five minutes after the last one. `numbers` lists the names,
`deploy/grafana.json` is a dashboard of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector as Base

from aiograd.rpc.agent import Agent
from aiograd.views.numbers import COUNTER, GAUGE, HISTOGRAM
from aiograd.views.scrape import Scraper

_KINDS: Final = {
    GAUGE: GaugeMetricFamily,
    COUNTER: CounterMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
}


class Collector(Base):
    """Gives the numbers of the current worker; `cluster`: those of all workers."""

    def __init__(self, agent: Agent | None = None, *, cluster: bool = False) -> None:
        self._scraper = Scraper(agent, cluster=cluster)

    def describe(self) -> list[Any]:
        """Return nothing: registering must not take a snapshot."""
        return []

    def collect(self) -> Iterator[Any]:
        """Give the metrics as Prometheus wants them."""
        for family in self._scraper.families():
            metric = _KINDS[family.kind](family.name, family.help, labels=family.labels)
            for values, number in family.samples:
                metric.add_metric(values, number)
            for values, buckets in family.histograms:
                metric.add_metric(values, buckets.cumulative, buckets.total)
            yield metric


def serve(
    port: int = 9100, address: str = "127.0.0.1", *, cluster: bool = False
) -> tuple[int, Callable[[], None]]:
    """Serve the numbers at /metrics; return the port, and what ends it.

    Names of workers and functions are in them: listen beyond this host only where that may be read.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(cluster=cluster))
    server, thread = start_http_server(port, address, registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close
