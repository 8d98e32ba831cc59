"""The measured figures in README.md: they are kept in figures.json, and the table is made from it.

python benchmarks/figures.py              write the table of figures.json into README.md
python benchmarks/figures.py --measure    measure first, in the environments of `make peers`
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FIGURES, README = HERE / "figures.json", HERE.parent / "README.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"

PEERS = {
    "aiograd-asyncio": "aiograd",  # under `asyncio.run`, as the first program of README.md
    "aiograd": "… under `uvloop.run`",
    "torch": "torch RPC",
    "ray": "Ray",
    "dask": "Dask",
    "hivemind": "hivemind",
}
# Label, metric (see peers/README.md), unit, format.
ROWS = [
    ("one small call, there and back", "rpc.add.rtt.median", "µs", "{:.0f}"),
    ("small calls, 256 under way", "rpc.tput.256", "calls/s", "{:,.0f}"),
    ("1 MB array, there and back", "tensor.echo.1MB.ms", "ms", "{:.2f}"),
    ("64 MB array, there and back", "tensor.echo.64MB.rate", "GB/s", "{:.2f}"),
    ("context, 7 calls, backward pass", "dist.e2e_loop.rate", "1/s", "{:,.0f}"),
    ("4 workers up and called", "startup.cluster4_first_calls", "s", "{:.2f}"),
    ("memory of an idle worker", "startup.idle_pss_per_worker", "MiB", "{:.0f}"),
]
SPECS = [
    *("torch:rpc,tensor", "torch:e2e", "aiograd:rpc,tensor", "aiograd:e2e"),
    *("aiograd-asyncio:rpc,tensor", "aiograd-asyncio:e2e", "startup_aiograd-asyncio"),
    *("ray:rpc,tensor", "dask:rpc,tensor", "hivemind:rpc"),
    *("startup_torch", "startup_aiograd", "startup_ray", "startup_dask"),
]


def measure(reps: int) -> dict:
    """Run all peers in turn; the median of each metric of interest."""
    wanted, found = {metric for _, metric, _, _ in ROWS}, {}
    busy = os.getloadavg()[0] > 0.5  # other processes are running: the table says so
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.jsonl")
        command = [sys.executable, "run.py", "--reps", str(reps), "--out", str(raw), *SPECS]
        environment = {**os.environ, "BENCH_METRICS": ",".join(sorted(wanted))}
        subprocess.run(command, cwd=HERE / "peers", env=environment, check=True)
        for line in raw.read_text().splitlines():
            record = json.loads(line)
            if record["metric"] in wanted:
                peer = record["peer"].removeprefix("startup_")
                found.setdefault(record["metric"], {}).setdefault(peer, []).append(record["value"])
    medians = {
        metric: {peer: float(f"{statistics.median(values):.4g}") for peer, values in peers.items()}
        for metric, peers in found.items()
    }
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    machine += ", **others at work**" if busy else ""
    return {"machine": machine, "repetitions": reps, "figures": medians}


def table(kept: dict) -> str:
    """The figures as Markdown; a dash where a peer cannot do it or was not measured."""
    lines = [
        f"| {kept['machine']}; median of {kept['repetitions']} | {' | '.join(PEERS.values())} |",
        "|---" * (len(PEERS) + 1) + "|",
    ]
    for title, metric, unit, shape in ROWS:
        found = kept["figures"].get(metric, {})
        cells = [shape.format(found[peer]) if peer in found else "–" for peer in PEERS]
        lines.append(f"| {title} ({unit}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def placed(page: str, lines: str) -> str:
    """The page with these lines between the marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{lines}\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--reps", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.measure:
        FIGURES.write_text(json.dumps(measure(chosen.reps), indent=1) + "\n")
    README.write_text(placed(README.read_text(), table(json.loads(FIGURES.read_text()))))


if __name__ == "__main__":
    main()
