"""The folder in which workers of this host are found."""

from __future__ import annotations

import os
import stat

import pytest

import aiograd as ag
from aiograd.observe import runfolder
from aiograd.observe.runfolder import Registration, RunRecord, folder, records


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "aiograd"


def record(incarnation="00ff", **more):
    return RunRecord("a", 0, incarnation, incarnation, os.getpid(), ("unix:/x",), **more)


def test_a_worker_is_found_while_it_lives_and_its_file_is_private(runtime):
    registration = Registration(record())
    assert records() == [record()]
    (path,) = runtime.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    registration.close()
    assert records() == []
    assert list(runtime.iterdir()) == []


def test_what_a_killed_worker_left_is_removed(runtime):
    registration = Registration(record())
    runfolder.write_note("00ff", {"since": 1.0})
    os.close(registration.descriptors()[0])  # as the kernel does
    registration._lock = -1
    assert records() == []
    assert list(runtime.iterdir()) == []


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_what_a_killed_worker_left_is_removed_when_the_next_one_starts(runtime):
    registration = Registration(record())
    os.close(registration.descriptors()[0])  # as the kernel does
    registration._lock = -1
    (left,) = runtime.iterdir()
    async with ag.Worker("next", rank=0, world_size=1):
        assert not left.exists()
        assert [each.name for each in records()] == ["next"]


def test_a_folder_that_others_could_write_to_is_not_used(runtime, tmp_path, monkeypatch):
    runtime.mkdir()
    runtime.chmod(0o755)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert folder() is None
    registration = Registration(record())  # a worker starts without
    assert registration.descriptors() == []
    registration.close()
    (tmp_path / "tmp").mkdir()
    assert folder() == tmp_path / "tmp" / f"aiograd-{os.getuid()}"


def test_a_link_in_its_place_is_not_followed(runtime, tmp_path):
    (tmp_path / "other").mkdir(mode=0o700)
    runtime.symlink_to(tmp_path / "other")
    assert folder() != runtime


def test_files_that_are_no_records_are_left_alone(runtime):
    registration = Registration(record())
    descriptor = os.open(runtime / "w-zz.json", os.O_CREAT | os.O_RDWR, 0o600)
    assert runfolder._lock(descriptor, exclusive=True)
    os.write(descriptor, b"no json")
    assert records() == [record()]
    os.close(descriptor)
    registration.close()


def test_notes_are_read_by_others_and_names_of_files_are_not_believed(runtime):
    runfolder.write_note("00ff", {"at": "x.py:3"})
    assert runfolder.read_note("00ff") == {"at": "x.py:3"}
    assert runfolder.read_note("../00ff") is None
    runfolder.write_note("00ff", None)
    assert runfolder.read_note("00ff") is None


async def test_a_local_cluster_can_be_found_with_its_generated_secret(runtime):
    async with ag.LocalCluster(1) as cluster:
        driver, worker = sorted(records(), key=lambda each: each.name)
        assert (driver.name, driver.coordinator, driver.pid) == ("driver", True, os.getpid())
        assert (worker.name, worker.pid) == ("worker0", cluster.pid("worker0"))
        assert worker.cluster == driver.incarnation
        assert len(bytes.fromhex(driver.secret)) == 32
        assert worker.secret is None
        assert driver.addresses == cluster.driver.agent.info.addresses
    assert records() == []


async def test_a_secret_that_a_user_gave_is_not_written(runtime):
    secret = b"a secret of the user's own, 32 B"
    async with ag.LocalCluster(1, options=ag.Options(secret=secret)):
        assert [each.secret for each in records()] == [None, None]
        for path in runtime.iterdir():
            assert secret.hex() not in path.read_text()


async def test_workers_in_one_loop_leave_no_files(runtime):
    async with ag.LocalCluster(1, processes=False):
        assert records() == []


def test_a_worker_can_close_while_another_one_removes_the_folder(runtime, monkeypatch):
    registration = Registration(record())

    def removed_meanwhile(path, pattern):  # between the two looks that `glob` takes
        path.rmdir()
        return os.scandir(path)

    monkeypatch.setattr(type(runtime), "glob", removed_meanwhile)
    registration.close()
    assert not runtime.exists()
