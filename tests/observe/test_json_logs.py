"""Log lines as JSON."""

from __future__ import annotations

import io
import json
import logging

import pytest

import aiograd as ag
from aiograd.observe.json_logs import enable
from tests.support.waiting import until

log = logging.getLogger("tests.json")


@pytest.fixture
def lines():
    stream = io.StringIO()
    level = logging.getLogger().level
    handler = enable(stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logging.getLogger().removeHandler(handler)
    logging.getLogger().setLevel(level)


async def work(text):
    log.warning("%s", text)


async def test_a_line_of_a_called_function_names_worker_peer_call_and_context(lines):
    async with ag.LocalCluster(1, processes=False):
        async with ag.context() as ctx:
            await ag.rpc_async("worker0", work, args=('a "quoted" line',))
        log.info("outside")
        try:
            raise ValueError("seen")
        except ValueError:
            log.exception("failed")
    inside, outside, failed = (line for line in lines() if line["logger"] == "tests.json")
    assert inside["message"] == 'a "quoted" line'
    assert (inside["worker"], inside["peer"], inside["level"]) == ("worker0", "driver", "WARNING")
    assert inside["call"].startswith("driver>worker0#")
    assert inside["context"] == str(ctx.id)
    assert inside["at"].startswith(__file__)
    assert outside["worker"] == "driver"
    assert "call" not in outside
    assert "ValueError: seen" in failed["exception"]


def test_without_a_worker_there_are_no_such_fields(lines):
    log.error("alone")
    (line,) = lines()
    assert "worker" not in line
    assert line["time"].endswith("+00:00")


async def test_worker_processes_write_json_on_request(monkeypatch):
    monkeypatch.setenv("AIOGRAD_LOG", "json")
    async with ag.LocalCluster(1) as cluster:
        await cluster["worker0"].call(work, "from a process")
        await until(lambda: "from a process" in cluster.logs("worker0"))
        line = next(
            json.loads(each)
            for each in cluster.logs("worker0").splitlines()
            if "from a process" in each
        )
        assert (line["worker"], line["peer"]) == ("worker0", "driver")
