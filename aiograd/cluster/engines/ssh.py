"""`SSHCluster`: workers on hosts that the system's `ssh` reaches.

One `ssh` per worker, which starts a Python there. Its standard input carries the secret and stays
open as a lifeline, so neither a command line nor an environment nor a file has the secret, and the
worker ends when this process does, however it ends.

    driver                                       host
    ssh -T host "exec python -c BOOT" ─────────▶ a shell says that the login is over; BOOT imports
    check versions ◀──────────── hello ───────── stdout: process, Python, aiograd, numpy
    plan with invitation ──────── stdin ───────▶ `worker_main.main` joins the driver directly
    cluster.logs ◀──────────── stdout, stderr ── what it prints
    kill: one byte; death: end of file ────────▶ it ends

Users' own configuration of ssh holds: aliases, keys, agents, jump hosts. Only `ssh` itself is used;
messages between workers go directly, not through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from aiograd.cluster.cluster import Cluster, StartedWorker
from aiograd.cluster.config import JOIN_TIMEOUT, THREAD_VARIABLES, WorkerPlan, check_count
from aiograd.cluster.engines.engine import EngineCluster, EngineHosts
from aiograd.cluster.joining.invitation import check_versions, own_versions
from aiograd.cluster.processes.spawn import (
    Child,
    OutputLog,
    describe_exit,
    forward_lines,
    plan_bytes,
)
from aiograd.cluster.processes.worker_main import KILL
from aiograd.cluster.worker import run_to_completion
from aiograd.errors import RpcError
from aiograd.rpc.options import Options
from aiograd.rpc.transport.interfaces import locality
from aiograd.rpc.transport.network import is_loopback

__all__ = ["SSHCluster"]

_log = logging.getLogger("aiograd.cluster")

# Logins at one host that are under way at the same time. OpenSSH's server drops connections at
# random once 10 of all users have not logged in yet (MaxStartups).
LOGINS: Final = 4
# Seconds that a worker has to obey the kill, before its ssh is ended. `Cluster.close` promises to
# end within a second after its timeout, and waits for half of it before it kills.
KILL_GRACE: Final = 0.4
LOOKUP_TIMEOUT: Final = 5.0  # seconds for ssh to say which address a host has
SHOWN_LINES: Final = 5  # of what ssh said, in the error
FAILURE_LINES: Final = 20  # of what a worker said that did not join
LOGIN: Final = "aiograd-login"  # what the shell of the host says first
MARK: Final = "aiograd-worker"  # the first word of the hello
NO_COMMAND: Final = (126, 127)  # exit codes of a shell that cannot run the command
SSH_FAILED: Final = 255  # exit code of ssh itself

# What the far Python runs. It has to work under every version, to say which one it is. Without
# single quotes and backslashes: shells do not agree on these.
BOOT: Final = """
import sys, os, json
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
for name in THREADS:
    os.environ.setdefault(name, str(max(1, cores // SHARE)))
told = dict(pid=os.getpid(), python="%d.%d.%d" % sys.version_info[:3], executable=sys.executable)
try:
    import aiograd
    told["aiograd"] = aiograd.__version__
    import numpy
    told["numpy"] = numpy.__version__
    from aiograd.cluster.processes.worker_main import main
except Exception as error:
    told["error"] = "%s: %s" % (type(error).__name__, error)
sys.stdout.write("MARK %s" % json.dumps(told) + chr(10))
sys.stdout.flush()
if "error" in told:
    sys.exit(1)
main()
"""

# What ssh says, and what to do about it.
CURES: Final = (
    (
        "permission denied",
        "let `ssh {host} true` work without a password: `ssh-copy-id {host}`, "
        'an agent, or ssh_options=["-i", KEY]',
    ),
    (
        "host key verification failed",
        "run `ssh {host}` once by hand and confirm its key, or mend ~/.ssh/known_hosts",
    ),
    ("could not resolve hostname", "mend the name, or give it a HostName in ~/.ssh/config"),
    (
        "connection refused|timed out|no route to host|network is unreachable",
        "is it up, does its ssh server run, and does a firewall let you pass? "
        '(another port: ssh_options=["-p", PORT])',
    ),
)


class SSHCluster(EngineCluster):
    """Workers `worker0 … worker{n-1}` on other hosts by ssh, and this process as `driver`.

    `hosts` are what `ssh` takes, each with the number of workers it has room for: "hostA",
    "me@hostB*4", "ssh://hostC:2222". `ssh HOST true` has to work without a password, and every
    host needs the same minor version of Python and aiograd.

    - `n` workers are started, in the order of the hosts; by default as many as there is room for.
    - `python` is the program there, or its words: `["env", "PYTHONPATH=/shared", "python3"]`. By
      default that of this process where a host has the same path, else `python3`.
    - `ssh_options` are words for `ssh`: `["-p", "2222", "-i", "key"]`; `command` replaces `ssh`.
    - `patience` bounds the start, in seconds. RpcError names the host that failed, and the cure.

        async with ag.cluster.SSHCluster(["hostA", "hostB*4"]) as cluster:
            await cluster["worker0"].call(f, 1)
    """

    def __init__(
        self,
        hosts: Sequence[str],
        n: int | None = None,
        *,
        python: str | Sequence[str] | None = None,
        ssh_options: Sequence[str] = (),
        command: str | Sequence[str] = "ssh",
        options: Options | None = None,
        patience: float = JOIN_TIMEOUT,
    ) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options should be an ag.Options, not {type(options).__name__}")
        if isinstance(ssh_options, str):
            raise TypeError(f'ssh_options are words, as ["-p", "2222"], not {ssh_options!r}')
        if n is not None:
            check_count(n)
        options = options or Options()
        rooms = parse_hosts(hosts)
        login = Login(_words(command, "command"), tuple(ssh_options), python_words(python))
        far = SSHHosts(rooms, login, options, patience)
        super().__init__(far, far.room if n is None else n, options, patience)


# ── what to run ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Room:
    """One host, and how many workers it has room for."""

    host: str
    workers: int


def parse_hosts(hosts: Sequence[str]) -> list[Room]:
    """Read "host" and "host*4"; one that is listed twice has room for all of them."""
    if isinstance(hosts, str) or not isinstance(hosts, Iterable):
        raise TypeError(f'hosts are a list of names, as ["hostA", "hostB*4"], not {hosts!r}')
    found: dict[str, int] = {}
    for text in hosts:
        if not isinstance(text, str):
            raise TypeError(f"a host is a text, not {type(text).__name__}")
        host, star, count = text.partition("*")
        # One that begins with a dash would be read by ssh as an option, and could run anything.
        if not re.fullmatch(r"[^\s-]\S*", host) or (
            star and not re.fullmatch(r"0*[1-9]\d*", count)
        ):
            raise ValueError(f'{text!r} is no host: write "name", "user@name" or "name*4"')
        found[host] = found.get(host, 0) + int(count or 1)
    if not found:
        raise ValueError("a cluster needs at least one host")
    return [Room(host, workers) for host, workers in found.items()]


def _words(given: str | Sequence[str], what: str) -> tuple[str, ...]:
    words = (given,) if isinstance(given, str) else tuple(given)
    if not words or not all(isinstance(each, str) and each for each in words):
        raise ValueError(f"{what} is a program, or its words, not {given!r}")
    return words


def python_words(python: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Check the words of a Python at the far end; None stays None."""
    return None if python is None else _words(python, "python")


@dataclass(frozen=True, slots=True)
class Login:
    """How to start a Python on a host."""

    program: tuple[str, ...]
    options: tuple[str, ...]
    python: tuple[str, ...] | None  # None: see `remote_command`

    def command(self, room: Room, patience: float) -> list[str]:
        """Return the command that starts a worker there."""
        # Of several values of an option ssh takes the first: the user's come before ours. Never a
        # question for a password: nobody could answer it. No shared connection: what ends one
        # worker must not end another one.
        return [
            *self.program,
            *self.options,
            *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_seconds(patience)}"),
            *("-o", "ControlPath=none", "-o", "ServerAliveInterval=15", "--", room.host),
            remote_command(self.python, room.workers),
        ]

    @property
    def shown_python(self) -> str:
        """The Python there, for people."""
        return " ".join(self.python) if self.python else f"{sys.executable} or python3"


def remote_command(python: Sequence[str] | None, share: int) -> str:
    """Return the line for the shell of a host on which `share` workers divide the cores."""
    code = BOOT.replace("THREADS", json.dumps(THREAD_VARIABLES)).replace("SHARE", str(share))
    code = shlex.quote(f"exec({code.replace('MARK', MARK)!r})")
    if python is None:
        # Hosts of one site often share their file system.
        own = shlex.quote(sys.executable)
        line = f'p={own}; [ -x "$p" ] || p=python3; exec "$p" -c {code}'
    else:
        line = f"exec {' '.join(map(_quote, python))} -c {code}"
    # By `sh`: the user's own shell may be another kind.
    return f"exec sh -c {shlex.quote(f'echo {LOGIN}; {line}')}"


def _quote(word: str) -> str:
    # Quotes would keep the far shell from finding its home folder.
    return f'"$HOME"/{shlex.quote(word[2:])}' if word.startswith("~/") else shlex.quote(word)


def _seconds(patience: float) -> int:
    return max(1, math.ceil(min(patience, 1e6)))


def ssh_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Give ssh the environment of this process, without a secret that it might send along."""
    return {name: value for name, value in environment.items() if name != "AIOGRAD_SECRET"}


# ── what came of it ─────────────────────────────────────────────────────────────────────────────


def explain_failure(host: str, code: int, said: str, python: str) -> str:
    """Say why no worker was started on a host, and what to do about it."""
    shown = f"; it said:\n{said}" if said else ""
    if code in NO_COMMAND:
        return (
            f"{host} cannot run {python}: install Python there, or give "
            f'python="/path/to/python"{shown}'
        )
    if code == SSH_FAILED:
        for pattern, cure in CURES:
            if re.search(pattern, said, re.IGNORECASE):
                return f"ssh cannot log in at {host}: {cure.format(host=host)}{shown}"
        return f"ssh failed for {host}: does `ssh {host} true` work?{shown}"
    return f"Python did not start on {host} ({describe_exit(code)}): mend python={python!r}{shown}"


def check_hello(host: str, told: dict[str, Any]) -> str | None:
    """Say what does not fit in the hello of a host, and the cure; None if all fits."""
    python = told.get("executable") or "python3"
    who = f"{host} ({python})"
    # The version of Python first: under another one an import may fail for any reason.
    for package in ("python", "aiograd", "numpy"):
        if (why := check_versions({package: told.get(package, "")}, who)) is not None:
            return f"{why}, or give another one by python="
    if "error" in told:
        wanted = f"aiograd=={own_versions()['aiograd']}"
        return (
            f"{who} cannot import aiograd ({told['error']}): `{python} -m pip install {wanted}` "
            "there, or give another one by python="
        )
    return None


class EndedEarlyError(Exception):
    """An ssh has ended before the far Python said hello."""


class SSHWorker:
    """One start of one worker on a host, behind an `ssh`."""

    log: OutputLog

    def __init__(self, plan: WorkerPlan, host: str, command: Sequence[str]) -> None:
        self.plan = plan
        self.host = host
        self.pid: int | None = None  # on its host
        self.logged_in = asyncio.Event()  # or failed to
        self.failure: RpcError | None = None  # for a cluster that waits until it has joined
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        try:
            self._child = Child(plan.name, command, ssh_environment(os.environ), self._take_lines)
        except OSError as error:
            raise RpcError(
                f"cannot run {command[0]}: {error.strerror}; install OpenSSH's client, or "
                "give command="
            ) from error
        self.log: OutputLog = self._child.log
        self.ended: asyncio.Future[int] = self._child.exited
        self.ended.add_done_callback(self._say_end)
        self.ended.add_done_callback(lambda _: self.logged_in.set())

    def _say_end(self, ended: asyncio.Future[int]) -> None:
        """Note on which host a worker was that failed, and what to do."""
        code = ended.result()
        if code <= 0 or self.pid is None:
            return
        why = ": it was killed there, or the connection of ssh broke" if code == SSH_FAILED else ""
        if "nobody answered at" in self.log.tail(1):
            why = (
                ": it cannot dial the driver; let its firewall pass, or give "
                "Options(listen=..., advertise=..., ports=...)"
            )
        said = self.log.tail(FAILURE_LINES)
        text = f"{self.plan.name} on {self.host} ended ({describe_exit(code)}){why}"
        self.failure = RpcError(f"{text}; it said:\n{said}")
        self.log.add(text)

    def _take_lines(self, stream: str, lines: list[str]) -> None:
        if stream == "stdout" and not self._hello.done():
            lines = [shown for line in lines if (shown := self._greet(line)) is not None]
        if lines:
            forward_lines(self.plan.name, stream, lines)

    def _greet(self, line: str) -> str | None:
        """Take a line of the login or of the hello; gives what is left to be shown of it."""
        # What the shell of a login prints may stand before it on its line.
        before, login, _ = line.partition(LOGIN)
        if login:
            self.logged_in.set()
            return before or None
        before, mark, text = line.partition(f"{MARK} ")
        if mark and not self._hello.done():
            with contextlib.suppress(ValueError):
                told = json.loads(text)
                if isinstance(told, dict):
                    self.pid = told["pid"] if isinstance(told.get("pid"), int) else None
                    self._hello.set_result(told)
                    return before or None
        return line

    async def hello(self) -> dict[str, Any]:
        """Wait until the far Python has said which one it is; EndedEarlyError if it never will."""
        waits: list[asyncio.Future[Any]] = [self._hello, self.ended]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._hello.done():
            raise EndedEarlyError
        return self._hello.result()

    def send_plan(self, plan: WorkerPlan) -> None:
        """Send the plan, and with it the secret, to a far end that has said hello."""
        self.plan = plan
        self._child.send(plan_bytes(plan))

    def kill(self) -> None:
        """Kill the worker on its host; end `ssh` if that does not come true soon."""
        if self.ended.done():
            return
        if self.pid is None:
            self._child.kill()  # the far end finds its standard input closed
            return
        self._child.send(KILL)
        later = self._loop.call_later(KILL_GRACE, self._child.kill)
        self.ended.add_done_callback(lambda _: later.cancel())


class SSHHosts(EngineHosts):
    """Hosts that `ssh` reaches."""

    kind = "by ssh"

    def __init__(
        self, rooms: Sequence[Room], login: Login, options: Options, patience: float
    ) -> None:
        super().__init__(options, patience)
        self._rooms, self._login = list(rooms), login
        self._taken: dict[str, Room] = {}  # by name of the worker; it keeps its host
        self._logins = {room.host: asyncio.Semaphore(LOGINS) for room in rooms}

    @property
    def room(self) -> int:
        """How many workers the hosts have room for."""
        return sum(room.workers for room in self._rooms)

    async def count(self) -> int:
        """Return how many workers the hosts have room for."""
        return self.room

    async def nodes(self) -> Sequence[tuple[str, str]]:
        """Give the names of the hosts; loopback ones have the locality of this host."""
        names = await asyncio.gather(*(self._address(room.host) for room in self._rooms))
        return [(name, locality() if is_loopback(name) else "") for name in names]

    async def _address(self, host: str) -> str:
        """Ask ssh which name or address a host has for it: users have aliases."""
        words = [*self._login.program, *self._login.options, "-G", "--", host]
        environment = ssh_environment(os.environ)
        with contextlib.suppress(OSError):  # the start says so
            asked = Child(f"ssh-{host}", words, environment, lambda stream, lines: None)
            asked.release()
            try:
                async with asyncio.timeout(LOOKUP_TIMEOUT):
                    await asked.wait()
            except TimeoutError:
                pass
            finally:
                asked.kill()
                await run_to_completion(asked.wait())
            if found := re.search(r"^hostname (\S+)$", str(asked.log), re.MULTILINE):
                return found[1]
        return host.rpartition("@")[2]  # a program that knows no -G

    async def start(
        self, cluster: Cluster, places: Sequence[tuple[str, int]]
    ) -> Sequence[StartedWorker]:
        """Log in for each place; returns when every far Python has said hello and got its plan."""
        self.attach(cluster)
        rooms = self._assign(cluster, [name for name, _ in places])
        deadline = asyncio.get_running_loop().time() + self.patience
        starts: list[SSHWorker] = []
        tasks = [
            asyncio.ensure_future(self._start(cluster, name, rank, room, deadline, starts))
            for (name, rank), room in zip(places, rooms, strict=True)
        ]
        try:
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()  # raises the first failure, in the order of places
            return starts
        except BaseException:
            await run_to_completion(_abandon(tasks, starts))
            raise

    def _assign(self, cluster: Cluster, names: Sequence[str]) -> list[Room]:
        """Give each worker the host that it had, else the first one with room."""
        for gone in [each for each in self._taken if each not in cluster and each not in names]:
            del self._taken[gone]
        rooms = []
        for name in names:
            if name not in self._taken:
                used = list(self._taken.values())
                free = [room for room in self._rooms if used.count(room) < room.workers]
                if not free:
                    raise RpcError(
                        f"no room is left for {name}: the hosts have room for {self.room} workers; "
                        'list more hosts, or more workers on one, as "hostB*4"'
                    )
                self._taken[name] = free[0]
            rooms.append(self._taken[name])
        return rooms

    async def _start(
        self,
        cluster: Cluster,
        name: str,
        rank: int,
        room: Room,
        deadline: float,
        starts: list[SSHWorker],
    ) -> None:
        loop, host = asyncio.get_running_loop(), room.host
        plan = WorkerPlan(
            name=name,
            rank=rank,
            options=self.options,
            labels=(f"ssh.host={host}",),
            background=True,
        )
        start: SSHWorker | None = None
        try:
            async with asyncio.timeout_at(deadline):
                async with self._logins[host]:
                    start = SSHWorker(plan, host, self._login.command(room, self.patience))
                    starts.append(start)
                    await start.logged_in.wait()
                told = await start.hello()
        except TimeoutError:
            said = start.log.tail(SHOWN_LINES) if start is not None else ""
            raise RpcError(
                f"{host} did not start a worker within {self.patience:g} s: does "
                f"`ssh {host} true` work?" + (f" It said:\n{said}" if said else "")
            ) from None
        except EndedEarlyError:
            assert start is not None
            said, code = start.log.tail(SHOWN_LINES), start.ended.result()
            raise RpcError(explain_failure(host, code, said, self._login.shown_python)) from None
        if (why := check_hello(host, told)) is not None:
            raise RpcError(why)
        _log.info("%s runs on %s as process %s", name, host, start.pid)
        # Made now: while hosts were asked, members may have come.
        start.send_plan(
            replace(
                plan,
                invitation=cluster.driver.invitation(),
                join_timeout=max(deadline - loop.time(), 1.0),
            )
        )


async def _abandon(tasks: Sequence[asyncio.Future[None]], starts: Sequence[SSHWorker]) -> None:
    """Leave nothing behind of a start that failed."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for start in starts:
        start.kill()
    for start in starts:
        await start.ended
