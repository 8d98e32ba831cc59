"""The picture of who may import whom, in ARCHITECTURE.md, is true."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "aiograd"

# layer → the layers it may import; `errors`, `_html` and `_progress` are open to all
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_html": set(),
    "_progress": set(),
    "autograd": set(),
    "wire": set(),
    "rpc": {"wire"},
    "rref": {"wire", "rpc"},
    "dist": {"autograd", "wire", "rpc", "rref", "viz"},
    "viz": {"autograd"},
    "nn": {"autograd", "rpc", "rref", "dist"},
    "optim": {"autograd", "rpc", "rref", "dist"},
    "cluster": {"autograd", "wire", "rpc", "rref", "dist", "nn", "optim", "viz"},
    "testing": {"autograd", "wire", "rpc", "rref", "dist", "nn", "optim", "cluster", "viz"},
}
PURE = {"autograd", "wire", "errors", "_html", "_progress"}
IMPURE = {"asyncio", "socket", "threading", "ssl", "selectors", "uvloop", "subprocess"}
MODULES = [
    *sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT),
    ROOT / "errors.py",
    ROOT / "_html.py",
    ROOT / "_progress.py",
]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            if node.module == "aiograd":
                found |= {f"aiograd.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards_only(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = MAY_IMPORT[layer] | {layer, "errors", "_html", "_progress"}
    for name in imports(path):
        if name.startswith("aiograd."):
            assert name.split(".")[1] in allowed, f"{layer} must not import {name}"
        elif name == "aiograd":
            continue  # its names were looked at one by one
        elif layer in PURE:
            assert name.split(".")[0] not in IMPURE, f"{layer} is pure and must not import {name}"
