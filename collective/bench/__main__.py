"""``python -m collective.bench``: how fast, how near the floor, and is it right?

Start it by ``collectiverun -np 2`` or, to compare with MPI, by
``mpirun -np 2 python -m collective.bench --peers mpi``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import collective
from collective import json_file
from collective.bench import limits as host
from collective.bench import table
from collective.bench.limits import MachineLimits
from collective.bench.measure import COLLECTIVES, Bench, Subject, time_subject
from collective.bench.peers import PEERS, Timer
from collective.command_parser import Parser
from collective.errors import CollectiveError
from collective.operations.kinds import ALGORITHMS

SIZES = "4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a result was wrong, 2 for wrong use."""
    options = _parse(arguments)
    try:
        if options.json:
            json_file.check_writable("--json", options.json)
        return _run(options)
    except CollectiveError as error:
        if not error.everywhere or os.environ.get("COLLECTIVE_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    collective.init()
    speaks = collective.rank() == 0
    cores = host.shared_cores()
    peers: dict[str, Timer] = {}
    for name in options.peers:
        version, timer = PEERS[name]()
        peers[name] = timer
        if speaks:
            print(f"# {name}: {version}")
    if not options.no_pin:
        # Not earlier: threads that a peer starts would be held on the same core.
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[collective.local_rank() % len(allowed)]})
    limits: dict[str, MachineLimits] = {}
    first = _calibrate_state(limits, cores)
    if speaks:
        print(table.heading(first, options.peers), flush=True)
    rows: list[table.Row] = []
    for subject in _subjects(options):
        reduces = subject.collective == "allreduce"
        cached = first.in_cache(subject.bytes, subject.in_place)
        wrong, samples = time_subject(
            Bench(subject),
            peers if reduces else {},
            options.seconds,
            partial(host.memory_rates, cores) if reduces and not cached else None,
        )
        if not set(samples) - {"mixed"} <= set(limits):
            _calibrate_state(limits, cores)
        for row in table.rows(subject, limits, wrong, samples):
            rows.append(row)
            if speaks:
                print(table.row_text(row), flush=True)
    if speaks and options.json:
        table.write_results(options.json, limits, rows)
    failed = any(row.wrong for row in rows)
    collective.shutdown()
    return int(failed)


def _calibrate_state(limits: dict[str, MachineLimits], cores: int) -> MachineLimits:
    """Add the limits for the present state of the machine."""
    for _ in range(3):
        before = host.probe()
        measured = host.calibrate(cores)
        state = host.state_of(before, host.probe())
        if state != "mixed":
            break
    limits.setdefault(
        state, replace(measured, latency_s=min(before, measured.latency_s))
    )
    return limits[state]


def _subjects(options: argparse.Namespace) -> list[Subject]:
    places = {"in": [True], "out": [False], "both": [False, True]}[options.place]
    if options.collective not in ("allreduce", "broadcast"):
        places = [False]
    what = options.collective, options.algorithm, options.transport_dtype
    return [
        Subject(*what, size, place, offset)
        for size, offset, place in product(options.sizes, options.offset, places)
    ]


def _sizes(text: str) -> list[int]:
    shifts = {"": 0, "K": 10, "M": 20, "G": 30}
    sizes = []
    for part in text.upper().split(","):
        found = re.fullmatch(r"(\d+)([KMG]?)", part.strip())
        if not found:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of sizes\nHINT: --sizes 4,64K,16M"
            )
        sizes.append(int(found[1]) << shifts[found[2]])
    return sizes


def _offsets(text: str) -> list[int]:
    offsets = [int(part) if part.isdigit() else -1 for part in text.split(",")]
    if not all(0 <= offset < 4096 for offset in offsets):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of offsets in a page\nHINT: --offset 0,16"
        )
    return offsets


def _peer_list(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(
                f"{name!r}; choose from {', '.join(PEERS)}"
            )
    return names


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m collective.bench", description="Time the collectives."
    )
    add = parser.add_argument
    add("--collective", choices=COLLECTIVES, default="allreduce", metavar="NAME",
        help=" | ".join(COLLECTIVES))  # fmt: skip
    add("--algorithm", choices=ALGORITHMS, default="auto", metavar="NAME",
        help=" | ".join(ALGORITHMS))  # fmt: skip
    add("--transport-dtype", choices=("float16", "bfloat16"))
    add(
        "--sizes", type=_sizes, default=_sizes(SIZES), help=f"bytes, {SIZES} by default"
    )
    add("--place", choices=("in", "out", "both"), default="both")
    add(
        "--peers",
        type=_peer_list,
        default=[],
        help=f"to compare with: {','.join(PEERS)}",
    )
    add("--seconds", type=float, default=0.3, help="for each line and contestant")
    add(
        "--offset",
        type=_offsets,
        default=[16],
        help="bytes from a page to each array, as 0,16,4; 16 by default, as np.empty has",
    )
    add("--no-pin", action="store_true", help="let ranks move between cores")
    add("--json", metavar="FILE", help="write limits and rows")
    options = parser.parse_args(arguments)
    if options.seconds <= 0:
        parser.error(f"--seconds {options.seconds:g}\nHINT: more than 0, as 0.3")
    return options


if __name__ == "__main__":
    sys.exit(main())
