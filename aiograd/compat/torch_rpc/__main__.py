"""Run an unmodified program: `python -m aiograd.compat.torch_rpc program.py ARGS`."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Install the drop-in and run the program as `__main__`; so do processes that it spawns."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m aiograd.compat.torch_rpc program.py [arguments]")
    sys.argv = sys.argv[1:]
    os.environ["AIOGRAD_TORCH_PROGRAM"] = os.path.abspath(sys.argv[0])
    # As python does it: modules beside the program can be imported.
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_module("aiograd.compat.torch_rpc.program", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
