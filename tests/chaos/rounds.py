"""Rounds of random faults, each with a seed by which it is repeated."""

from __future__ import annotations

import argparse
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the options that ``run`` takes."""
    made = argparse.ArgumentParser(program)
    made.add_argument("--seconds", type=float, default=300)
    made.add_argument("--seed", type=int, default=int(time.time()))
    made.add_argument("--rounds", type=int, default=1_000_000)
    return made


def run(
    options: argparse.Namespace, one_round: Callable[[int, Path], str]
) -> tuple[int, int]:
    """Run rounds, and print each; return how many there were, and how many failed.

    Args:
        one_round: Takes a seed and an empty folder, returns what was tried, and raises an
            AssertionError if a promise did not hold.
    """
    deadline = time.monotonic() + options.seconds
    count = failed = 0
    for seed in range(options.seed, options.seed + options.rounds):
        if time.monotonic() > deadline:
            break
        count += 1
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            try:
                print(f"seed {seed}: {one_round(seed, Path(folder))}", flush=True)
            except AssertionError:
                failed += 1
                print(f"seed {seed}: FOUND\n{traceback.format_exc()}", flush=True)
    return count, failed
