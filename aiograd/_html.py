"""How objects look in a notebook: a coloured edge, a title, and a small table or a grid of numbers.

Colours are half transparent or of middle brightness, so that cards read well on light and dark
pages. Styles are written into the tags, because notebooks strip everything else.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

BLUE, ORANGE, GREEN, GREY = "#4c72b0", "#e07b39", "#2e9e5b", "#888"
# Notebooks have styles of their own for tables, which these override.
_CELL = "text-align:left;padding:1px 14px 1px 0;font-size:inherit;background:none;border:none"


def card(colour: str, title: str, body: str = "") -> str:
    """Return a title (HTML) and its body beside an edge of this colour."""
    return (
        f'<div style="border-left:3px solid {colour};padding:2px 10px;font-size:90%;'
        f'line-height:1.5">{title}{body}</div>'
    )


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return rows of cells (HTML); without a head, the first cell of each row is its name."""
    lines = [_cells("th", head)] if head else []
    # A row is either below a head or has its name in front.
    named = 0 if head else 1
    lines += [_cells("th", row[:named]) + _cells("td", row[named:]) for row in rows]
    made = [f'<tr style="background:none">{line}</tr>' for line in lines]
    style = "border-collapse:collapse;margin:2px 0 0;font-size:inherit;border:none"
    return f'<table style="{style}">{"".join(made)}</table>'


def code(text: object) -> str:
    """Return a name as it is written in a program, escaped."""
    style = "background:none;padding:0;font:95% ui-monospace,monospace"
    return f'<code style="{style}">{html.escape(str(text))}</code>'


def quiet(text: object) -> str:
    """Return a remark in grey, escaped."""
    return f'<span style="color:{GREY}">{html.escape(str(text))}</span>'


def dot(colour: str) -> str:
    """Return a coloured dot, for the state of a worker or reference."""
    return f'<span style="color:{colour}">●</span>'


def _cells(tag: str, cells: Sequence[str]) -> str:
    weight = ";font-weight:600" if tag == "th" else ""
    return "".join(f'<{tag} style="{_CELL}{weight}">{cell}</{tag}>' for cell in cells)
