"""Stubs say what the tables have; operations and methods show their parameters."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.tensor import Tensor

HERE = Path(__file__).parent


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("stubs", HERE / "stubs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stubs_are_what_the_tables_have() -> None:
    pytest.importorskip("ruff")
    made = generator()
    written = (made.FOLDER / "operations.pyi").read_text().split("\n")[0]
    if written != made.HEADER.strip():
        pytest.skip(f"numpy {np.__version__} has other parameters than the one of the stubs")
    for path, text in made.stubs().items():
        assert path.read_text() == text, f"{path.name} is not up to date: run `make stubs`"


def test_the_stubs_name_every_operation() -> None:
    # Whatever numpy is installed: a new operation needs `make stubs`.
    stub = (generator().FOLDER / "operations.pyi").read_text()
    missing = [name for name in ag.autograd.NAMES if f"def {name}(" not in stub]
    assert missing == [], "run `make stubs`"


def test_what_can_be_done_with_a_tensor_is_attached_to_its_base() -> None:
    # `methods.pyi` is written from the base; checkers would not see what is attached to Tensor.
    own = {name for name, value in vars(Tensor).items() if callable(value) and name[0] != "_"}
    declared = Path(inspect.getfile(Tensor)).read_text()
    assert [name for name in own if f"def {name}(" not in declared] == []


@pytest.mark.parametrize("name", sorted(ag.autograd.NAMES))
def test_every_operation_shows_its_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(ag, name)).parameters
    assert parameters
    assert "given" not in parameters


def test_a_signature_holds_what_a_gradient_knows_and_torchs_spellings() -> None:
    assert str(inspect.signature(ag.tanh)) == "(x, /, out=None, *, dtype=None)"
    shown = inspect.signature(ag.sum)
    assert list(shown.parameters) == "a axis dtype out keepdims dim keepdim".split()
    assert shown.parameters["keepdims"].default is False
    # Torch means something else by it, and no rule knows `where`.
    assert {"dim", "where"}.isdisjoint(inspect.signature(ag.max).parameters)
    # Behind a parameter that was left out, others can only be given by name.
    assert inspect.signature(ag.std).parameters["ddof"].kind is inspect.Parameter.KEYWORD_ONLY
    assert next(iter(inspect.signature(ag.ones(2).sum).parameters)) == "axis"
    cube = ag.op("cube", lambda a, scale=1: scale * a**3, lambda g, y, a, scale=1: g)
    assert str(inspect.signature(cube)) == "(a, scale=1)"


@pytest.mark.parametrize("name", sorted(name for name in vars(Methods) if name[0] != "_"))
def test_every_method_of_tensor_shows_its_parameters(name: str) -> None:
    found = getattr(Tensor, name)
    assert isinstance(found, property) or "kwargs" not in inspect.signature(found).parameters
