"""SVG that all pictures share: the page, text, and colours.

Pictures have no background and use middle greys, so that they read on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

SHRINK = 0.6  # a picture wider than the page becomes smaller, but not smaller than this

LINE = "#8b93a1"  # grey enough for white paper and light enough for a dark page

# (fill, border) of each worker's boxes; text on them is always dark
PALETTE = (
    ("#dbe8fb", "#4a7fd0"),
    ("#dcf3e3", "#3f9a63"),
    ("#fdeccb", "#cf9325"),
    ("#f0e0f7", "#9358b5"),
    ("#fbdedd", "#cc5a55"),
    ("#d5f1f1", "#31918f"),
    ("#ece7dd", "#8d7d5b"),
    ("#e3e6ee", "#66708a"),
)
FONT = "font-family='-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


def page(width: float, height: float, parts: Sequence[str]) -> str:
    """Return a whole picture; on a narrow page it shrinks, within limits."""
    # Below this share letters are too small; the page then scrolls.
    style = f"max-width:max(100%,{SHRINK * width:.0f}px);height:auto"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
            f"viewBox='0 0 {width:.0f} {height:.0f}' style='{style}' {FONT}>",
            *parts,
            "</svg>",
        ]
    )


def text(
    x: float,
    y: float,
    words: str,
    size: float,
    colour: str,
    *,
    anchor: str = "middle",
    weight: int = 400,
) -> str:
    """Return a line of text; it is escaped."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{colour}' "
        f"text-anchor='{anchor}' font-weight='{weight}'>{escape(words)}</text>"
    )
