"""Simulated all-reduces beside real ones: 2, 3 and 4 hosts, fitted at 2 only.

    python benchmarks/predicted.py --rate 1gbit

The hosts are network namespaces of this machine (``tests/hosts/lab.py``; root and
iproute2), one rank on each. The costs of a message are fitted to the times on two hosts;
the times on three and four are then predicted. Where more ranks than cores run, they
wait for each other's cores, which the model does not know.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import workloads

from collective.comparison.prediction.simulator import Wire, simulate

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]


def measure(hosts: int, rate: str, seconds: float) -> list[float]:
    """Median seconds of an all-reduce, by size."""
    lab = [sys.executable, "-m", "tests.hosts.lab", "--hosts", str(hosts)]
    sizes = ",".join(map(str, SIZES))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        bench = [sys.executable, "-m", "collective.bench", "--place", "in", "--no-pin"]
        bench += ["--sizes", sizes, "--seconds", str(seconds), "--json", str(file)]
        command = [*lab, "--slots", "1", "--rate", rate, *bench]
        subprocess.run(command, check=True, cwd=workloads.ROOT, capture_output=True)
        rows = json.loads(file.read_text())["rows"]
    return [next(r["median_s"] for r in rows if r["bytes"] == size) for size in SIZES]


def fit(measured: list[float], link: float) -> Wire:
    """The costs whose simulation on two hosts has the least mean square log error."""
    best = Wire(link, latency=20e-6, per_message=10e-6, per_byte=1e-10)
    factors = [1 / 2, 1 / 1.2, 1, 1.2, 2]
    for _ in range(12):
        wires = [
            Wire(min(link, best.bytes_per_second * f), *(old * g for old, g in zip(
                (best.latency, best.per_message, best.per_byte), each, strict=True)))
            for f in (0.95, 1, 1.05)
            for each in itertools.product(factors, repeat=3)
        ]  # fmt: skip
        found = simulate(2, 1, wires, SIZES)

        def error(at: int, found: list[list[float]] = found) -> float:
            pairs = zip(found, measured, strict=True)
            return sum(math.log(row[at] / seconds) ** 2 for row, seconds in pairs)

        last, best = best, wires[min(range(len(wires)), key=error)]
        if last == best:
            break
    return best


def main() -> None:
    """Measures, fits and prints the error by size."""
    parser = workloads.parser(__doc__)
    parser.add_argument("--rate", default="1gbit", help="of each link: 1gbit, 10gbit")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each size")
    options = parser.parse_args()
    link = float(options.rate.removesuffix("gbit")) * 1e9 / 8
    measured = {n: measure(n, options.rate, options.seconds) for n in (2, 3, 4)}
    wire = fit(measured[2], link)
    print(f"fitted on 2 hosts: {wire.bytes_per_second * 8e-9:.2f} Gb/s, latency "
          f"{1e6 * wire.latency:.1f} us, {1e6 * wire.per_message:.1f} us a message, "
          f"{1e9 * wire.per_byte:.3f} ns a byte")  # fmt: skip
    print(f"{'bytes':>10}" + "".join(f"{n:>4} hosts: ms, error" for n in measured))
    predicted = {n: simulate(n, 1, [wire], SIZES) for n in measured}
    for i, size in enumerate(SIZES):
        cells = []
        for n, seconds in measured.items():
            error = predicted[n][i][0] / seconds[i] - 1
            cells.append(f"{1e3 * seconds[i]:12.2f} {error:+7.0%}")
        print(f"{size:10}" + "".join(cells))


if __name__ == "__main__":
    main()
