"""The page of all operations, written from the tables themselves: a sentence and a link for each.

`conf.py` writes it when the pages are built; `tests/examples/test_operations_page.py` reads it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np

import aiograd
from aiograd.autograd import MAKERS, NAMES

# In the order in which they import each other: an operation belongs to the first that has it.
TABLES = {
    "elementwise": "Arithmetic and functions, element by element",
    "shape": "Shapes and axes",
    "index": "Picking, sorting, repeating",
    "reduce": "Sums and extremes",
    "join": "Joining and splitting",
    "products": "Products",
    "statistics": "Statistics",
    "linalg": "Linear algebra",
    "fft": "Fourier transforms",
    "neural": "Neural networks",
    "convolution": "Convolution and pooling",
    "embedding": "Rows of a table",
    "nondifferentiable": "Comparisons, positions, truth values",
}
HEAD = """# Operations

Every name below is `aiograd.<name>`, takes what numpy's function of that name takes, and is a
method of `Tensor` where `ndarray` has one. numpy's own functions (`np.sin(t)`,
`np.concatenate([...])`) work on tensors too, and are recorded. Neural ones are also in
`aiograd.nn.functional`. `dim=`, `keepdim=` and `dims=` are understood as `axis=`, `keepdims=` and
`axes=`, except where torch's function of that name means something else (`max`, `min`, `median`,
`sort`, `std`, `var`, `split`): there they are refused.

dtypes are numpy's: `ag.float32`, `ag.float64`, `ag.int64`, `ag.bool_` and so on.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD, "## Makers\n"]
    parts += [entry(name, getattr(aiograd, name)) for name in MAKERS]
    for title, names in sections():
        parts.append(f"## {title}\n")
        parts += [entry(name, NAMES[name]) for name in names]
    for module in ("linalg", "fft"):
        space = getattr(aiograd, module)
        parts.append(f"## aiograd.{module}\n")
        parts += [entry(f"{module}.{name}", getattr(space, name)) for name in sorted(space.__all__)]
    return "\n".join(parts)


def sections() -> Iterator[tuple[str, list[str]]]:
    """Give the tables with the public names of their operations."""
    left = dict(NAMES)
    for table, title in TABLES.items():
        module = vars(import_module(f"aiograd.autograd.ops.{table}"))
        own = {id(value) for value in module.values()}
        own |= {id(value) for value in module.get("DISCRETE", {}).values()}
        names = sorted(name for name, made in left.items() if id(made) in own)
        for name in names:
            del left[name]
        if names:
            yield title, names
    if left:
        yield "Others", sorted(left)


def entry(name: str, made: Callable[..., Any]) -> str:
    """Return one operation: its signature, a sentence, a link."""
    last = name.rpartition(".")[2]
    own = getattr(made, "__name__", last)
    text = sentence(made) if own == last else f"Another name of `{own}`: {sentence(made)}"
    label, link = elsewhere(own)
    more = f" [{label}]({link})" if link else ""
    return f"```{{py:function}} aiograd.{name}{signature(made)}\n{text}{more}\n```\n"


def signature(made: Callable[..., Any]) -> str:
    """Return the names of the parameters."""
    try:
        found = inspect.signature(made)
    except (TypeError, ValueError):
        return "(...)"
    shown = found.replace(
        parameters=[p.replace(annotation=p.empty) for p in found.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    return re.sub(r"<[^>]*>", "...", str(shown))


def sentence(made: Callable[..., Any]) -> str:
    """Return the first sentence of a docstring, as Markdown."""
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(made) or "")
    # Docstrings of ufuncs begin with their signature.
    words = [p for p in paragraphs if not re.match(r"[\w.]+\(", p.strip())]
    first = " ".join(words[0].split()) if words else ""
    found = re.match(r"(.+?[.:])(?: |$)", first)
    plain = (found.group(1) if found else first).rstrip(":.") + "."
    plain = re.sub(r":\w+:`([^`]*)`", r"\1", plain).replace("``", "`")
    return re.sub(r"([*_\[\]<>$|])(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", plain)


def elsewhere(name: str) -> tuple[str, str]:
    """Return who else explains a function of this name, and where: numpy, or torch."""
    for prefix, module in (("", np), ("linalg.", np.linalg), ("fft.", np.fft)):
        if callable(getattr(module, name, None)):
            root = "https://numpy.org/doc/stable/reference/generated/numpy."
            return "numpy", f"{root}{prefix}{name}.html"
    if hasattr(aiograd.nn.functional, name):
        root = "https://docs.pytorch.org/docs/stable/generated/torch.nn.functional."
        return "torch", f"{root}{name}.html"
    return "", ""
