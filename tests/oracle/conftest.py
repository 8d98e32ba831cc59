"""Comparisons with torch, which lives in a venv of its own: `make oracle` runs them there."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
