"""Folders of Unix sockets: private, short, and removed also for those who could not do it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from aiograd.cluster.joining.folders import MAX_FOLDER_PATH, PrivateFolder

# Makes a folder with a socket and a secret in it, as workers and `aiograd run` do.
OWNER = """
import socket, sys
from aiograd.cluster.joining.folders import PrivateFolder
folder = PrivateFolder()
probe = socket.socket(socket.AF_UNIX)
probe.bind(f"{folder.path}/w")
open(f"{folder.path}/secret", "w").close()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path)


def killed(change: Callable[[Path], None] = lambda folder: None) -> Path:
    """Give the folder of a process that was killed, after `change` while it lived."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert (folder / "w").is_socket()
        # A folder that is in use is left alone.
        PrivateFolder().close()
        assert (folder / "w").is_socket()
        change(folder)
        owner.kill()
    assert folder.is_dir()
    return folder


def test_a_folder_is_private_and_its_end_leaves_nothing(temporary):
    folder = PrivateFolder()
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert os.listdir(folder.path) == ["lock"]
    folder.close()
    folder.close()
    assert list(temporary.iterdir()) == []


def test_the_path_of_a_folder_is_short(monkeypatch, tmp_path):
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = PrivateFolder()
    assert len(folder.path) <= MAX_FOLDER_PATH
    folder.close()
    assert list(deep.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(temporary):
    folder = killed()
    PrivateFolder().close()
    assert not folder.exists()
    assert list(temporary.iterdir()) == []


def test_a_folder_with_anything_else_in_it_is_left_alone(temporary):
    folder = killed(lambda folder: (folder / "results.txt").write_text("mine"))
    PrivateFolder().close()
    assert (folder / "results.txt").read_text() == "mine"
    assert (folder / "w").is_socket()


def test_a_folder_whose_sockets_are_used_is_left_alone(temporary):
    with socket.socket(socket.AF_UNIX) as other:
        folder = killed(lambda folder: (other.bind(f"{folder}/meet"), other.listen()))
        PrivateFolder().close()
        assert (folder / "meet").is_socket()
    PrivateFolder().close()
    assert not folder.exists()


def test_folders_that_only_look_like_ours_are_left_alone(temporary):
    for name in ("aiograd-12345678", "aiograd-checkpoints"):
        (temporary / name).mkdir()
    (temporary / "aiograd-checkpoints" / "lock").touch()
    (temporary / "aiograd-abcdefgh").symlink_to(temporary / "aiograd-checkpoints")
    PrivateFolder().close()
    assert len(list(temporary.iterdir())) == 3
    assert (temporary / "aiograd-checkpoints" / "lock").exists()


def test_the_lock_goes_last_so_that_a_kill_in_between_leaves_what_can_be_judged(
    temporary, monkeypatch
):
    folder = PrivateFolder()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder.path}/w")
    with monkeypatch.context() as killed_here:
        killed_here.setattr("shutil.rmtree", lambda path, ignore_errors: None)
        folder.close()
    assert os.listdir(folder.path) == ["lock"]
    PrivateFolder().close()
    assert not os.path.exists(folder.path)


def test_an_empty_folder_is_removed_unless_somebody_has_just_made_it(temporary):
    old, new, other = (temporary / f"aiograd-{name * 8}" for name in "abc")
    for folder in (old, new, other):
        folder.mkdir(mode=0o700)
    (other / "file").touch()
    for folder in (old, other):
        os.utime(folder, (0, 0))
    PrivateFolder().close()
    assert not old.exists()
    assert new.exists()
    assert other.exists()
