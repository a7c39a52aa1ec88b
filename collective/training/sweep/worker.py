"""Runs one training of a sweep: ``python -m collective.training.sweep.worker``."""

from __future__ import annotations

import argparse
import json
import sys

from collective.backends.quiet import quiet
from collective.environment import detect
from collective.errors import exit_code


def main() -> int:
    """Trains; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("job", help="its options, as JSON")
    p.add_argument("summary", help="a file for its summary")
    args = p.parse_args()
    with quiet():
        from collective.training import command
    summary = command.run(command.Job.of(json.loads(args.job), verbose=0))
    if detect().rank == 0:
        summary.write_json(args.summary)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
