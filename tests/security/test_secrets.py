"""The secret shows up nowhere: not in processes, logs, reprs, pickles or tracebacks with locals."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from aiograd.cluster.joining.rendezvous import RendezvousFile
from aiograd.cluster.processes.spawn import worker_environment
from aiograd.wire.handshake import Handshake
from aiograd.wire.secrets import Secret

VALUE = b"hunter2-hunter2-hunter2-hunter2!"


def assert_hidden(text: str | bytes) -> None:
    text = text.encode() if isinstance(text, str) else text
    assert VALUE not in text
    assert VALUE.hex().encode() not in text


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def told_in_detail(error: BaseException) -> str:
    """A traceback as error reporters write it: with the variables of every frame."""
    return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


def fail_deeply(note: str) -> None:
    raise RuntimeError(note)


def test_a_secret_is_not_shown_by_its_text_forms():
    secret = Secret(VALUE)
    assert secret == VALUE
    for text in (
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r:>20}",
    ):
        assert_hidden(text)
    assert pickle.loads(pickle.dumps(secret)) == VALUE  # to a worker, through a pipe
    assert repr(pickle.loads(pickle.dumps(secret))) == "<secret>"


async def test_records_that_hold_the_secret_do_not_show_it():
    options = ag.Options(secret=VALUE)
    cluster = ag.LocalCluster(1, processes=False, options=options)
    async with cluster:
        worker = ag.current_worker()
        agent = worker.agent
        shown: list[Any] = [cluster, worker, agent, worker._plan, options, agent.identity]
        shown += [vars(agent.listener), vars(agent.listener._authenticator), vars(agent.dialer)]
        shown += [vars(cluster), vars(worker._plan.options)]
        shown += [vars(Handshake(agent.identity, VALUE, bytes(32), client=True))]
        shown += [RendezvousFile(("unix:x",), Secret(VALUE)), worker._plan.rendezvous]
        for each in shown:
            assert_hidden(repr(each))
        assert_hidden(pickle.dumps(options))


async def test_the_secret_is_in_no_process_log_or_traceback(caplog, capfd, tmp_path, monkeypatch):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AIOGRAD_SECRET", VALUE.decode())
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(VALUE)
    errors: list[BaseException] = []
    async with ag.LocalCluster(2, options=ag.Options(secret=VALUE)) as cluster:
        for name in ("worker0", "worker1"):
            for part in ("cmdline", "environ"):
                assert_hidden(read(f"/proc/{cluster.pid(name)}/{part}"))
        calls = [ag.rpc_async("worker0", fail_deeply, ("oh",)), ag.rpc_async("worker1", os.abort)]
        errors += await asyncio.gather(*calls, return_exceptions=True)
        assert_hidden(cluster.logs("worker0") + cluster.logs("worker1"))
    with pytest.raises(ag.errors.AuthError) as refused:
        await meet_with_another_secret(path, f"unix:{tmp_path}/meet")
    errors.append(refused.value)
    assert len(errors) == 3
    for error in errors:
        assert isinstance(error, Exception)
        assert_hidden(told_in_detail(error))
        assert_hidden(pickle.dumps(error))
    assert_hidden(caplog.text)
    assert_hidden("".join(capfd.readouterr()))


async def meet_with_another_secret(path: Path, place: str) -> None:
    here = ag.Options(secret_file=path)
    async with ag.Worker("a", rank=0, rendezvous=place, options=here):
        there = ag.Options(secret=VALUE[::-1])
        await ag.Worker("b", rank=1, rendezvous=place, options=there).start()


def test_children_do_not_inherit_a_secret():
    found = worker_environment({"AIOGRAD_SECRET": VALUE.decode(), "HOME": "/home"})
    assert "AIOGRAD_SECRET" not in found
    assert found["HOME"] == "/home"
