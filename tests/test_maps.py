"""The docstring of every package lists the modules that are in it, and no others.

A map line is indented and begins with names, joined by `·` or commas; two spaces or more separate
them from the description:

    receive           dispatch by kind, ordering, duplicates
    caller/           calls this worker makes to one peer
    network · inproc  connections
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "aiograd"
PACKAGES = sorted(path.parent for path in ROOT.rglob("__init__.py"))
NAME = re.compile(r"\w+/?")

# Packages whose docstring has no map yet. Remove a package when its map is complete: the set can
# only shrink.
TODO: set[str] = set()


def label(package: Path) -> str:
    return package.relative_to(ROOT).as_posix() if package != ROOT else "aiograd"


def modules(package: Path) -> set[str]:
    """The modules of a package, and its subpackages with a slash; `__main__` needs no line."""
    files = {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    return files | {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}


def listed(docstring: str) -> set[str]:
    """The names that the map lines of a docstring begin with."""
    found: set[str] = set()
    for line in docstring.splitlines()[1:]:
        first = re.split(r"\s{2,}", line.strip())[0]
        names = re.split(r"\s*[·,]\s*", first)
        if line.startswith("    ") and all(NAME.fullmatch(name) for name in names):
            found |= set(names)
    return found


def misses(package: Path) -> tuple[set[str], set[str]]:
    """Modules without a line, and lines without a module."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) or ""
    return modules(package) - listed(text), listed(text) - modules(package)


@pytest.mark.parametrize("package", [p for p in PACKAGES if label(p) not in TODO], ids=label)
def test_the_docstring_of_a_package_lists_its_modules(package: Path) -> None:
    unlisted, unknown = misses(package)
    assert not unlisted, f"add these modules to the docstring: {sorted(unlisted)}"
    assert not unknown, f"the docstring lists modules that do not exist: {sorted(unknown)}"


def test_todo_names_only_packages_without_a_complete_map() -> None:
    incomplete = {label(package) for package in PACKAGES if any(misses(package))}
    assert incomplete >= TODO, f"remove these from TODO: {sorted(TODO - incomplete)}"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("    receive    dispatch by kind", {"receive"}),
        ("    caller/    calls to one peer", {"caller/"}),
        ("    tls · tls_stream    encryption", {"tls", "tls_stream"}),
        ("    plan, schedule    what a seed means", {"plan", "schedule"}),
        ("    python -m aiograd.testing.soak 900", set()),
        ("A sentence  of prose", set()),
    ],
)
def test_map_lines_are_told_from_other_lines(line: str, names: set[str]) -> None:
    assert listed(f"A package.\n\n{line}\n") == names


def test_security_names_tests_that_exist() -> None:
    text = (ROOT.parent / "SECURITY.md").read_text()
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", text))
    files = (ROOT.parent / "tests").rglob("test_*.py")
    found = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert len(named) > 30
    assert named - found == set()
