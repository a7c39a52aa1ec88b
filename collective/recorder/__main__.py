"""``python -m collective.recorder FILE...``: one account of those of several hosts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from collective.errors import CollectiveError, UsageError
from collective.recorder.account import Account, merge, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the account; returns the exit code."""
    parser = argparse.ArgumentParser("python -m collective.recorder")
    parser.add_argument("files", nargs="+", metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        account = merge(_read(file) for file in options.files)
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(account.text(), end="")
    return 0


def _read(file: str) -> Account:
    try:
        return parse(Path(file).read_text(errors="replace"), file)
    except OSError as error:
        raise UsageError(
            f"cannot read {file}: {error.strerror}", hint="give files that exist"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
