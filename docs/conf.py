"""Sphinx settings. Everything is built offline; notebooks are executed while building."""

from __future__ import annotations

import inspect
import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from nbclient import NotebookClient  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import aiograd  # noqa: E402

project = "aiograd"
author = "The aiograd authors"
copyright = author
version = release = aiograd.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "aiograd"
html_static_path = ["_static"]
html_css_files = ["aiograd.css"]
html_copy_source = False
html_show_sphinx = False
exclude_patterns = ["_build", "conf.py", "operations.py", "pictures/*.py"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
# Kernels warn that what they say on loopback is not encrypted, and the client tells which one runs.
NotebookClient.extra_arguments.default_args = (["--log-level=ERROR"],)
logging.getLogger("traitlets").setLevel(logging.WARNING)

default_role = "literal"  # our docstrings write code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
nitpicky = False


def take_notebooks(app: Any, config: Any) -> None:
    """The notebooks live with the examples; the pages are made from copies."""
    folder = HERE / "notebooks"
    folder.mkdir(exist_ok=True)
    for source in sorted((HERE.parent / "examples" / "notebooks").glob("*.py")):
        copy = folder / source.name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            shutil.copyfile(source, copy)


def list_operations(app: Any, config: Any) -> None:
    """A page of every operation, from the tables themselves."""
    from operations import page as write

    page = HERE / "reference" / "operations.md"
    text = write()
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def as_restructured_text(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Our docstrings are plain prose with indented code, which reStructuredText wants announced."""
    result: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and (not result or not result[-1].strip()):
            language = "pycon" if line.lstrip().startswith(">>>") else "python"
            language = "text" if re.search("[─│▶]", line) else language  # a drawing
            result += [f".. code-block:: {language}", ""]
            inside = True
        elif line.strip() and not indented:
            inside = False
        result.append(line)
    lines[:] = [re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line) for line in result]


def short_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any] | None:
    if signature is None:
        return None
    for long, short in (("~typing.", ""), ("typing.", ""), ("collections.abc.", "")):
        signature = signature.replace(long, short)
    return inspect.cleandoc(signature), returns


def without_overloads(analyze: Any) -> Any:
    """Show the one signature of a function: eight overloads are for checkers, not for readers."""

    def analyzed(self: ModuleAnalyzer) -> None:
        analyze(self)
        self.overloads = {}

    return analyzed


def setup(app: Any) -> None:
    ModuleAnalyzer.analyze = without_overloads(ModuleAnalyzer.analyze)  # type: ignore[method-assign]
    app.connect("config-inited", take_notebooks)
    app.connect("config-inited", list_operations)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("autodoc-process-signature", short_signature)
