"""Trains the same model on every backend: is it equal, and which is fastest?

python compare.py -np 4
python compare.py -np 1,2,4 --model resnet50 --data synthetic:64x64x3:10
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
from collective.command_parser import Parser
from collective.errors import exit_code
from collective.fit_options import count
from collective.streams import open_streams, outlive_readers


def parser() -> argparse.ArgumentParser:
    """Return the parser; options that it does not know are passed to ``train.py``."""
    p = Parser("compare.py", description=__doc__, allow_abbrev=False,
        epilog="All other options are those of train.py (python train.py "
                "--help).")  # fmt: skip
    add = p.add_argument
    add("-np", type=_counts, default=(2,), metavar="N[,N...]",
        help="replicas: equality is tested at the largest, speed at each (default: 2)")  # fmt: skip
    add("--backends", default="", metavar="A,B", help="(default: all usable here)")
    add("--full", action="store_true", help="every run apart, in rounds: minutes; "
        "as do --rounds, --only, --steps and several -np")  # fmt: skip
    add("--rounds", type=count, help="rounds of timed runs (default: 3)")
    add("--only", choices=("equal", "fast"), help="one half of the comparison")
    add("--json", metavar="FILE", help="write the results")
    add("--plot", metavar="FILE",
        help="draw losses, differences and the parts of a step: .png, .svg, .pdf")  # fmt: skip
    add("--deadline", type=_seconds, default=600, metavar="SECONDS",
        help="time limit of one run")  # fmt: skip
    add("--precision", metavar="NAME",
        choices=("float32", "float64", "mixed_bfloat16", "mixed_float16"),
        help="of the timed runs; float64 or float32: of the equality test, too")  # fmt: skip
    add("--global-batch-size", type=count, default=64, metavar="ROWS")
    return p


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers such as 1,2,4"
        )
    return counts


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive number of seconds"
        )
    return seconds


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    open_streams()
    outlive_readers()
    arguments = sys.argv[1:] if argv is None else argv
    args, rest = parser().parse_known_args(arguments)
    typed = shlex.join(["compare.py", *arguments])
    from collective.comparison import command

    return exit_code(lambda: command.compare(args, rest, typed))


if __name__ == "__main__":
    sys.exit(main())
