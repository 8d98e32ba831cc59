"""The numbers of workers as OpenTelemetry metrics. Needs `aiograd[otel]`.

    from aiograd.views import otel
    otel.instrument()                 # this worker; instrument(cluster=True): all of them

Instruments are observable: they are read when the exporter of the program collects. Names are those
of `numbers`, with dots: `aiograd.pending_calls`. Spans of recordings are in `rpc.observe.otel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from aiograd.observe.snapshot import Data
from aiograd.rpc.agent import Agent
from aiograd.views.numbers import COUNTER, families
from aiograd.views.scrape import Scraper


def instrument(
    meter: Any = None, agent: Agent | None = None, *, cluster: bool = False
) -> list[str]:
    """Make the instruments, on the program's own meter if none is given; return their names."""
    meter = metrics.get_meter("aiograd") if meter is None else meter
    scraper = Scraper(agent, cluster=cluster)
    names = []
    for family in families(Data()):
        name = family.name.replace("aiograd_", "aiograd.", 1)
        make = (
            meter.create_observable_counter
            if family.kind == COUNTER
            else meter.create_observable_gauge
        )
        make(name, callbacks=[_reader(scraper, family.name)], description=family.help)
        names.append(name)
    return names


def _reader(scraper: Scraper, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(_: CallbackOptions) -> Iterable[Observation]:
        for family in families(scraper.snapshot()):
            if family.name == name:
                for values, number in family.samples:
                    yield Observation(number, dict(zip(family.labels, values, strict=True)))

    return read
