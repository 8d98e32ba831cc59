"""The pictures of who may import whom, in ARCHITECTURE.md and in the docstring of `rpc`, are true.

Imports for type checkers count as any others: a reader has to follow them, too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "aiograd"

# layer → the layers it may import; `errors`, `_frames`, `_html` and `_progress` are open to all
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_html": set(),
    "_frames": set(),
    "_progress": set(),
    "autograd": set(),
    "wire": set(),
    "rpc": {"wire"},
    "rref": {"wire", "rpc"},
    "dist": {"autograd", "wire", "rpc", "rref", "viz"},
    "viz": {"autograd"},
    "torch": {"autograd", "wire", "rpc", "rref", "dist", "nn", "optim"},
    "compat": {"autograd", "rpc", "rref", "dist", "torch", "cluster"},
    "nn": {"autograd", "rpc", "rref", "dist"},
    "optim": {"autograd", "rpc", "rref", "dist"},
    "observe": {"autograd", "wire", "rpc", "rref", "dist"},
    "cluster": {"autograd", "wire", "rpc", "rref", "dist", "nn", "optim", "viz", "observe"},
    "views": {"autograd", "wire", "rpc", "rref", "dist", "viz", "observe", "cluster"},
    "testing": {"autograd", "wire", "rpc", "rref", "dist", "nn", "optim", "cluster", "viz"},
}
PURE = {"autograd", "wire", "errors", "_frames", "_html", "_progress"}
# Parts of other layers that decide without I/O; the layers around them carry out what they decide.
PURE_MODULES = {
    "rpc.caller.window",
    "rpc.link.inbox",
    "rpc.link.transfer_watch",
    "rref.refcount.audit",
    "rref.refcount.owner",
    "rref.refcount.protocol",
    "rref.refcount.user",
    "dist.backward.codec",
    "dist.backward.credit",
    "dist.backward.loops",
    "dist.backward.outcomes",
    "dist.backward.plan",
    "dist.backward.state",
    "cluster.membership.roster",
    "cluster.membership.succession",
    "cluster.membership.termination",
}
IMPURE = {"asyncio", "socket", "threading", "ssl", "selectors", "uvloop", "subprocess"}
ASYNC = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
MODULES = [
    *sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT),
    ROOT / "errors.py",
    ROOT / "_html.py",
    ROOT / "_progress.py",
]

# Inside `rpc`, from top to bottom. A module imports modules of its own level and of levels below.
# A folder means all of its modules that no other level names.
RPC_LEVELS: tuple[set[str], ...] = (
    {"api", "balance", "notify", "progress"},
    {"agent"},
    {"link"},
    {"caller", "callee"},
    {"channel"},
    # `link.inbound_budget` and `link.ledger` know no link: they count, and limits reached, too.
    {"observe", "options", "retry", "link.inbound_budget", "link.ledger"},
    {"envelope", "future", "scope"},
    # `link.send` knows frames and no link, `callee.functions` knows functions and no callee.
    {"link.send", "callee.functions", "callee.exposure", "affinity", "directory"}
    | {"extension", "plain_exceptions", "remote_exceptions", "runtime", "transport"},
)
# Upward imports that are left. Remove what is not needed any more: the set can only shrink.
RPC_UPWARD = {("link.links", "agent")}

LARGEST_CYCLE = 5  # modules that import each other: more cannot be understood one by one


def name_of(path: Path) -> str:
    parts = ("aiograd", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in ROOT.rglob("*.py")}


def imports(path: Path) -> set[str]:
    """The modules that a file imports; of ours, the module and not the package it is taken from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            module = node.module or ""
            for name in node.names:
                full = f"{module}.{name.name}"
                found.add(full if full in NAMES or module == "aiograd" else module)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards_only(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = MAY_IMPORT[layer] | {layer, "errors", "_frames", "_html", "_progress"}
    for name in imports(path):
        if name.startswith("aiograd."):
            assert name.split(".")[1] in allowed, f"{layer} must not import {name}"
        elif layer in PURE:
            assert name.split(".")[0] not in IMPURE, f"{layer} is pure and must not import {name}"


@pytest.mark.parametrize("module", sorted(PURE_MODULES))
def test_modules_that_decide_do_no_io(module: str) -> None:
    path = ROOT / (module.replace(".", "/") + ".py")
    assert {name.split(".")[0] for name in imports(path)} & IMPURE == set()
    assert not any(isinstance(node, ASYNC) for node in ast.walk(ast.parse(path.read_text())))


# ── inside rpc ──────────────────────────────────────────────────────────────────────────────────


def rpc_modules() -> dict[str, set[str]]:
    """Each module of `rpc` by its name in there, with those it imports."""
    prefix = "aiograd.rpc."
    return {
        name_of(path).removeprefix(prefix): {
            name.removeprefix(prefix) for name in imports(path) if name.startswith(prefix)
        }
        for path in (ROOT / "rpc").rglob("*.py")
        if path.name != "__init__.py"
    }


def level(module: str) -> int:
    """The level of a module of `rpc`: its own, or that of its folder."""
    for name in (module, module.split(".")[0]):
        for number, names in enumerate(RPC_LEVELS):
            if name in names:
                return number
    raise AssertionError(f"RPC_LEVELS does not name {module}")


def upward_imports() -> set[tuple[str, str]]:
    return {
        (module, other)
        for module, others in rpc_modules().items()
        for other in others
        if level(other) < level(module)
    }


def test_imports_inside_rpc_go_downwards_only() -> None:
    assert upward_imports() - RPC_UPWARD == set()


def test_upward_imports_inside_rpc_are_listed_only_while_they_exist() -> None:
    assert RPC_UPWARD - upward_imports() == set()


def test_levels_inside_rpc_name_existing_modules() -> None:
    known = set(rpc_modules()) | {module.split(".")[0] for module in rpc_modules()}
    assert {name for names in RPC_LEVELS for name in names} - known == set()


# ── cycles ──────────────────────────────────────────────────────────────────────────────────────


def cycles(edges: dict[str, set[str]]) -> list[set[str]]:
    """The groups of nodes that reach each other (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    for root in edges:
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        work = [(root, iter(edges[root]))]
        while work:
            node, rest = work[-1]
            for to in rest:
                if to not in index:
                    index[to] = low[to] = len(index)
                    stack.append(to)
                    work.append((to, iter(edges[to])))
                    break
                if to in stack:
                    low[node] = min(low[node], index[to])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    found.append(set(stack[at:]))
                    del stack[at:]
    return [group for group in found if len(group) > 1]


def test_few_modules_import_each_other() -> None:
    edges = {name_of(path): imports(path) & NAMES - {name_of(path)} for path in ROOT.rglob("*.py")}
    groups = [sorted(group) for group in cycles(edges)]
    assert [group for group in groups if len(group) > LARGEST_CYCLE] == []


def test_groups_of_modules_that_import_each_other_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a", "e"}}
    assert sorted(map(sorted, cycles(edges))) == [["a", "b", "c"], ["d", "e"]]
