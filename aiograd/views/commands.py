"""The commands that look at a cluster: `aiograd status`, `top`, `stuck`, `stacks`, `logs`, …

    aiograd status                    one table; exit code 1 if a worker is lost or does not answer
    aiograd top                       the same, live; keys: s sorts, q leaves
    aiograd stuck                     who waits for whom; exit code 1 if somebody does
    aiograd stacks [WORKER …]         where tasks and threads are
    aiograd logs [-f] [WORKER …]      what workers have written
    aiograd record 10s -o FILE        what is called for some seconds, as .json or .html
    aiograd dashboard [--port N]      the page of a cluster, until Ctrl-C
    aiograd doctor                    what this machine has, and what is missing

They connect as a guest (`guest`): to the only cluster of this user on this host, to the one of
`--pid`, or to `--join`. Exit code 2: there is no cluster to look at, or it does not let us in.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from aiograd.errors import AiogradError
from aiograd.observe.waits import OLDER, find
from aiograd.rpc.options import Options
from aiograd.views import terminal
from aiograd.views.guest import Guest, connected, find_target

NAMES: Final = frozenset(
    {"status", "top", "stuck", "stacks", "logs", "record", "dashboard", "doctor"}
)
_POLL: Final = 0.5  # seconds between two questions of `logs -f`
_NO_CLUSTER: Final = 2

Command = Callable[[Guest, argparse.Namespace], Awaitable[int]]


def add_parsers(
    commands: Any, log: argparse.ArgumentParser, connection: argparse.ArgumentParser
) -> None:
    """Add the commands to those of `aiograd`; `connection` has the arguments of how to get in."""
    parents = [log, connection]

    def add(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = commands.add_parser(
            name, parents=parents, help=text, description=text[:1].upper() + text[1:] + "."
        )
        return made

    status = add("status", "show the workers of a cluster; exit code 1 if one is lost")
    status.add_argument("--json", action="store_true", help="print the whole snapshot as JSON")
    top = add("top", "show the workers of a cluster and what they do, live")
    top.add_argument("--every", type=float, default=1.0, metavar="SECONDS")
    top.add_argument("--sort", choices=terminal.SORTS, default="rank")
    top.add_argument("--count", type=int, metavar="N", help="print N times, and end")
    stuck = add("stuck", "show who waits for whom: cycles first, then the longest chains")
    stuck.add_argument("--older", type=float, default=OLDER, metavar="SECONDS")
    stacks = add("stacks", "show where the tasks and threads of workers are")
    stacks.add_argument("workers", nargs="*", metavar="WORKER")
    logs = add("logs", "show what workers have written")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what they write")
    logs.add_argument("workers", nargs="*", metavar="WORKER")
    record = add("record", "record what is called on all workers for some time")
    record.add_argument("time", type=duration, metavar="TIME", help="such as 10s, 500ms or 2m")
    record.add_argument(
        "-o", "--output", default="trace.json", metavar="FILE", help=".json (Chrome) or .html"
    )
    dashboard = add("dashboard", "serve the page of a cluster to a browser of this host")
    dashboard.add_argument("--port", type=int, default=0, help="where to listen (default: any)")
    commands.add_parser("doctor", parents=[log], help="show what this machine has and lacks")


def duration(text: str) -> float:
    """Parse "10s", "500ms", "2m" or "10"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 10s, 500ms or 2m")
    return float(match[1]) * {"ms": 1e-3, "m": 60.0, "min": 60.0}.get(match[2] or "s", 1.0)


def run(given: argparse.Namespace, options: Options) -> int:
    """Run one of the commands; gives the exit code."""
    if given.command == "doctor":
        from aiograd.views.doctor import as_lines, examine

        checks = examine()
        _print(as_lines(checks, _paint()))
        return int(any(check.state == "fail" for check in checks))
    command = _COMMANDS[given.command]

    async def work() -> int:
        # In the loop: what is found there is out of date when it is looked at for long.
        target = find_target(given.join, options, os.environ, given.pid)
        async with connected(target, options, given.name) as guest:
            return await command(guest, given)

    try:
        return asyncio.run(work())
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `aiograd status | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AiogradError, OSError, ValueError) as error:
        sys.stderr.write(f"aiograd: {error}\n")
        return _NO_CLUSTER


# ── the commands ────────────────────────────────────────────────────────────────────────────────


async def _status(guest: Guest, given: argparse.Namespace) -> int:
    data = await guest.snapshot()
    if given.json:
        _print([data.to_json(indent=2)])
    else:
        _print([guest.target.label, *terminal.status(data, _paint())])
    return int(bool(data.troubled))


async def _stuck(guest: Guest, given: argparse.Namespace) -> int:
    findings = find(await guest.snapshot(), given.older)
    _print(terminal.stuck(findings, given.older, _paint()))
    return int(bool(findings))


async def _stacks(guest: Guest, given: argparse.Namespace) -> int:
    _print(terminal.stacks(await guest.stacks(given.workers or None)))
    return 0


async def _logs(guest: Guest, given: argparse.Namespace) -> int:
    seen: dict[str, int] = {}
    while True:
        for name, (count, lines) in (await guest.logs(seen)).items():
            if not given.workers or name in given.workers:
                _print([f"[{terminal.clean(name)}] {terminal.clean(line)}" for line in lines])
            seen[name] = count
        if not given.follow:
            missing = [name for name in given.workers if name not in seen]
            if missing:
                sys.stderr.write(f"aiograd: no output of {', '.join(missing)}\n")
            return int(bool(missing))
        await asyncio.sleep(_POLL)


async def _record(guest: Guest, given: argparse.Namespace) -> int:
    from aiograd.views.record import write

    recording = await guest.recording(given.time)
    count = write(recording, given.output)
    _print([f"{count} spans of {len(recording['spans'])} workers in {given.output}"])
    for name, why in recording["silent"].items():
        sys.stderr.write(f"aiograd: {terminal.clean(name)} gave none: {terminal.clean(why)}\n")
    return int(bool(recording["silent"]))


async def _top(guest: Guest, given: argparse.Namespace) -> int:
    rates, sort, shown = terminal.Rates(), given.sort, 0
    live = sys.stdout.isatty() and given.count is None
    with _keys() as pressed:
        while True:
            data = await guest.snapshot()
            size = shutil.get_terminal_size()
            lines = terminal.top(data, rates.update(data), sort, size.lines - 2, _paint())
            head = f"{guest.target.label} · {time.strftime('%H:%M:%S')} · by {sort}"
            if live:
                # The whole screen at once: a part of the last one must not show through.
                sys.stdout.write("\x1b[H\x1b[J")
                head += " · s sorts, q leaves"
            _print([head, *lines])
            shown += 1
            if given.count is not None and shown >= given.count:
                return 0
            until = time.monotonic() + given.every
            while time.monotonic() < until:
                await asyncio.sleep(min(0.05, given.every))
                key = pressed()
                if key == "q":
                    return 0
                if key == "s":
                    sort = terminal.SORTS[(terminal.SORTS.index(sort) + 1) % len(terminal.SORTS)]
                    break


async def _dashboard(guest: Guest, given: argparse.Namespace) -> int:
    from aiograd.views.page import load_dashboard

    try:
        dashboard = load_dashboard()
    except ImportError as error:
        sys.stderr.write(f"aiograd: {error}\n")
        return 1
    async with dashboard.of(guest, port=given.port) as page:
        _print([f"{guest.target.label}: {page.url}"])
        await asyncio.Event().wait()  # until it is interrupted
    return 0


_COMMANDS: Final[dict[str, Command]] = {
    "status": _status,
    "top": _top,
    "stuck": _stuck,
    "stacks": _stacks,
    "logs": _logs,
    "record": _record,
    "dashboard": _dashboard,
}


# ── the terminal ────────────────────────────────────────────────────────────────────────────────


def _paint() -> terminal.Paint:
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return terminal.ansi if colour else terminal.plain


def _print(lines: list[str]) -> None:
    if lines:
        # Lone surrogates, as in a file name of another encoding, cannot be written.
        text = "\n".join(lines).encode(errors="backslashreplace").decode()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Give what returns the key that was pressed, without waiting; nothing without a terminal."""
    try:
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, AttributeError):
        yield lambda: ""
        return
    except termios.error:  # no terminal
        yield lambda: ""
        return

    def pressed() -> str:
        ready, _, _ = select.select([descriptor], [], [], 0)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
