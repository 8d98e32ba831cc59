"""Recordings of all workers for some seconds: as a trace for Chrome and Perfetto, or as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from aiograd.rpc.observe.profile import Span, chrome_trace, table
from aiograd.viz.timeline import Span as Bar
from aiograd.viz.timeline import timeline

MOST = 2000  # spans in a picture: the longest ones


def spans_of(recording: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a recording, as `inspect.record.all` gives it."""
    return [Span(*each) for spans in recording["spans"].values() for each in spans]


def as_bars(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recording for a page: the longest spans, and sums by function and worker."""
    spans = spans_of(recording)
    groups: dict[tuple[str, str], list[float]] = {}
    for span in spans:
        groups.setdefault((span.name, span.worker), []).append(span.seconds)
    rows = [
        {
            "name": name,
            "worker": worker,
            "count": len(times),
            "total": sum(times),
            "max": max(times),
        }
        for (name, worker), times in groups.items()
    ]
    rows.sort(key=lambda row: -row["total"])  # type: ignore[operator]
    longest = sorted(spans, key=lambda span: -span.seconds)[:MOST]
    begin = min((span.start for span in spans), default=0.0)
    return {
        "seconds": recording["seconds"],
        "silent": recording.get("silent", {}),
        "count": len(spans),
        "rows": rows[:200],
        "bars": [[s.worker, s.name, s.start - begin, s.end - begin] for s in longest],
    }


def write(recording: Mapping[str, Any], path: str) -> int:
    """Write a recording: a page if the path ends in .html, else a trace; return how many spans."""
    spans = spans_of(recording)
    if path.endswith((".html", ".htm")):
        text = as_page(spans, recording.get("silent", {}), recording["seconds"])
    else:
        text = json.dumps(chrome_trace(spans))
    Path(path).write_text(text, encoding="utf-8")
    return len(spans)


def as_page(spans: Sequence[Span], silent: Mapping[str, str], seconds: float) -> str:
    """Return a recording as one file of HTML: what each worker did when, and a table."""
    longest = sorted(spans, key=lambda span: -span.seconds)[:MOST]
    bars = [Bar(span.worker, span.name, span.start, span.end) for span in longest]
    missing = "".join(
        f"<p>{escape(name)} gave no recording: {escape(why)}</p>" for name, why in silent.items()
    )
    shown = f", the {MOST} longest in the picture" if len(spans) > MOST else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>aiograd recording</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto }}
pre, figure {{ overflow-x: auto; margin: 1rem 0 }}
</style></head><body>
<h1>Recording of {seconds:g} s</h1>
<p>{len(spans)} spans{shown}.</p>{missing}
<figure>{timeline(bars).svg}</figure>
<pre>{escape(table(spans)) if spans else "nothing was called"}</pre>
</body></html>
"""
