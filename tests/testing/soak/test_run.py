"""A soak of ten seconds on each event loop, and the violations that a soak must notice."""

from __future__ import annotations

import asyncio
import ctypes

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import WorkerLost
from aiograd.rpc.options import Options
from aiograd.testing.soak import jobs, run
from aiograd.testing.soak.jobs import Wrong
from aiograd.testing.soak.run import DRIFT, SETTLED, Report, held, soak


def options() -> Options:
    uses_uvloop = type(asyncio.get_running_loop()).__module__.startswith("uvloop")
    return Options(loop="uvloop" if uses_uvloop else "asyncio", lease=2.0)


@pytest.mark.deadline(60)
async def test_workers_work_on_while_others_are_killed(capfd):
    report = await soak(10.0, workers=4, every=3.0, options=options())
    assert report.faults() == [], str(report)
    assert report.kills >= 2
    assert report.calls >= 500
    assert set(report.jobs) == {job.__name__ for job in jobs.JOBS}


async def test_a_soak_reports_wrong_late_untyped_and_leaked_results(monkeypatch):
    async def wrong(site, source):
        await asyncio.sleep(0.02)
        raise Wrong("a gradient")

    async def unexplained(site, source):
        await asyncio.sleep(0.02)
        raise WorkerLost("worker1")

    async def untyped(site, source):
        await asyncio.sleep(0.02)
        raise ZeroDivisionError

    async def late(site, source):
        await site.within(0.01, asyncio.sleep(0.03))

    async def hanging(site, source):
        await site.within(None, asyncio.Event().wait())

    async def leaking(site, source):
        LEAKED.append(ag.remote("worker0", float, (1,)))
        await asyncio.sleep(0.1)

    LEAKED: list[object] = []  # noqa: N806
    monkeypatch.setattr(run, "JOBS", {wrong: 1, unexplained: 1, untyped: 1, late: 1, hanging: 1})
    monkeypatch.setattr(run, "LATE", 0.01)
    monkeypatch.setattr(run, "HANG", 0.1)
    monkeypatch.setattr(run, "AFTERMATH", -1.0)
    report = await soak(1.0, workers=4, every=100.0, options=options())
    found = "\n".join(report.faults())
    for trace in ("wrong: a gradient", "× WorkerLost", "ZeroDivisionError", "late: ", "no end"):
        assert trace in found
    assert found.splitlines()[0] in str(report)

    monkeypatch.setattr(run, "JOBS", {leaking: 1})
    impatient = Options(loop=options().loop, lease=0.0)
    monkeypatch.setattr(run, "REST", 0.5)
    report = await soak(0.3, workers=4, every=100.0, options=impatient)
    assert "user_rrefs" in report.left["driver"]
    assert "owner_rrefs" in report.left["worker0"]
    LEAKED.clear()


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can be asked to give it back"
)
def test_memory_that_glibc_keeps_for_later_does_not_count():
    before = held()
    arrays = [np.ones(8000) for _ in range(1000)]  # 64 MB
    assert held() > before + (48 << 20)
    arrays.clear()
    assert held() < before + (16 << 20)


def test_growing_memory_is_a_fault_once_it_should_have_settled():
    growing = [100 + number for number in range(100)]
    steady = [50, 80, *[100] * 98]
    report = Report(SETTLED, 4, 0, memory={"driver": growing, "worker0": steady})
    assert report.drift("driver") > DRIFT
    assert report.drift("worker0") == 0.0
    (fault,) = report.faults()
    assert fault.startswith("driver has grown by")
    assert Report(20.0, 4, 0, memory={"driver": growing}).faults() == []
    assert "+" in str(report)


async def test_too_few_workers_are_refused():
    with pytest.raises(ValueError, match="4 workers"):
        await soak(1.0, workers=3)
