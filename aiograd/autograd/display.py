"""A tensor in a notebook: its shape and type, and its first numbers on a ground of their size."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd._html import BLUE, card, code, quiet
from aiograd.autograd.tensor import Tensor

SHOWN = 8  # rows and columns; the middle of longer ones is left out
_CELL = "text-align:right;padding:1px 8px;font-family:monospace;font-size:inherit;border:none"


def as_html(tensor: Tensor) -> str:
    """Return a tensor as an HTML card."""
    size = " × ".join(map(str, tensor.shape)) or "scalar"
    facts = f"<b>{type(tensor).__name__}</b> {size} {quiet(f'· {tensor.dtype}')}"
    if tensor.is_sparse:
        facts += quiet(" · sparse")
    if tensor.grad_fn is not None:
        facts += f"{quiet(' · made by')} {code(tensor.grad_fn.name)}"
    elif tensor.requires_grad:
        facts += quiet(" · requires grad")
    # Of a sparse or empty tensor the facts are all there is to show.
    return card(BLUE, facts, "" if tensor.is_sparse or not tensor.size else _grid(tensor.raw))


def _grid(array: Any) -> str:
    """The first matrix of an array, as a table."""
    lead = array.ndim - 2
    # Of a stack of matrices the first one; its place is named above it.
    matrix = array[(0,) * max(lead, 0)]
    matrix = matrix.reshape(1, -1) if matrix.ndim < 2 else matrix
    rows, columns = _places(matrix.shape[0]), _places(matrix.shape[1])
    shown = matrix[np.ix_([r for r in rows if r >= 0], [c for c in columns if c >= 0])]
    # The colour scale must not be ruined by an infinity, and only counts what is shown.
    finite = np.abs(shown[np.isfinite(shown)]) if shown.dtype.kind in "fiu" else np.zeros(0)
    largest = float(finite.max(initial=0.0)) if matrix.size > 1 else 0.0
    lines = [
        "".join(_cell(None if -1 in (r, c) else matrix[r, c], largest) for c in columns)
        for r in rows
    ]
    body = "".join(f'<tr style="background:none">{line}</tr>' for line in lines)
    where = quiet(f"[{', '.join(['0'] * lead + [':', ':'])}]") if lead > 0 else ""
    style = "border-collapse:collapse;margin:3px 0 0;font-size:inherit;border:none"
    return f'<div>{where}<table style="{style}">{body}</table></div>'


def _places(length: int) -> list[int]:
    """The indices to show; −1 stands for those left out."""
    if length <= SHOWN:
        return list(range(length))
    half = SHOWN // 2
    return [*range(half), -1, *range(length - half, length)]


def _cell(value: Any, largest: float) -> str:
    if value is None:
        return f'<td style="{_CELL};background:none">⋯</td>'
    ground = "none"
    if largest and np.isfinite(value):
        # Blue above zero, orange below; half transparent, so that it reads on light and dark pages.
        colour = "76,114,176" if value > 0 else "224,123,57"
        ground = f"rgba({colour},{0.45 * abs(float(value)) / largest:.2f})"
    text = f"{value:.4g}" if value.dtype.kind in "fc" else str(value)
    return f'<td style="{_CELL};background:{ground}">{text.replace("-", "−")}</td>'


setattr(Tensor, "_repr_html_", as_html)  # noqa: B010  attached, like all that can be done with one
