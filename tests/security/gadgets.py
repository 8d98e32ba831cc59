"""Pickles that would create a file `marker` if anything unpickled them."""

from __future__ import annotations

import pickle
from typing import Any

RUN = "open('marker','w').close()"
SHELL = "touch marker"

# module, name, arguments
CALLS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("os", "system", (SHELL,)),
    ("posix", "system", (SHELL,)),
    ("nt", "system", (SHELL,)),
    ("os", "popen", (SHELL,)),
    ("os", "mkdir", ("marker",)),
    ("os", "makedirs", ("marker",)),
    ("os", "mkfifo", ("marker",)),
    ("os", "mknod", ("marker",)),
    ("os", "symlink", ("/", "marker")),
    ("os", "open", ("marker", 0o101)),
    ("os", "execvp", ("touch", ["touch", "marker"])),
    ("os", "spawnlp", (1, "touch", "touch", "marker")),
    ("os", "posix_spawn", ("/usr/bin/touch", ["touch", "marker"], {})),
    ("pty", "spawn", (["touch", "marker"],)),
    ("subprocess", "call", (["touch", "marker"],)),
    ("subprocess", "run", (["touch", "marker"],)),
    ("subprocess", "Popen", (["touch", "marker"],)),
    ("subprocess", "check_call", (["touch", "marker"],)),
    ("subprocess", "check_output", (["touch", "marker"],)),
    ("subprocess", "getoutput", (SHELL,)),
    ("subprocess", "getstatusoutput", (SHELL,)),
    ("builtins", "exec", (RUN,)),
    ("builtins", "eval", (RUN,)),
    ("builtins", "open", ("marker", "w")),
    ("builtins", "compile", (RUN, "x", "exec")),
    ("builtins", "__import__", ("antigravity",)),
    ("builtins", "getattr", ("x", "__class__")),
    ("__builtin__", "eval", (RUN,)),
    ("io", "open", ("marker", "w")),
    ("_io", "open", ("marker", "w")),
    ("_io", "FileIO", ("marker", "w")),
    ("codecs", "open", ("marker", "w")),
    ("gzip", "open", ("marker", "w")),
    ("bz2", "open", ("marker", "w")),
    ("lzma", "open", ("marker", "w")),
    ("zipfile", "ZipFile", ("marker", "w")),
    ("tarfile", "open", ("marker", "w")),
    ("shelve", "open", ("marker",)),
    ("dbm.dumb", "open", ("marker", "c")),
    ("sqlite3", "connect", ("marker",)),
    ("logging", "FileHandler", ("marker",)),
    ("logging.config", "fileConfig", ("marker",)),
    ("shutil", "copyfile", ("/etc/hostname", "marker")),
    ("shutil", "copytree", ("/etc/ssl", "marker")),
    ("pathlib", "Path.touch", ("marker",)),
    ("tempfile", "mkstemp", ("", "marker", ".")),
    ("tempfile", "mkdtemp", ("", "marker", ".")),
    ("timeit", "timeit", (RUN,)),
    ("timeit", "main", (["-n1", RUN],)),
    ("cProfile", "run", (RUN,)),
    ("profile", "run", (RUN,)),
    ("pdb", "run", (RUN,)),
    ("bdb", "Bdb.run", (RUN,)),
    ("trace", "Trace.run", (RUN,)),
    ("code", "interact", (RUN,)),
    ("codeop", "compile_command", (RUN,)),
    ("doctest", "debug_script", (RUN,)),
    ("runpy", "run_path", ("marker.py",)),
    ("runpy", "_run_code", (RUN, {})),
    ("importlib", "import_module", ("this",)),
    ("importlib._bootstrap", "_load", ("x",)),
    ("pickle", "loads", (b"cos\nsystem\n(S'touch marker'\ntR.",)),
    ("cloudpickle", "loads", (b"cos\nsystem\n(S'touch marker'\ntR.",)),
    ("marshal", "loads", (b"\xe3",)),
    ("numpy", "load", ("marker",)),
    ("numpy", "save", ("marker", 1)),
    ("numpy", "memmap", ("marker", "uint8", "w+", 0, (1,))),
    ("numpy.testing._private.utils", "runstring", (RUN, {})),
    ("numpy.f2py.crackfortran", "getlincoef", (RUN, [])),
    ("multiprocessing.util", "spawnv_passfds", (b"/usr/bin/touch", [b"touch", b"marker"], [])),
    ("asyncio.unix_events", "_UnixSubprocessTransport._start", (1,)),
    ("webbrowser", "open", ("file:///marker",)),
    ("urllib.request", "urlretrieve", ("file:///etc/hostname", "marker")),
    ("ctypes", "CDLL", ("libc.so.6",)),
    ("operator", "methodcaller", ("touch",)),
    ("operator", "attrgetter", ("__class__.__base__",)),
    ("functools", "partial", ("x",)),
    ("types", "FunctionType", (1, {})),
    ("aiograd.wire.codec", "_arrive", ("rref", b"")),
    ("aiograd.cluster.api", "current_worker", ()),
    ("pip", "main", (["--version"],)),
    ("torch.hub", "load", ("x",)),
    ("sys", "exit", (3,)),
    ("os", "_exit", (3,)),
    ("os", "kill", (0, 15)),
    ("faulthandler", "_sigsegv", ()),
]


def pickled(module: str, name: str, arguments: tuple[Any, ...], protocol: int = 0) -> bytes:
    """A pickle that calls `module.name(*arguments)` when it is loaded."""
    inside = pickle.dumps(arguments, protocol)
    start = b"" if protocol < 2 else inside[:2]
    middle = inside[len(start) : -1]
    if protocol >= 4 and middle[:1] == b"\x95":
        middle = middle[9:]  # the length of a frame, which has changed
    if protocol >= 4:
        parts = (module.encode(), name.encode())
        look_up = b"".join(b"\x8c" + bytes([len(part)]) + part for part in parts) + b"\x93"
    else:
        look_up = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
    return start + look_up + middle + b"R."
