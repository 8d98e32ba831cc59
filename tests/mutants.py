"""Mutation testing of the modules that must not be wrong: `make mutants`.

    python tests/mutants.py [MODULE …] [--sample 80]

Each mutant is the module with one comparison, constant, condition or statement changed; its tests
run in a fork that has loaded everything but the library. Mutants that survive are printed. Some are
equivalent to the original and need no test: a sentinel below all numbers that becomes smaller
still, a counter that starts elsewhere, a set that is filtered twice by the same rule, a fraction
that is not reduced.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.machinery
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 - loaded once, for all forks
import numpy as np  # noqa: F401
import pytest
import uvloop  # noqa: F401

ROOT = Path(__file__).parents[1]
MODULES = {  # module → the tests that should kill its mutants
    "wire/handshake.py": ["wire/test_handshake.py", "wire/test_secrets.py"],
    "wire/framing.py": ["wire/test_framing.py"],
    "wire/session.py": ["wire/test_session.py"],
    "rref/refcount/owner.py": [
        "rref/refcount/test_owner.py",
        "rref/refcount/test_protocol.py",
        "rref/refcount/test_protocol_losses.py",
        "rref/refcount/test_protocol_random.py",
    ],
    "rref/refcount/protocol.py": [
        "rref/refcount/test_protocol.py",
        "rref/refcount/test_protocol_losses.py",
        "rref/refcount/test_protocol_random.py",
    ],
    "dist/backward/state.py": [
        "dist/backward/test_state.py",
        "dist/backward/test_state_deferred.py",
    ],
}
TIMEOUT = 60  # seconds; a mutant whose tests take longer counts as killed
OTHER: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
DROPPED = ast.Assign | ast.AugAssign | ast.Expr | ast.Raise | ast.Delete


def changes(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the mutations of one node: kind, replacement."""

    def changed(**fields: Any) -> Any:
        new = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        yield "comparison", changed(ops=[OTHER[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in OTHER:
        yield "operator", changed(op=OTHER[type(node.op)]())
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "constant", changed(value=not node.value if node.value is True else node.value + 1)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", changed(test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, DROPPED) and not isinstance(getattr(node, "value", None), ast.Constant):
        yield "statement", ast.Pass()


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Return line, kind and source of each mutant.

    Only inside functions: module constants are part of the wire format, and both sides share them.
    """
    found = []
    tree = ast.parse(source)
    inside = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    for parent in dict.fromkeys(n for f in inside for s in f.body for n in [f, *ast.walk(s)]):
        for name, value in list(ast.iter_fields(parent)):
            if name in ("returns", "annotation", "args", "decorator_list") and parent in inside:
                continue
            several = isinstance(value, list)
            for i, node in enumerate(value if several else [value]):
                for kind, other in changes(node):
                    place = value if several else vars(parent)
                    place[i if several else name] = other
                    text = ast.unparse(ast.fix_missing_locations(tree))
                    found.append((node.lineno, kind, text))
                    place[i if several else name] = node
    return found


def survives(path: Path, text: str, tests: list[str]) -> bool:
    """Run the tests in a fork in which the module has this source."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    signal.alarm(TIMEOUT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    loader = importlib.machinery.SourceFileLoader
    original = loader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        mine = self.get_filename(fullname) == str(path)
        return compile(text, str(path), "exec") if mine else original(self, fullname)

    loader.get_code = get_code  # type: ignore[method-assign]
    loaded = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis was imported before
    os._exit(int(pytest.main([*tests, "-x", *loaded, "-p", "no:cacheprovider", "-p", "no:xdist"])))


def try_out(module: str, sample: int) -> None:
    """Print the surviving mutants of a sample, and the share that was killed."""
    path, tests = ROOT / "aiograd" / module, [f"tests/{each}" for each in MODULES[module]]
    source = path.read_text()
    assert survives(path, source, tests), f"the tests of {module} fail as it is"
    every = mutants(source)
    some = sorted(random.Random(0).sample(every, min(sample, len(every))))
    left = [each for each in some if survives(path, each[2], tests)]
    lines = source.splitlines()
    said = [f"  {line}: {kind}: {lines[line - 1].strip()}" for line, kind, _ in left]
    share = 1 - len(left) / len(some)
    said.append(f"{module}: {share:.0%} of {len(some)} killed ({len(every)} in all)")
    sys.stdout.write("\n".join(said) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(MODULES), metavar="MODULE")
    parser.add_argument("--sample", type=int, default=80)
    args = parser.parse_args()
    os.chdir(ROOT)
    for module in args.modules:
        try_out(module, args.sample)


if __name__ == "__main__":
    main()
