"""An `ssh` that runs its command on this machine, and a real server of our own on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["SSHD", "fake_ssh", "needs_sshd", "sshd"]

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin")
FAKE = """#!{python}
# Takes what OpenSSH's client takes, and runs the command in a shell of this machine.
import os, sys
words, asked = sys.argv[1:], False
open({calls!r}, "a").write(repr(words) + chr(10))
while words and words[0].startswith("-"):
    word = words.pop(0)
    asked |= word == "-G"
    if word == "--":
        break
    if word in ("-o", "-p", "-i", "-F"):
        words.pop(0)
host, *command = words
name = host.rpartition("@")[2]
if asked:
    print("user somebody")
    print("hostname", "127.0.0.1" if name.startswith("near") else name)
    sys.exit(0)
os.chdir("/")
{behaviour}
os.execvp("sh", ["sh", "-c", *command])
"""


def fake_ssh(folder: Path, behaviour: str = "") -> str:
    """Write a command that looks like ssh; hosts called near… are this machine."""
    path = folder / "fake-ssh"
    path.write_text(
        FAKE.format(python=sys.executable, calls=str(folder / "calls"), behaviour=behaviour)
    )
    path.chmod(stat.S_IRWXU)
    return str(path)


def needs_sshd() -> str:
    """Say what a real server of ssh lacks on this machine; "" if nothing."""
    if SSHD is None or shutil.which("ssh") is None:
        return "there is no OpenSSH server or client on this machine"
    return ""


@contextlib.contextmanager
def sshd(
    folder: Path, address: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Run a server with keys of its own; gives the options that a client needs for it."""
    assert SSHD is not None
    folder.chmod(0o700)  # else the server does not trust what is in it
    for name in ("host", "user"):
        path = str(folder / name)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    (folder / "authorized").write_text((folder / "user.pub").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kind, key, *_ = (folder / "host.pub").read_text().split()
    (folder / "known").write_text(f"[{address}]:{port} {kind} {key}\n")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress {address}\nHostKey {folder}/host\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it drops its privileges
    command = [*prefix, SSHD, "-D", "-e", "-f", str(folder / "config")]
    # Into a file: sessions that outlive the server would keep a pipe open.
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, stderr=log)
    try:
        end = time.monotonic() + 10
        while "Server listening" not in (folder / "log").read_text():
            waiting = server.poll() is None and time.monotonic() < end
            assert waiting, (folder / "log").read_text()
            time.sleep(0.01)  # there is nothing to await
        yield [
            *("-F", "none", "-p", str(port), "-i", str(folder / "user")),
            *("-o", f"UserKnownHostsFile={folder}/known", "-o", "IdentitiesOnly=yes"),
        ]
    finally:
        server.terminate()
        server.wait()
