"""The page of operations has every operation once, with a sentence."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "operations.py"))
ENTRY = re.compile(r"```\{py:function\} aiograd\.([\w.]+)\(.*\)\n(.*)\n```")


def test_every_operation_has_one_entry_with_a_sentence():
    entries = ENTRY.findall(PAGE["page"]())
    names = [name for name, _ in entries]
    assert len(names) == len(set(names))
    assert {*ag.autograd.MAKERS, *ag.autograd.NAMES} <= set(names)
    assert {f"linalg.{name}" for name in ag.linalg.__all__} <= set(names)
    poor = [name for name, text in entries if not re.match(r"`?\w[\w-]*\W+\w", text)]
    assert poor == []


def test_most_entries_lead_to_an_explanation_elsewhere():
    entries = ENTRY.findall(PAGE["page"]())
    linked = [name for name, text in entries if re.search(r"\]\(https://", text)]
    assert len(linked) > 0.85 * len(entries)
    assert "tanh" in linked
    assert "relu" in linked


def numpys_sentence(function: Any) -> str:
    """Return the first sentence after the signature: numpy changes it from version to version."""
    parts = inspect.getdoc(function).split("\n\n")
    return next(part for part in parts if not part.startswith(f"{function.__name__}("))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tanh", numpys_sentence(np.tanh)),
        ("cat", f"Another name of `concatenate`: {numpys_sentence(np.concatenate)}"),
        ("softmax", "Make numbers along an axis positive, with a sum of 1."),
        ("zeros", "Make a tensor of zeros."),
    ],
)
def test_the_sentence_is_the_first_one_of_the_docstring(name: str, words: str):
    assert dict(ENTRY.findall(PAGE["page"]()))[name].startswith(words)


def test_operations_stand_with_their_kind():
    sections = dict(PAGE["sections"]())
    assert "Others" not in sections
    assert "tanh" in sections["Arithmetic and functions, element by element"]
    assert "cat" in sections["Joining and splitting"]
