"""The command line: `aiograd run -n 4 script.py`, `aiograd worker --join host:port`.

The commands that look at a cluster are in `views/commands.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Sequence

from aiograd import __version__
from aiograd.cluster.config import JOIN_TIMEOUT, WorkerPlan, plan_join
from aiograd.cluster.launch import join_cluster, run_ranks
from aiograd.errors import AiogradError
from aiograd.rpc.options import Options
from aiograd.rpc.transport.tls import TLS
from aiograd.views import commands as looking
from aiograd.wire.handshake import VERSION

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.verbose:
        _show_log(given.verbose)
    if given.command == "run":
        program = [given.script, *given.arguments]
        if given.module:
            program = ["-m", *program]
        # Here, once: otherwise each of n ranks would report it, under its own name.
        elif not os.path.exists(given.script):
            parser.error(f"there is no script {given.script}")
        return run_ranks(given.n, program)
    if given.command == "doctor":
        return looking.run(given, Options())
    if given.command in looking.NAMES:
        options = Options(
            secret_file=_secret_files(parser, given.secret_file),
            allow_plaintext=given.allow_plaintext,
            transport=given.transport,
            tls=TLS(given.cert, given.key or given.cert, given.ca) if given.cert else None,
        )
        return looking.run(given, options)
    # One line for what a user can mend: a wrong address, a missing secret, a refused name.
    try:
        return join_cluster(_plan_join(parser, given), given.rejoin)
    except (AiogradError, ValueError) as error:
        print(f"aiograd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the worker has its own handler, as while it reads its secret
        return 128 + signal.SIGINT


def _plan_join(parser: argparse.ArgumentParser, given: argparse.Namespace) -> WorkerPlan:
    """Make the plan of `aiograd worker`."""
    secret, where = None, given.join
    files = _secret_files(parser, given.secret_file)
    if files == "-":
        # Over standard input, as ssh carries it: neither a file nor the process list has it.
        files, secret = None, sys.stdin.buffer.readline().strip()
        if not secret:
            parser.error("--secret-file - wants the secret on the first line of standard input")
    options = Options(
        secret=secret,
        secret_file=files,
        allow_plaintext=given.allow_plaintext,
        transport=given.transport,
        tls=TLS(given.cert, given.key or given.cert, given.ca) if given.cert else None,
        listen=given.listen,
        advertise=given.advertise,
        ports=given.ports,
    )
    labels = dict(label.partition("=")[::2] for label in given.label or ())
    environment = dict(os.environ)
    # A rank in the environment, if any, is that of another process; the secret is meant for us.
    environment.pop("AIOGRAD_RANK", None)
    name = given.name or _own_name()
    return plan_join(where, name, labels, options, given.patience, environment)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aiograd", description="Start workers of an aiograd cluster."
    )
    about = f"aiograd {__version__} (Python {platform.python_version()}, wire version {VERSION})"
    parser.add_argument("--version", action="version", version=about)
    # Before the command and after it. SUPPRESS: else the default of a command replaces what was
    # counted before it.
    log = argparse.ArgumentParser(add_help=False)
    for each, default in ((parser, 0), (log, argparse.SUPPRESS)):
        each.add_argument(
            "-v",
            "--verbose",
            action="count",
            default=default,
            help="log what happens to standard error; twice for every detail",
        )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        parents=[log],
        help="run a script as several ranks on this machine",
        description="Run a script as several ranks on this machine. In it, "
        "`await ag.init_rpc(name)` finds rank, world size and rendezvous by itself.",
    )
    run.add_argument("-n", type=_count, default=2, metavar="N", help="how many ranks (default 2)")
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    worker = commands.add_parser(
        "worker",
        parents=[log],
        help="join a running cluster from this machine",
        description="Join an open cluster, and serve until it is closed.",
    )
    worker.add_argument(
        "--join",
        required=True,
        metavar="PLACE",
        help="HOST:PORT of any member, or file:PATH of a rendezvous file or an invitation",
    )
    worker.add_argument("--name", help="the worker's name (default: host name and process number)")
    worker.add_argument(
        "--secret-file",
        action="append",
        metavar="[PEER=]PATH",
        help="a file with the cluster's secret, - for standard input; or, as often as there are "
        "peers, one for each",
    )
    worker.add_argument(
        "--rejoin", action="store_true", help="join again when the cluster was lost"
    )
    worker.add_argument(
        "--patience",
        type=float,
        default=JOIN_TIMEOUT,
        metavar="SECONDS",
        help="how long to wait for DNS and for the coordinator (default %(default)g)",
    )
    worker.add_argument(
        "--label", action="append", metavar="KEY=VALUE", help="what other members can read of it"
    )
    worker.add_argument(
        "--listen", metavar="PLACE", help="HOST:PORT, an interface or a network to listen at"
    )
    worker.add_argument("--advertise", metavar="NAME:PORT", help="what others are told to dial")
    worker.add_argument(
        "--ports", type=_ports, metavar="FIRST-LAST", help="the range of ports to listen at"
    )
    # One PEM file may hold certificate and key.
    worker.add_argument("--cert", metavar="PATH", help="a certificate for the name, to speak TLS")
    worker.add_argument("--key", metavar="PATH", help="its key (default: in the same file)")
    worker.add_argument("--ca", metavar="PATH", help="the authority that signed the others' ones")
    worker.add_argument("--transport", choices=["auto", "unix", "tcp"], default="auto")
    worker.add_argument(
        "--allow-plaintext",
        action="store_true",
        help="listen beyond this host without TLS; for networks that are yours alone",
    )
    looking.add_parsers(commands, log, _connection())
    return parser


def _connection() -> argparse.ArgumentParser:
    """Give the arguments of commands that look at a cluster: which one, and how to get in."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="where rank 0 listens, or unix:PATH or file:PATH (default: the cluster of this host)",
    )
    parser.add_argument("--pid", help="a process of the cluster, if several run on this host")
    parser.add_argument("--name", help="the name that the secret is for, if there is one per name")
    parser.add_argument(
        "--secret-file", action="append", metavar="[PEER=]PATH", help="the cluster's secret"
    )
    parser.add_argument("--cert", metavar="PATH", help="a certificate for the name, to speak TLS")
    parser.add_argument("--key", metavar="PATH", help="its key (default: in the same file)")
    parser.add_argument("--ca", metavar="PATH", help="the authority that signed the others' ones")
    parser.set_defaults(transport="auto")
    parser.add_argument(
        "--allow-plaintext", action="store_true", help="connect to other hosts without TLS"
    )
    return parser


def _show_log(verbose: int) -> None:
    """Let the log of the library go to standard error: INFO, or DEBUG from the second -v on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Only ours: at DEBUG, asyncio and others have much to say.
    logging.getLogger("aiograd").setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


def _secret_files(
    parser: argparse.ArgumentParser, given: list[str] | None
) -> str | dict[str, str] | None:
    """Parse --secret-file: one PATH for all peers, or PEER=PATH for each."""
    if given is None:
        return None
    pairs = [text.partition("=") for text in given]
    # The name of an existing file may have an equals sign in it.
    if len(given) == 1 and (not pairs[0][1] or os.path.exists(given[0])):
        return given[0]
    files = {name: path for name, _, path in pairs if name and path}
    if len(files) < len(given):
        parser.error("--secret-file takes one PATH, or PEER=PATH once for each peer")
    return files


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return count


def _ports(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        raise argparse.ArgumentTypeError("the first and the last one, as 20000-20100")
    return int(first), int(last)


def _own_name() -> str:
    # Only characters that are valid in a worker's name; the rest of the length is for the number.
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:100]
    return f"{host}-{os.getpid()}"


if __name__ == "__main__":
    sys.exit(main())
