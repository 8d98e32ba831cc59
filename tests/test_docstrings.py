"""Every public name has an example in its docstring, and every example does what it says.

Examples are written as in an interactive session, with `await` at the top level as in a notebook.
They run on one small cluster in this process (a driver, worker0 and worker1), each docstring with
names of its own beside `ag`, `np` and `asyncio`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import aiograd as ag

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SPACES = {
    "ag": ag,
    "ag.nn": ag.nn,
    "ag.optim": ag.optim,
    "ag.testing": ag.testing,
    "ag.viz": ag.viz,
}
NAMESPACES = {"autograd", "cluster", "errors", "fft", "linalg", "nn", "optim", "sparse", "testing"}
NAMESPACES |= {"viz", "functional", "init"}
# numpy's operations keep numpy's text, which has examples of its own.
NUMPYS = {name for name in ag.autograd.NAMES if hasattr(np, name) or hasattr(np.linalg, name)}
NUMPYS |= set(ag.autograd.DTYPES)
ALIASES = {name for name, op in ag.autograd.NAMES.items() if op.__name__ != name}


def public() -> Iterator[tuple[str, Any]]:
    """The names that need an example, with what they stand for."""
    for space, module in SPACES.items():
        for name in module.__all__:
            if name not in NAMESPACES and (space != "ag" or name not in NUMPYS | ALIASES):
                yield f"{space}.{name}", getattr(module, name)


def documented() -> Iterator[tuple[str, str]]:
    """Docstrings with examples: of public names, and of the methods of public classes."""
    for name, thing in public():
        yield name, inspect.getdoc(thing) or ""
        if inspect.isclass(thing):
            for key, member in vars(thing).items():
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if not key.startswith("_") and getattr(member, "__doc__", None):
                    yield f"{name}.{key}", inspect.getdoc(member) or ""
    for name, function in inspect.getmembers(ag.boundary, inspect.isfunction):
        if function.__module__ == ag.boundary.__name__:
            yield f"ag.boundary.{name}", inspect.getdoc(function) or ""


def examples(text: str) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(text)


@pytest.mark.parametrize("name", [name for name, _ in public()])
def test_a_public_name_has_an_example(name: str) -> None:
    thing = dict(public())[name]
    text = thing.__doc__ if isinstance(thing, ModuleType) else inspect.getdoc(thing)
    assert ">>>" in (text or ""), f"{name} needs an example in its docstring"


# Methods with numpy's text have numpy's examples, which know nothing of `ag`.
CASES = [
    pytest.param(text, id=name) for name, text in documented() if re.search(r">>> .*\bag\.", text)
]


@pytest.mark.parametrize("text", CASES)
async def test_the_example_does_what_it_says(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"ag": ag, "np": np, "asyncio": asyncio, "__name__": "__main__"}
    # What joins a cluster by itself must not be in one already.
    alone = "init_rpc(" in text
    async with contextlib.nullcontext() if alone else ag.LocalCluster(2, processes=False):
        try:
            for example in examples(text):
                found = await run(example.source, names)
                if not doctest.OutputChecker().check_output(example.want, found, FLAGS):
                    pytest.fail(f">>> {example.source}expected: {example.want}found: {found}")
        finally:
            ag.manual_seed(None)
            names.clear()


async def run(source: str, names: dict[str, Any]) -> str:
    """What an interactive session would show for a piece of source."""
    shown = io.StringIO()
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    hook, sys.displayhook = sys.displayhook, lambda v: v is None or shown.write(f"{v!r}\n")
    try:
        with contextlib.redirect_stdout(shown):
            code = compile(source, "<docstring>", "single", flags=flags)
            result = eval(code, names)
            if inspect.iscoroutine(result):
                await result
    except Exception as error:
        shown.write("Traceback (most recent call last):\n    ...\n")
        shown.write(traceback.format_exception_only(error)[0])
    finally:
        sys.displayhook = hook
    return shown.getvalue()


def test_every_option_is_explained_in_help() -> None:
    text = inspect.getdoc(ag.Options) or ""
    for name in inspect.signature(ag.Options).parameters:
        assert f"\n{name}" in text, f"help(ag.Options) does not explain {name}"
