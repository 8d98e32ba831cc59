"""The page with frozen data, as one file to mail: no server, no network, the same views."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ASSETS: Final = Path(__file__).parent / "assets"
TYPES: Final = {
    "index.html": "text/html",
    "app.css": "text/css",
    "app.js": "text/javascript",
    "htm-preact.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


def asset(name: str) -> str:
    """Return one of the page's files."""
    folder = ASSETS / "vendor" if name == "htm-preact.js" else ASSETS
    return (folder / name).read_text(encoding="utf-8")


def render(history: Sequence[Mapping[str, Any]], logs: Mapping[str, Any]) -> str:
    """Return the page with these digests and logs inside."""
    # In a script of type JSON, so nothing of it is executed; `<` is escaped, so nothing in a name
    # or a line of output can end the element.
    data = json.dumps({"history": history, "logs": logs}).replace("<", "\\u003c")
    page = asset("index.html")
    page = page.replace(
        '<link rel="stylesheet" href="app.css">', f"<style>{asset('app.css')}</style>"
    )
    page = page.replace('<link rel="icon" href="icon.svg">', "")
    page = page.replace(
        '<script src="htm-preact.js"></script>', f"<script>{asset('htm-preact.js')}</script>"
    )
    return page.replace(
        '<script src="app.js"></script>',
        f'<script type="application/json" id="frozen">{data}</script>'
        f"<script>{asset('app.js')}</script>",
    )
