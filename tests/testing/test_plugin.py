"""The `cluster` fixture, as users' tests see it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import aiograd as ag

ROOT = Path(__file__).parents[2]


async def where() -> tuple[str, int]:
    return ag.get_worker_info().name, os.getpid()


async def test_test_harness(cluster):
    async with cluster(2) as c:
        assert await ag.rpc_async("worker1", where) == ("worker1", os.getpid())
        assert len(c) == 2
    async with cluster(1, processes=True):
        name, process = await ag.rpc_async("worker0", where)
        assert name == "worker0"
        assert process != os.getpid()


async def test_settings_are_passed_on(cluster):
    async with cluster(names=["left", "right"], options=ag.Options(timeout=7.0)) as c:
        assert [worker.name for worker in c] == ["left", "right"]
        assert ag.current_worker().options.timeout == 7.0


def test_a_run_without_clusters_does_not_load_the_library(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test():\n    assert 'aiograd_pytest' in sys.modules\n"
        "    assert not {'aiograd', 'numpy'} & sys.modules.keys()\n"
    )
    command = "-m pytest -q -p aiograd_pytest -p no:cacheprovider"
    done = subprocess.run(
        [sys.executable, *command.split(), "-c", os.devnull, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_names_the_plugin():
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert names["pytest11"] == {"aiograd": "aiograd_pytest"}


def test_the_plugin_imports_nothing_that_pytest_has_not():
    code = (
        "import sys, pytest; before = set(sys.modules); import aiograd_pytest; "
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "['aiograd_pytest']", done.stderr
