"""README and documentation pages: their programs run, their links lead to files."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
        found = place.exists() or any(place.with_suffix(end).exists() for end in (".md", ".py"))
        assert found, f"{path.name} links to {target}"


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
