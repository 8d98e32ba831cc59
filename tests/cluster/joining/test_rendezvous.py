"""World places and secrets."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aiograd.cluster.joining.rendezvous import (
    Rendezvous,
    RendezvousFile,
    exposed_permissions,
    find_secret,
    parse_rendezvous,
    read_secret_file,
    replaceable_within,
    user_secret,
)
from aiograd.errors import AuthError, RpcError


@pytest.mark.parametrize(
    ("text", "place", "local"),
    [
        ("host:29500", Rendezvous("tcp", "host:29500"), False),
        ("tcp://host:1", Rendezvous("tcp", "host:1"), False),
        ("0.0.0.0:80", Rendezvous("tcp", "0.0.0.0:80"), False),
        ("127.0.0.1:80", Rendezvous("tcp", "127.0.0.1:80"), True),
        ("localhost:80", Rendezvous("tcp", "localhost:80"), True),
        ("[::1]:80", Rendezvous("tcp", "[::1]:80"), True),
        ("unix:/tmp/a:b", Rendezvous("unix", "/tmp/a:b"), True),
        ("file:meet", Rendezvous("file", "meet"), False),
        ("memory:x", Rendezvous("memory", "x"), True),
    ],
)
def test_a_rendezvous_has_a_few_forms(text, place, local):
    assert parse_rendezvous(text) == place
    assert parse_rendezvous(text).local is local


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:70000", "unix:"])
def test_a_malformed_rendezvous_is_a_value_error(text):
    with pytest.raises(ValueError, match="rendezvous"):
        parse_rendezvous(text)


def test_a_sign_is_read_back_and_nobody_else_may_read_it(tmp_path):
    path = str(tmp_path / "meet")
    assert RendezvousFile.read(path) is None
    RendezvousFile(("unix:/x",), b"s" * 32).write(path)
    RendezvousFile(("unix:/y", "tcp:h:1"), b"t" * 32).write(path)
    assert RendezvousFile.read(path) == RendezvousFile(("unix:/y", "tcp:h:1"), b"t" * 32)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(tmp_path) == ["meet"]


def test_a_file_of_something_else_is_not_taken_for_a_sign(tmp_path):
    (tmp_path / "meet").touch(mode=0o600)
    (tmp_path / "meet").write_text("{}")
    with pytest.raises(RpcError, match="no worker wrote it"):
        RendezvousFile.read(str(tmp_path / "meet"))


@pytest.fixture
def planted(monkeypatch):
    """A file with these contents that another user has put into a folder like /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="aiograd-shared-", dir="/tmp"))  # not below a private one
    folder.chmod(0o1777)

    def plant(data: str) -> Path:
        path = folder / "meet"
        if os.geteuid() == 0:
            command = ["/bin/sh", "-c", 'umask 077; printf %s "$1" > "$2"', "sh", data, str(path)]
            subprocess.run(command, user=65534, group=65534, extra_groups=[], check=True)
            assert path.stat().st_uid == 65534
        else:  # then we are the other user for what reads it
            path.touch(mode=0o600)
            path.write_text(data)
            me = os.geteuid()
            monkeypatch.setattr("os.geteuid", lambda: me + 1)
        return path

    yield plant
    shutil.rmtree(folder)


SIGN = '{"addresses": ["unix:/nowhere"], "secret": "%s"}' % ("ab" * 32)


def test_a_sign_that_another_user_planted_is_refused(planted):
    path = planted(SIGN)
    with pytest.raises(AuthError, match="belongs to another user") as caught:
        RendezvousFile.read(str(path))
    assert str(path) in str(caught.value)


def test_a_secret_file_that_another_user_planted_is_refused(planted):
    with pytest.raises(AuthError, match="belongs to another user"):
        read_secret_file(str(planted("0123456789abcdef")))


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606])
def test_a_sign_that_others_can_read_or_change_is_refused(tmp_path, mode):
    path = tmp_path / "meet"
    RendezvousFile(("unix:/x",), b"s" * 32).write(str(path))
    path.chmod(mode)
    with pytest.raises(AuthError, match=f"mode {mode:04o}"):
        RendezvousFile.read(str(path))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_sign_is_a_file_and_nothing_else(tmp_path, kind):
    path = tmp_path / "meet"
    RendezvousFile(("unix:/x",), b"s" * 32).write(str(tmp_path / "other"))
    if kind == "link":
        path.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)  # opening it would wait for somebody who writes
    else:
        path.mkdir(mode=0o700)
    with pytest.raises(AuthError, match="no regular file"):
        RendezvousFile.read(str(path))


@pytest.mark.parametrize("what", ["sign", "secret"])
@pytest.mark.parametrize(("mode", "safe"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_a_folder_in_which_others_can_replace_the_file_is_refused(tmp_path, what, mode, safe):
    path = tmp_path / "meet"
    RendezvousFile(("unix:/x",), b"s" * 32).write(str(path))
    read = {"sign": RendezvousFile.read, "secret": read_secret_file}[what]
    tmp_path.chmod(mode)
    if safe:
        assert read(str(path))
    else:
        with pytest.raises(AuthError, match=f"mode {mode:04o}"):
            read(str(path))


def test_a_folder_is_as_private_as_its_group():
    me, other = 1000, 1001
    assert replaceable_within(0o755, me, me, private_group=False) is None
    assert replaceable_within(0o775, me, me, private_group=True) is None  # umask 002 is common
    assert "0775" in replaceable_within(0o775, me, me, private_group=False)
    assert "0777" in replaceable_within(0o777, me, me, private_group=True)
    assert replaceable_within(0o1777, 0, me, private_group=False) is None
    assert "another user" in replaceable_within(0o755, other, me, private_group=False)


def test_a_secret_file_may_be_a_link_to_a_private_file(tmp_path):
    """Orchestrators mount secrets as links; what counts is the file that was opened."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "real" / "secret").touch(mode=0o600)
    (tmp_path / "real" / "secret").write_bytes(b"0123456789abcdef")
    (tmp_path / "..data").symlink_to("real")
    (tmp_path / "secret").symlink_to("..data/secret")
    assert read_secret_file(str(tmp_path / "secret")) == b"0123456789abcdef"


def test_a_sign_that_cannot_be_written_is_an_rpc_error(planted):
    path = planted(SIGN)
    with pytest.raises(RpcError, match="cannot write"):
        RendezvousFile(("unix:/x",)).write(str(path / "below"))


def test_a_secret_file_holds_raw_bytes_without_the_whitespace_around_them(tmp_path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(b" \n0123456789abcdef\n")
    assert read_secret_file(str(path)) == b"0123456789abcdef"
    path.write_bytes(b"short\n")
    with pytest.raises(AuthError, match="16"):
        read_secret_file(str(path))
    with pytest.raises(AuthError, match="cannot read"):
        read_secret_file(str(tmp_path / "none"))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602, 0o660, 0o777])
def test_a_secret_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef")
    path.chmod(mode)
    with pytest.raises(AuthError, match=f"mode {mode:04o}.*chmod 600") as caught:
        read_secret_file(str(path))
    assert "0123456789abcdef" not in str(caught.value)
    for private in (0o600, 0o400):
        path.chmod(private)
        assert read_secret_file(str(path)) == b"0123456789abcdef"


def test_a_secret_file_belongs_to_this_user_or_to_root():
    me, root, other = 1000, 0, 1001
    assert exposed_permissions(0o600, me, me) is None
    assert exposed_permissions(0o440, root, me) is None  # as orchestrators mount it
    assert "0444" in exposed_permissions(0o444, root, me)
    assert "0460" in exposed_permissions(0o460, root, me)
    assert "0440" in exposed_permissions(0o440, root, root)
    assert "another user" in exposed_permissions(0o600, other, me)


def secret_for(rendezvous: str, environment=None, secret=None, secret_file=None) -> bytes | None:
    return find_secret(
        parse_rendezvous(rendezvous),
        secret=secret,
        secret_file=secret_file,
        environment={} if environment is None else environment,
        token=os.urandom,
    )


def test_a_secret_in_the_environment_is_used_and_taken_out_of_it():
    environment = {"AIOGRAD_SECRET": "x" * 20, "OTHER": "1"}
    assert secret_for("host:1", environment) == b"x" * 20
    assert environment == {"OTHER": "1"}
    environment = {"AIOGRAD_SECRET": "x" * 20}
    assert secret_for("host:1", environment, secret=b"y" * 16) == b"y" * 16
    assert environment == {}


def test_a_short_secret_is_refused_without_being_shown():
    with pytest.raises(AuthError) as caught:
        secret_for("host:1", {"AIOGRAD_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_meeting_across_the_network_needs_a_secret():
    with pytest.raises(AuthError, match="AIOGRAD_SECRET_FILE"):
        secret_for("node7:29500")


def test_a_file_rendezvous_carries_a_secret_of_its_own():
    assert secret_for("file:/anywhere") is None


def test_workers_of_one_user_on_one_host_share_a_secret(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        secrets = set(
            threads.map(lambda _: user_secret([tmp_path], os.getuid(), os.urandom), range(32))
        )
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64
    folder = tmp_path / f"aiograd-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert os.listdir(folder) == ["secret"]


def test_a_secret_that_others_could_have_put_there_is_not_used(tmp_path):
    folder = tmp_path / f"aiograd-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(AuthError, match="not private"):
        user_secret([tmp_path], os.getuid(), os.urandom)


def test_a_folder_that_another_user_made_first_does_not_keep_us_from_starting(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can make a folder of another user")
    shared, home = tmp_path / "tmp", tmp_path / "home"
    for folder in (shared, home):
        folder.mkdir()
    squatted = shared / "aiograd-0"
    squatted.mkdir()
    os.chown(squatted, 65534, 65534)
    secret = user_secret([shared, home], 0, os.urandom)
    assert secret == user_secret([shared, home], 0, os.urandom)
    assert (home / ".aiograd-0" / "secret").stat().st_mode & 0o777 == 0o600
    assert not list(squatted.iterdir())
    with pytest.raises(AuthError, match="not private"):
        user_secret([shared], 0, os.urandom)
