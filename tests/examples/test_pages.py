"""README and documentation pages: their programs run, their links lead to files."""

from __future__ import annotations

import ast
import functools
import json
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import aiograd
from aiograd.testing.simulator.planted_bugs import BUGS

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md")]
GENERATED = "operations.md"  # made by `make docs`, so it may or may not be there
FOLDERS = ("docs", "docs/reference")
PAGES = [*TOP, *sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))]
PAGES = [page for page in PAGES if page.name != GENERATED]
FILE = re.compile(r"`([a-z_/]+/?[\w/]*\.(?:py|md))`")
PLACE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")  # a class, method or function of a file
MODULE = re.compile(r"\b(aiograd(?:\.\w+)+)")
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITION = (*FUNCTION, ast.ClassDef)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)\)")


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_program_in_the_readme_and_index_runs(name: str, tmp_path: Path) -> None:
    script = tmp_path / "first_minute.py"
    script.write_text(blocks(ROOT / name)[0])
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "(784, 10)" in done.stdout
    assert not done.stderr


def test_the_table_of_contents_names_every_page_and_nothing_else() -> None:
    trees = re.findall(r"```{toctree}\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)
    named = {line for tree in trees for line in tree.splitlines() if line and line[0] != ":"}
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix(""))
        for page in (ROOT / "docs").glob("*.md")
    }
    pages |= {f"reference/{page.stem}" for page in (ROOT / "docs/reference").glob("*.md")}
    pages |= {f"notebooks/{page.stem}" for page in (ROOT / "examples/notebooks").glob("*.py")}
    assert named | {"index", "reference/operations"} == pages | {"reference/operations"}


def test_the_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    text = (ROOT / "README.md").read_text()
    assert [name for name in extras if f"| `{name}` |" not in text] == []


def test_the_program_on_the_page_about_concurrency_runs(tmp_path: Path) -> None:
    script = tmp_path / "counter.py"
    (program,) = [b for b in blocks(ROOT / "docs" / "concurrency.md") if "asyncio.run(" in b]
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1000\n", done.stderr


# From Python 3.13, `python -m asyncio` cannot read a statement of two lines from a pipe. This does
# what that console does with each statement.
CONSOLE = """
import ast, asyncio, inspect, sys, types

async def main():
    for statement in ast.parse(sys.stdin.read()).body:
        alone, flags = ast.Interactive([statement]), ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(alone, "<stdin>", "single", flags=flags)
        if inspect.iscoroutine(result := types.FunctionType(code, globals())()):
            await result

asyncio.run(main())
"""


def test_the_pieces_of_the_tour_run_when_pasted_in_order(tmp_path: Path) -> None:
    pieces = "\n".join(blocks(ROOT / "docs" / "tour.md"))
    piped = sys.version_info < (3, 13)
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"] if piped else [sys.executable, "-c", CONSOLE],
        input=pieces_for_a_console(pieces) if piped else pieces,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert not re.search("^Traceback", done.stderr, re.MULTILINE), done.stderr
    for shown in ("raised by <lambda>() on worker1", "499500", "[0, 1, 4, 9, 16, 25, 36, 49]"):
        assert shown in done.stdout
    *_, loss = re.findall(r"^(?:>>> |\.\.\. )*([\d.e-]+)$", done.stdout, re.MULTILINE)
    assert float(loss) < 0.05  # of the model after its training


def pieces_for_a_console(source: str) -> str:
    """Each statement as it is typed: on its own, compound ones ended by an empty line."""
    lines = source.splitlines()
    typed = []
    for node in ast.parse(f"async def page():\n{indented(source)}").body[0].body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        piece = lines[first - 2 : node.end_lineno - 1]
        typed.append("\n".join(line for line in piece if line.strip()) + "\n\n")
    return "".join(typed)


def indented(source: str) -> str:
    return "".join(f"    {line}\n" for line in source.splitlines())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_on_pages_compile(path: Path) -> None:
    assert len(blocks(path)) == path.read_text().count("```python")
    broken = [block for block in blocks(path) if not is_python(block)]
    assert broken == []


def is_python(block: str) -> bool:
    body = "".join(f"    {line}\n" for line in block.splitlines())
    try:
        compile(f"async def page():\n{body}", "page", "exec")
    except SyntaxError:
        return False
    return True


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_on_pages_lead_to_files(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        place = path.parent / target
        made = {"notebooks": ROOT / "examples" / "notebooks"}  # copied when the pages are built
        if target.startswith("notebooks/"):
            place = made["notebooks"] / target.removeprefix("notebooks/")
        if place == ROOT / "docs" / "reference" / "operations":  # written when the pages are built
            continue
        found = place.exists() or any(place.with_suffix(end).exists() for end in (".md", ".py"))
        assert found, f"{path.name} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_and_modules_named_on_pages_exist(path: Path) -> None:
    text = path.read_text()
    names = [name for name in FILE.findall(text) if "*" not in name]
    roots = (ROOT, ROOT / "aiograd", ROOT / "examples")
    assert [name for name in names if not any((root / name).exists() for root in roots)] == []
    assert [name for name in MODULE.findall(text) if not is_module_or_attribute(name)] == []


def test_places_named_in_the_architecture_exist() -> None:
    places = PLACE.findall(ARCHITECTURE.read_text())
    assert len(places) > 50
    assert [f"{file}: {name}" for file, name in places if name not in definitions(file)] == []


def test_planted_bugs_named_in_the_architecture_exist() -> None:
    named = re.findall(r"planted bugs? (\w+(?:, \w+)*)", ARCHITECTURE.read_text())
    assert {name for names in named for name in names.split(", ")} - set(BUGS) == set()
    assert len(named) > 5


@functools.cache
def definitions(file: str) -> set[str]:
    """The classes, functions and constants of a file, and methods as `Class.method`."""
    path = ROOT / file if file.startswith("tests/") else ROOT / "aiograd" / file
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, DEFINITION):
            found.add(node.name)
            inside = node.body if isinstance(node, ast.ClassDef) else ()
            found |= {f"{node.name}.{each.name}" for each in inside if isinstance(each, FUNCTION)}
    return found


def is_module_or_attribute(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        # What needs torch cannot be imported here: a file of the module, or of what it is in.
        place = ROOT / name.replace(".", "/")
        files = (place.with_suffix(".py"), place.parent.with_suffix(".py"), place / "__init__.py")
        return name.startswith(("aiograd.compat.", "aiograd.torch")) and any(
            file.exists() for file in files
        )
    return True


def test_every_example_is_listed_in_the_docs() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in (ROOT / "examples").glob("[0-9]*.py"):
        assert f"`{path.name}`" in page


def test_the_figures_of_the_readme_match_the_stored_ones() -> None:
    done = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    kept = json.loads((ROOT / "benchmarks" / "figures.json").read_text())
    page = (ROOT / "README.md").read_text()
    assert done["placed"](page, done["table"](kept)) == page
    assert {metric for _, metric, _, _ in done["ROWS"]} == set(kept["figures"])


def test_actions_of_the_workflows_are_pinned_to_a_commit() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for action in re.findall(r"uses: (\S+)", workflow.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), f"{workflow.name}: {action}"


def test_the_version_is_the_same_everywhere() -> None:
    assert f"version: {aiograd.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version = "{aiograd.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_tests_on_the_page_about_pytest_pass(tmp_path: Path) -> None:
    (tmp_path / "test_page.py").write_text("\n\n".join(blocks(ROOT / "docs" / "pytest.md")))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "2 passed" in done.stdout, done.stdout


def test_the_programs_on_the_page_about_reproducibility_run() -> None:
    code = "\n".join(blocks(ROOT / "docs" / "reproducibility.md"))
    lines = "".join(f"    {line}\n" for line in code.replace("(4)", "(1)").splitlines())
    program = f"import asyncio\nasync def main():\n{lines}asyncio.run(main())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
