"""torch's own tests, from the installed wheel and unmodified, on the drop-in.

    python tests/compat/upstream.py [SUITE[.TEST] …] [--torch] [--jobs N]

torch wrote these tests for several agents: a suite is mixed with a fixture that names the agent.
One process per rank is forked from this one, which has torch and the tests imported already: a test
takes a second instead of the eight that `spawn` takes. `--torch` runs them on torch's own agent.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiograd.compat.torch_rpc.install import install

BASE = "torch.testing._internal.distributed"
# suite → its module below BASE
SUITES = {
    "RpcTest": "rpc.rpc_test",
    "TensorPipeAgentRpcTest": "rpc.rpc_test",
    "DistAutogradTest": "rpc.dist_autograd_test",
    "TensorPipeAgentDistAutogradTest": "rpc.dist_autograd_test",
    "DistOptimizerTest": "rpc.dist_optimizer_test",
    "ParameterServerTest": "rpc.examples.parameter_server_test",
    "ReinforcementLearningRpcTest": "rpc.examples.reinforcement_learning_rpc_test",
    "RemoteModuleTest": "nn.api.remote_module_test",
    "ThreeWorkersRemoteModuleTest": "nn.api.remote_module_test",
    "DdpUnderDistAutogradTest": "ddp_under_dist_autograd_test",
    "DdpComparisonTest": "ddp_under_dist_autograd_test",
}
LIMIT = 90.0  # seconds for one test
AFTER_FAILURE = 3.0  # seconds for the other ranks once one has failed
SKIPPED = 77  # exit status of a rank whose test was skipped by torch


@dataclass
class Outcome:
    """How one test ended."""

    test: str
    state: str  # "passed", "failed", "skipped" or "hung"
    seconds: float
    output: str


def load() -> dict[str, type]:
    """Import the suites and make each of them a test case of its own."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's helpers import it for tests of other areas.
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Else a process may be through with `init_process_group` while another one has no default group
    # yet, and the tests of DistributedDataParallel call a function there that needs it.
    os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
    fixture = importlib.import_module(f"{BASE}.rpc.tensorpipe_rpc_agent_test_fixture")
    case = importlib.import_module("torch.testing._internal.common_utils").TestCase
    made = {}
    for name, module in SUITES.items():
        suite = getattr(importlib.import_module(f"{BASE}.{module}"), name)
        mixed = (suite, fixture.TensorPipeRpcAgentTestFixture, case)
        made[name] = type(name, mixed, {"rank": 0, "file_name": ""})
        # torch's tests send bound methods and inner classes of the suite, by the suite's name.
        made[name].__module__ = suite.__module__
        made[name].__qualname__ = suite.__qualname__
        setattr(sys.modules[suite.__module__], name, made[name])
    return made


def names_of(suites: dict[str, type]) -> list[str]:
    """List all tests as SUITE.test_name."""
    return [
        f"{name}.{test}"
        for name, suite in suites.items()
        for test in sorted(dir(suite))
        if test.startswith("test_")
    ]


def run(suite: type, test: str, limit: float = LIMIT, on_torch: bool = False) -> Outcome:
    """Run one test: fork a process per rank, and wait until all have ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="aiograd-upstream-") as folder:
        size = suite.world_size.fget(object())  # type: ignore[attr-defined]
        ranks = {}
        for rank in range(size):
            work = functools.partial(_rank, suite, test, rank, folder, on_torch)
            ranks[_fork(work, f"{folder}/out{rank}")] = rank
        statuses, hung = _wait(set(ranks), began + limit)
        output = ""
        for pid, rank in ranks.items():
            with open(f"{folder}/out{rank}", errors="replace") as file:
                output += f"── rank {rank}: {statuses.get(pid)}\n{file.read()[-9000:]}\n"
    seconds = time.monotonic() - began
    found = set(statuses.values())
    state = (
        "hung"
        if hung
        else "skipped"
        if found == {SKIPPED}
        else "passed"
        if found <= {0, SKIPPED}
        else "failed"
    )
    return Outcome(f"{suite.__name__}.{test}", state, seconds, output)


def _fork(work: Callable[[], int], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _rank(suite: Any, test: str, rank: int, folder: str, on_torch: bool) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.simplefilter("ignore")  # what torch says about itself
    if not on_torch:
        # After the import of the tests: functions that torch compiles there name torch's own RRef.
        # In the forked process only: this one may have other tests to run.
        install()
    _keep_process_groups()
    case = suite(test)
    case.rank, case.file_name = rank, f"{folder}/store"
    try:
        getattr(case, test)()
    except unittest.SkipTest as error:
        print(f"skipped: {error}")  # noqa: T201
        return SKIPPED
    except SystemExit as error:  # torch's decorators leave with a status that says why
        return SKIPPED if error.code else 0
    return 0


def _keep_process_groups() -> None:
    """Keep what torch's tests destroy until the process ends.

    A process group of gloo that is freed joins its threads and holds the GIL meanwhile, for which
    one of them may wait: on torch's own agent `test_ddp_comparison_uneven_inputs` hung in 8 of 60
    runs.
    """
    groups = importlib.import_module("torch.distributed.distributed_c10d")
    destroy, kept = groups.destroy_process_group, []

    def keep(group: Any = None) -> None:
        kept.append(groups._get_default_group())
        destroy(group)

    importlib.import_module("torch.distributed").destroy_process_group = keep


def _wait(pids: set[int], deadline: float) -> tuple[dict[int, int], bool]:
    statuses: dict[int, int] = {}
    hung = False
    while pids:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                pids.discard(pid)
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] not in (0, SKIPPED):  # the others may wait for it for ever
                    deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
        if pids and time.monotonic() > deadline:
            hung = True
            for pid in pids:  # ours: each was forked above
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.01)
    return statuses, hung


def chosen(suites: dict[str, type], names: list[str]) -> Iterator[str]:
    """Give the tests that the names select: a suite, a test, or the beginning of one with `*`."""
    for test in names_of(suites):
        for name in names or list(suites):
            suite = test.partition(".")[0]
            if test == name or suite == name or (name.endswith("*") and test.startswith(name[:-1])):
                yield test
                break


def main() -> None:
    """Run the chosen tests and print how they ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--verbose", "-v", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--fails", help="write the outputs of what failed into this file")
    given = parser.parse_args()
    suites = load()
    counts: dict[str, int] = {}
    for test in chosen(suites, given.tests):
        suite, _, method = test.partition(".")
        outcome = run(suites[suite], method, given.limit, given.torch)
        counts[outcome.state] = counts.get(outcome.state, 0) + 1
        if outcome.state != "passed" or given.verbose:
            print(f"{outcome.state:8} {outcome.seconds:5.1f} s  {test}", flush=True)  # noqa: T201
        if outcome.state in ("failed", "hung") and given.fails:
            with open(given.fails, "a") as file:
                file.write(f"════ {test}: {outcome.state}\n{outcome.output}\n")
    print(counts)  # noqa: T201


if __name__ == "__main__":
    main()
