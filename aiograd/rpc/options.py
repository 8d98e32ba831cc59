"""`Options`: every setting of a worker, each with its reason.

All checks happen in `__post_init__`, so that a wrong setting raises where it is written, not in the
worker process that uses it. Numbers that no user needs to change are constants beside their code.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from aiograd.rpc.retry import RetryPolicy
from aiograd.rpc.transport.interfaces import check_advertised, parse_listen
from aiograd.rpc.transport.tls import SECRET, TLS
from aiograd.wire.names import check_name, look_alike
from aiograd.wire.secrets import OTHERS, SHORTEST, Secret

_TRANSPORTS = ("auto", "unix", "tcp", "memory")
_LOOPS = ("auto", "asyncio", "uvloop")
_CHOICES = {
    "transport": _TRANSPORTS,
    "loop": _LOOPS,
    "remote_tracebacks": ("caller", "both"),
}
_MODES = ("trusted", "registered", "restricted")
_SECONDS = (
    "timeout",
    "grace",
    "heartbeat",
    "silence",
    "resume",
    "idle",
    "lease",
    "handshake_timeout",
)
_COUNTS = (
    "max_message",
    "max_inflight",
    "outbound_buffer",
    "inbound_budget",
    "partner_memory",
    "partner_links",
    "partner_values",
    "partner_contexts",
    "partner_threads",
    "partner_rate",
    "threads",
)
# Zero switches these off: no grace period, no resumption, no lease. A zero timeout or heartbeat
# could only be a mistake.
_MAY_BE_ZERO = ("grace", "resume", "lease")


def _memory_share() -> int:
    """A quarter of the machine's memory, at most 2 GiB."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 2 << 30
    return min(2 << 30, total // 4)


class FieldDocs:
    """The docstring of a dataclass with those of its fields, for `help()`.

    Python does not keep the strings below fields; they are read from the source when somebody asks.
    """

    def __init__(self, cls: type, example: str) -> None:
        self._own, self._example = inspect.cleandoc(cls.__doc__ or ""), example

    def __get__(self, instance: object, cls: type) -> str:
        parts = [self._own, self._example]
        with contextlib.suppress(OSError, SyntaxError):  # no source, as in a frozen program
            (tree,) = ast.parse(inspect.getsource(cls)).body
            assert isinstance(tree, ast.ClassDef)
            for line, text in itertools.pairwise(tree.body):
                match line, text:
                    case ast.AnnAssign(), ast.Expr(ast.Constant(str(words))):
                        words = textwrap.indent(inspect.cleandoc(words), "    ")
                        parts.append(f"{_shown(line)}\n{words}")
        return "\n\n".join(parts)


def _shown(line: ast.AnnAssign) -> str:
    """Return a field as `timeout = 60.0`; a default that is computed is left to its text."""
    simple = line.value is not None and not isinstance(line.value, ast.Call)
    name = ast.unparse(line.target)
    return f"{name} = {ast.unparse(line.value)}" if simple and line.value else name


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of one worker. Frozen: make another one with `dataclasses.replace`."""

    timeout: float = 60.0
    """Seconds for a call that says nothing else: long enough for real work, short enough that a
    forgotten one ends. `math.inf` for none."""
    grace: float = 5.0
    """Seconds a graceful shutdown waits for others, so that leaving always ends. After a start that
    cannot succeed, rank 0 answers late ranks at `host:port` or `unix:path` for as long."""
    transport: str = "auto"
    """"unix" between processes of one host (twice as fast as TCP), else "tcp"; "memory" in one
    process. Under "tcp" every byte crosses the socket."""
    loop: str = "auto"
    """The loop of worker processes: uvloop where installed, because it is three times as fast."""
    secret: bytes | Mapping[str, bytes] | None = field(default=None, repr=False)
    """What members prove to know; at least 16 bytes. A local cluster makes its own. Or one for each
    name, `{"bank": …, "shop": …}`, which no third worker has to know: it proves the name, and a
    worker without one cannot connect, unless there is one for all others (`"*"`)."""
    secret_file: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None
    """Where to read the secret, so that it is never in the process list; readable by its owner
    only. Or a file for each name."""
    tls: TLS | str | None = None
    """TLS of TCP connections: certificates, or "secret", by the secret alone. None: by the secret
    alone at addresses beyond this host, and none on this host. The same on all workers."""
    allow_plaintext: bool = False
    """No TLS beyond this host, unless there are certificates. Off, because anyone on the path could
    read; what members send is authenticated in any case. The same on all workers."""
    listen: str | None = None
    """Where TCP listens: "0.0.0.0:0", "host:port", an interface ("eth1") or a network
    ("10.0.0.0/8"). By default the address from which the coordinator is reached."""
    advertise: str | None = None
    """What others are told to dial, "name:port", where that is not what listens: behind a port
    forwarding, or in a container. Port 0 is the one that listens."""
    ports: tuple[int, int] | None = None
    """The first and the last port to listen at where none is given, for a firewall that lets a
    range pass."""
    mode: str | Mapping[str, str] = "trusted"
    """What peers may do: "trusted" any function, "registered" exposed ones, "restricted" exposed
    ones and data without pickle. Or a mode for each name, and one for all others:
    `{"bank": "restricted", "*": "trusted"}`."""
    heartbeat: float = 1.0
    """Seconds between heartbeats on a quiet connection, while an answer is awaited over it."""
    silence: float = 5.0
    """Seconds of silence after which a peer is suspect: five lost heartbeats are no coincidence."""
    resume: float = 3.0
    """Seconds in which a broken connection may come back before the peer counts as lost: a network
    that is away for two is not noticed. 0: it is lost at once."""
    idle: float = 60.0
    """Seconds without use after which a connection is closed, unless a reference or context, or the
    coordinator, needs it: so workers that met once cost each other nothing. The next call connects
    again, which takes about a millisecond; rare enough once a minute. `math.inf` to never close."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """How a call of an `@idempotent` function is tried again when its worker is lost or overloaded:
    five attempts, spread over the 3 s that a restart takes. `RetryPolicy(attempts=1)` for none."""
    lease: float = 10.0
    """Seconds an owner keeps the references of a worker that is gone, in case it comes back."""
    handshake_timeout: float = 5.0
    """Seconds a peer may hold a connection without authenticating."""
    max_message: int = 1 << 30
    """Bytes of one message: larger ones are a mistake far more often than a tensor."""
    max_inflight: int = 1024
    """Calls per peer that may be in flight; later ones wait here, so that no peer is flooded."""
    outbound_buffer: int = 64 << 20
    """Bytes that may wait for a slow peer before its calls are deferred (back-pressure)."""
    inbound_budget: int = field(default_factory=_memory_share)
    """Bytes of messages that may be arriving at once, reserved before memory is allocated: a
    quarter of the machine, at most 2 GiB."""
    partner_memory: int = field(default_factory=lambda: _memory_share() // 4)
    """Bytes of messages that arrive from one restricted peer, of arguments of its calls that have
    not ended, and of those that stay here in values and contexts: a quarter of `inbound_budget`, so
    that no partner keeps the others out."""
    partner_links: int = 8
    """Connections that restricted peers of one name may have: each start of a worker has one, and
    those of its last starts may not be over yet."""
    partner_values: int = 65_536
    """Values that are kept here for one restricted peer."""
    partner_contexts: int = 1024
    """Autograd contexts that one restricted peer may have open here."""
    partner_threads: int = 16
    """Threads that compute for one restricted peer at a time, a quarter of `threads`; later calls
    of it wait, and those of others do not. Never all of `threads`, if there are several."""
    partner_rate: int = 64 << 10
    """Bytes per second at which a large message of a restricted peer must arrive, at least: a
    slower one is refused after 30 s, because memory is reserved for all of it."""
    threads: int = 64
    """Threads for plain functions; those blocked in a nested call do not count."""
    strict_leaks: bool = False
    """Raise at shutdown when references were leaked, instead of logging where they were made."""
    remote_tracebacks: str = "caller"
    """Who shows the traceback of a call that failed: "caller", the worker that awaits it, once; or
    "both", so that the worker that it failed on logs it as well, for logs kept host by host."""

    def __post_init__(self) -> None:
        for name in _SECONDS:
            _check_seconds(name, getattr(self, name), zero=name in _MAY_BE_ZERO)
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        # Exactly bool: a string such as "no" would be taken for yes.
        for name in ("allow_plaintext", "strict_leaks"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name} is True or False, not {getattr(self, name)!r}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {allowed}, not {getattr(self, name)!r}")
        self._check_mode()
        if not isinstance(self.retry, RetryPolicy):
            raise TypeError(f"retry is an aiograd.RetryPolicy, not {type(self.retry).__name__}")
        if isinstance(self.tls, str):
            if self.tls != SECRET:
                raise ValueError(f'tls is an aiograd.TLS or "secret", not {self.tls!r}')
            if self.allow_plaintext:
                raise ValueError('tls="secret" and allow_plaintext=True: which of the two?')
        elif self.tls is not None and not isinstance(self.tls, TLS):
            raise TypeError(f'tls is an aiograd.TLS or "secret", not {type(self.tls).__name__}')
        self._check_secrets()
        if self.listen is not None:
            parse_listen(self.listen)
        if self.advertise is not None:
            check_advertised(self.advertise)
        if self.ports is not None:
            object.__setattr__(self, "ports", _check_ports(self.ports))

    def _check_secrets(self) -> None:
        for what in ("secret", "secret_file"):
            value = getattr(self, what)
            if isinstance(value, Mapping):
                if not value:
                    raise ValueError(f"{what} by name needs at least one name")
                for name in value.keys() - {OTHERS}:
                    check_name(name)
                _check_distinct(what, value)
                # A copy, also below: the options are frozen, the caller's mapping is not.
                object.__setattr__(self, what, dict(value))
        # As `Secret`, so that neither a repr nor a traceback shows it.
        if isinstance(self.secret, dict):
            found = {name: _as_secret(secret) for name, secret in self.secret.items()}
            object.__setattr__(self, "secret", found)
        elif self.secret is not None:
            object.__setattr__(self, "secret", _as_secret(self.secret))

    def _check_mode(self) -> None:
        modes = self.mode
        if isinstance(modes, Mapping):
            modes = dict(modes)
            object.__setattr__(self, "mode", modes)
            if OTHERS not in modes:
                raise ValueError('modes by name need one for all others: {"bank": …, "*": …}')
            for name in modes.keys() - {OTHERS}:
                check_name(name)
            _check_distinct("mode", modes)
            # Early, where the options are written. What is not given here may still come from the
            # environment; `check_proof_of_names` decides when it is known.
            secrets = self.secret if self.secret is not None else self.secret_file
            if secrets is not None or isinstance(self.tls, TLS):
                self.check_proof_of_names(secrets)
        for mode in modes.values() if isinstance(modes, dict) else (modes,):
            if mode not in _MODES:
                raise ValueError(f"mode is one of {_MODES}, not {mode!r}")

    def check_proof_of_names(self, secrets: Any) -> None:
        """ValueError if there are modes by name and nothing proves the name that a peer claims.

        `secrets`: the secret, or what is given for each name.
        """
        # Else a partner that shares the one secret claims a trusted name, and is trusted.
        if isinstance(self.mode, str) or (isinstance(self.tls, TLS) and self.tls.mutual):
            return
        if isinstance(secrets, Mapping) and self.mode.keys() - {OTHERS} <= secrets.keys():
            return
        raise ValueError(
            "modes by name need TLS(mutual=True), or a secret for each of the names: "
            "only that or a certificate proves a name"
        )

    def mode_for(self, name: str) -> str:
        """Return what the worker of this name may do here."""
        if isinstance(self.mode, str):
            return self.mode
        return self.mode.get(name, self.mode[OTHERS])

    @property
    def restriction(self) -> tuple[bool, tuple[str, ...]]:
        """Whether other workers exchange plain data only, and for which names the opposite holds.

        It is part of `PeerInfo`, so that every member knows which codec a peer expects.
        """
        if isinstance(self.mode, str):
            return self.mode == "restricted", ()
        rest = self.mode[OTHERS] == "restricted"
        others = [name for name in self.mode if (self.mode[name] == "restricted") != rest]
        return rest, tuple(sorted(others))

    def __reduce__(self) -> Any:
        # Without the secret: pickled options travel in messages and files. A worker process gets
        # the secret through a pipe of its own, or from a secret file.
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "secret"}
        return _rebuild, (values,)


Options.__doc__ = FieldDocs(  # type: ignore[assignment]  # read as a string
    Options,
    """\
    >>> options = ag.Options(timeout=10.0, threads=8)
    >>> async with ag.LocalCluster(1, options=options, processes=False) as cluster:
    ...     print(ag.current_worker().options.timeout)
    10.0""",
)


def _rebuild(values: dict[str, Any]) -> Options:
    return Options(**values)


def _check_distinct(what: str, by_name: Mapping[str, Any]) -> None:
    names = sorted(by_name)
    for i, name in enumerate(names):
        for other in names[:i]:
            if look_alike(other, name):  # one of them is a slip, and its owner has another mode
                raise ValueError(f"{what} by name: {other!r} and {name!r} look alike")


def _as_secret(value: Any) -> Secret:
    if not isinstance(value, bytes):
        raise TypeError(f"secret is bytes, not {type(value).__name__}")
    if len(value) < SHORTEST:
        raise ValueError(f"a secret has at least {SHORTEST} bytes")
    return Secret(value)


def _check_seconds(name: str, value: Any, zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of seconds, not {type(value).__name__}")
    if math.isnan(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be positive, not {value!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def _check_ports(ports: Any) -> tuple[int, int]:
    fits = isinstance(ports, tuple | list) and len(ports) == 2
    if not fits or any(type(port) is not int for port in ports):
        raise TypeError(f"ports is the first and the last one, (20000, 20100), not {ports!r}")
    first, last = ports
    if not 0 < first <= last <= 65535:
        raise ValueError(f"ports are a range of 1 to 65535, not {first} to {last}")
    return first, last


def check_timeout(timeout: Any) -> float:
    """Return a caller's `timeout=` as a float: positive seconds, `math.inf` for none."""
    _check_seconds("timeout", timeout)
    return float(timeout)
