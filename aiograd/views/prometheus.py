"""The numbers of workers for Prometheus. Needs `aiograd[metrics]`.

    from aiograd.views import prometheus
    prometheus.serve(9100)                        # this worker, at http://127.0.0.1:9100/metrics
    prometheus.serve(9100, cluster=True)          # all workers, from one of them
    REGISTRY.register(prometheus.Collector())     # beside metrics of your own

Everything is read when Prometheus asks; nothing is counted for it in between. `numbers` lists the
names, `deploy/grafana.json` is a dashboard of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector as Base

from aiograd.rpc.agent import Agent
from aiograd.views.numbers import COUNTER, families
from aiograd.views.scrape import Scraper


class Collector(Base):
    """Gives the numbers of the current worker; `cluster`: those of all workers."""

    def __init__(self, agent: Agent | None = None, *, cluster: bool = False) -> None:
        self._scraper = Scraper(agent, cluster=cluster)

    def describe(self) -> list[Any]:
        """Return nothing: registering must not take a snapshot."""
        return []

    def collect(self) -> Iterator[Any]:
        """Give the metrics as Prometheus wants them."""
        for name, kind, text, labels, samples in families(self._scraper.snapshot()):
            make = CounterMetricFamily if kind == COUNTER else GaugeMetricFamily
            metric = make(name, text, labels=labels)
            for values, number in samples:
                metric.add_metric(values, number)
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
