"""``python -m collective.hosts FILE --to mpich``: a hostfile in another dialect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from collective.errors import UsageError
from collective.hosts import DIALECTS, read, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 2 for a file that cannot be read or written so."""
    parser = argparse.ArgumentParser("python -m collective.hosts", description=__doc__)
    parser.add_argument("file", help="a hostfile, in any dialect")
    parser.add_argument("--to", default="openmpi", choices=DIALECTS, help="(openmpi)")
    options = parser.parse_args(arguments)
    try:
        print(write(read(options.file), options.to).rstrip("\n"))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
