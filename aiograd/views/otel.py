"""The numbers of workers as OpenTelemetry metrics. Needs `aiograd[otel]`.

    from aiograd.views import otel
    otel.instrument()                 # this worker; instrument(cluster=True): all of them

Instruments are observable: they are read when the exporter of the program collects. Names are those
of `numbers`, with dots: `aiograd.pending_calls`. OpenTelemetry has no observable histograms, so
each is three counters, as Prometheus stores it: `aiograd.call_seconds.bucket` with the attribute
`le`, `.sum` and `.count`. Spans of recordings are in `rpc.observe.otel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from aiograd.observe.snapshot import Data
from aiograd.rpc.agent import Agent
from aiograd.views.numbers import GAUGE, HISTOGRAM, Family, families
from aiograd.views.scrape import Scraper

BUCKET, SUM, COUNT = PARTS = (".bucket", ".sum", ".count")


def instrument(
    meter: Any = None, agent: Agent | None = None, *, cluster: bool = False
) -> list[str]:
    """Make the instruments, on the program's own meter if none is given; return their names."""
    meter = metrics.get_meter("aiograd") if meter is None else meter
    scraper = Scraper(agent, cluster=cluster)
    names = []
    for family in families(Data()):
        name = family.name.replace("aiograd_", "aiograd.", 1)
        gauge = family.kind == GAUGE
        make = meter.create_observable_gauge if gauge else meter.create_observable_counter
        for part in PARTS if family.kind == HISTOGRAM else ("",):
            reader = _reader(scraper, family.name, part)
            make(name + part, callbacks=[reader], description=family.help)
            names.append(name + part)
    return names


def _reader(
    scraper: Scraper, name: str, part: str
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(_: CallbackOptions) -> Iterable[Observation]:
        for family in scraper.families():
            if family.name == name:
                yield from _observations(family, part)

    return read


def _observations(family: Family, part: str) -> Iterator[Observation]:
    for values, number in family.samples:
        yield Observation(number, dict(zip(family.labels, values, strict=True)))
    for values, buckets in family.histograms:
        labels = dict(zip(family.labels, values, strict=True))
        if part == BUCKET:
            for bound, count in buckets.cumulative:
                yield Observation(count, {**labels, "le": bound})
        else:
            yield Observation(buckets.total if part == SUM else buckets.number, labels)
