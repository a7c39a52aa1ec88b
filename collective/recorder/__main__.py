"""``python -m collective.recorder FILE...``: merges the dumps of several hosts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from collective.errors import UsageError, exit_code
from collective.recorder.dump import Dump, merge, parse_dump


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the merged dump; return the exit code."""
    parser = argparse.ArgumentParser("python -m collective.recorder")
    parser.add_argument("files", nargs="+", metavar="FILE")
    options = parser.parse_args(arguments)

    def program() -> int:
        print(merge(_read(file) for file in options.files).text(), end="")
        return 0

    return exit_code(program)


def _read(file: str) -> Dump:
    try:
        return parse_dump(Path(file).read_text(errors="replace"), file)
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}", hint="give files that exist"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
