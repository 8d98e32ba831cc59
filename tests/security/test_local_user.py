"""Another user of the same host: what it binds, plants and squats on gets it nowhere.

Needs root, to become `nobody` in child processes; skipped otherwise.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from aiograd.cluster.joining.rendezvous import RendezvousFile, read_secret_file, user_secret
from aiograd.cluster.worker import Worker
from aiograd.errors import AiogradError, AuthError
from aiograd.wire.handshake import HELLO_SIZE, PROOF_SIZE
from tests.security.test_frames import poison
from tests.support.waiting import until

NOBODY = 65534
pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user"
)
# Modules first: nobody may be unable to read where this interpreter is.
BECOME_NOBODY = f"""
import encodings.idna, os, socket, sys, time
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); os.chdir("/")
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: sticky, and everybody writes to it."""
    folder = Path(tempfile.mkdtemp(prefix="aiograd-shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def as_nobody(program: str, *arguments: object) -> str:
    """Run a program as another user; what it printed."""
    command = [sys.executable, "-I", "-c", BECOME_NOBODY + program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ── the rendezvous port ─────────────────────────────────────────────────────────────────────────

# Binds the port before rank 0, takes in rank 1, lets rank 0 have the port, passes the handshake on,
# and then says something itself, to both.
SQUATTER = """
port, sizes, poison = sys.argv[1:]
port, sizes, poison = int(port), list(map(int, sizes.split(","))), bytes.fromhex(poison)
def read(s, size):
    data = b""
    while len(data) < size:
        piece = s.recv(size - len(data))
        if not piece:
            sys.exit(f"closed after {len(data)} of {size} bytes")
        data += piece
    return data
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", port))
listener.listen()
print(os.getuid(), "bound", flush=True)
victim, _ = listener.accept()
listener.close()
print("caught", flush=True)
while True:
    try:
        other = socket.create_connection(("127.0.0.1", port))
        break
    except OSError:
        time.sleep(0.02)
for size in sizes:
    other.sendall(read(victim, size))
    victim.sendall(read(other, size))
for end in (other, victim):
    end.sendall(poison)
print("injected", flush=True)
sys.stdin.read()
"""


@pytest.mark.deadline(60)
async def test_who_binds_the_rendezvous_port_first_runs_code_nowhere(tmp_path):
    """S1: a relay of the handshake that goes on with frames of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    marker = tmp_path / "ran"
    sizes = f"{HELLO_SIZE},{PROOF_SIZE}"
    squatter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-c", BECOME_NOBODY + SQUATTER),
        *(str(port), sizes, poison(marker).hex()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert squatter.stdout is not None
    assert squatter.stdin is not None
    options = ag.Options(secret=b"known to both ranks only", resume=0.5, grace=0.5)
    place = f"127.0.0.1:{port}"
    ranks = [
        Worker(name, rank=rank, world_size=2, rendezvous=place, options=options)
        for rank, name in enumerate("ab")
    ]
    starts: list[asyncio.Task[Worker]] = []
    try:
        assert await squatter.stdout.readline() == b"65534 bound\n"
        starts.append(asyncio.create_task(ranks[1].start()))
        assert await squatter.stdout.readline() == b"caught\n"
        starts.append(asyncio.create_task(ranks[0].start()))
        assert await squatter.stdout.readline() == b"injected\n"
        # Its frames end the connection of rank 1, with a typed error.
        await until(lambda: starts[0].done() or marker.exists())
        assert not marker.exists()
        assert isinstance(starts[0].exception(), AiogradError)
    finally:
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        for rank in ranks:
            await rank.close(graceful=False)
        squatter.stdin.close()
        await squatter.wait()


# ── files ───────────────────────────────────────────────────────────────────────────────────────


def test_a_planted_rendezvous_file_is_not_believed(shared):
    """S2: its author would be rank 0, and run code in its readers."""
    path = shared / "meet"
    text = '{"addresses": ["unix:/nowhere"], "secret": "%s", "refusal": null}' % ("ab" * 32)
    as_nobody("os.umask(0o077); open(sys.argv[1], 'w').write(sys.argv[2])", path, text)
    assert path.stat().st_uid == NOBODY
    with pytest.raises(AuthError, match="belongs to another user"):
        RendezvousFile.read(str(path))


READERS: dict[str, Callable[[str], Any]] = {
    "rendezvous file": RendezvousFile.read,
    "secret file": read_secret_file,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("plant", ["symlink", "hard link", "mkfifo"])
def test_what_another_user_puts_in_place_of_a_file_is_not_read(shared, reader, plant):
    ours = shared / "ours"
    ours.touch(mode=0o600)
    ours.write_text("a" * 40)
    path = shared / "planted"
    program = {
        "symlink": "os.symlink(sys.argv[1], sys.argv[2])",
        "mkfifo": "os.mkfifo(sys.argv[2], 0o600)",
        "hard link": "open(sys.argv[2], 'w').write('b' * 40)",
    }[plant]
    as_nobody(program, ours, path)
    assert path.lstat().st_uid == NOBODY
    with pytest.raises(AuthError):
        READERS[reader](str(path))


def test_a_link_of_our_own_to_a_private_file_is_followed(shared):
    """As orchestrators mount secrets."""
    ours = shared / "ours"
    ours.touch(mode=0o600)
    ours.write_text("a" * 40)
    (shared / "first").symlink_to("ours")
    (shared / "second").symlink_to(shared / "first")
    assert read_secret_file(str(shared / "second")) == b"a" * 40
    (shared / "round").symlink_to("round")
    with pytest.raises(AuthError, match="symbolic link"):
        read_secret_file(str(shared / "round"))


def test_others_can_neither_enter_the_folder_nor_reach_the_socket_nor_read_the_secret(shared):
    secret = user_secret([shared], 0, os.urandom)
    folder = shared / "aiograd-0"
    path = folder / "w"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o777)  # the folder alone has to keep others out
        tried = as_nobody(
            """
folder = sys.argv[1]
for attempt in (
    lambda: os.listdir(folder),
    lambda: open(folder + "/secret").read(),
    lambda: socket.socket(socket.AF_UNIX).connect(folder + "/w"),
    lambda: os.rename(folder, folder + "2"),
    lambda: os.rmdir(folder),
):
    try:
        print("did it:", attempt())
    except PermissionError as error:
        print("refused")
""",
            folder,
        )
    assert tried.split() == ["refused"] * 5
    assert secret.hex() not in tried


@pytest.mark.parametrize("squat", ["mkdir", "symlink", "file"])
@pytest.mark.deadline(60)
def test_squatting_on_our_folder_does_not_keep_us_from_starting(shared, tmp_path, squat):
    """M6: workers of this user meet nevertheless, and share a secret that others cannot read."""
    program = {
        "mkdir": "os.mkdir(sys.argv[1], 0o777)",
        "symlink": "os.symlink('/tmp', sys.argv[1])",
        "file": "open(sys.argv[1], 'w').write('x')",
    }[squat]
    as_nobody(program, shared / "aiograd-0")
    start = """
import asyncio, sys, aiograd as ag
async def main():
    ranks = [ag.Worker(f"w{i}", rank=i, world_size=2, rendezvous=sys.argv[1]) for i in range(2)]
    await asyncio.gather(*(rank.start() for rank in ranks))
    print(await ranks[1].agent.call("w0", abs, (-7,)))
    await asyncio.gather(*(rank.close() for rank in ranks))
asyncio.run(main())
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    done = subprocess.run(
        [sys.executable, "-c", start, place],
        capture_output=True,
        text=True,
        timeout=40,
        env={**os.environ, "TMPDIR": str(shared), "HOME": str(tmp_path)},
    )
    assert done.stdout == "7\n", done.stderr
    secret = tmp_path / ".aiograd-0" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    if squat == "mkdir":
        assert not list((shared / "aiograd-0").iterdir())
