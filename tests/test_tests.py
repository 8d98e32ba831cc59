"""Every test asserts something, itself or through a helper of the suite."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
Helper = tuple[Path, Function | ast.ClassDef]
ASSERTIONS = {"raises", "warns", "fail", "gradcheck", "gradgradcheck"}


class Suite:
    """All functions of the suite, and which of them assert something."""

    def __init__(self) -> None:
        self.files = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
        self._imported = {path: set(_imported(tree)) for path, tree in self.files.items()}
        self._helpers: dict[str, list[Helper]] = {}
        for path, tree in self.files.items():
            for node in ast.walk(tree):
                if isinstance(node, Function | ast.ClassDef) and not is_test(node):
                    self._helpers.setdefault(node.name, []).append((path, node))
        self._asserting: set[ast.AST] = set()
        grown = True
        while grown:  # a fixed point: helpers may assert through other helpers
            before = len(self._asserting)
            for helpers in self._helpers.values():
                self._asserting |= {node for path, node in helpers if self.asserts(path, node)}
            grown = len(self._asserting) > before

    def asserts(self, path: Path, node: ast.AST) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Assert):
                return True
            if isinstance(part, ast.Name | ast.Attribute):
                name = part.id if isinstance(part, ast.Name) else part.attr
                if name in ASSERTIONS or name.startswith("assert_"):
                    return True
                if any(helper in self._asserting for helper in self._meant(path, name)):
                    return True
        return False

    def _meant(self, path: Path, name: str) -> Iterator[ast.AST]:
        """The helpers that a name in this file may mean."""
        for home, node in self._helpers.get(name, ()):
            if (
                home == path
                or name in self._imported[path]
                or (home.name == "conftest.py" and home.parent in path.parents)
            ):
                yield node


def is_test(node: ast.AST) -> bool:
    return isinstance(node, Function) and node.name.startswith("test_")


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            yield from (alias.name for alias in node.names)


def test_every_test_asserts_something():
    suite = Suite()
    tests = [(p, n) for p, tree in suite.files.items() for n in ast.walk(tree) if is_test(n)]
    assert len(tests) > 1000
    idle = [(path, node) for path, node in tests if not suite.asserts(path, node)]
    assert [f"{path.relative_to(ROOT)}:{node.lineno} {node.name}" for path, node in idle] == []
