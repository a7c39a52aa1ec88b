"""Prints the SHA-256 of weights, layer state and optimizer state of a saved model.

python -m collective.hash model.keras

It is ``state_sha256`` of ``train.py --json``, and of the result of ``collective.fit``.
"""

from __future__ import annotations

import argparse
import os
import sys

from collective.errors import UsageError, exit_code, first_line


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser("collective.hash", description=__doc__)
    parser.add_argument("file", nargs="+", metavar="FILE.keras")
    args = parser.parse_args(argv)
    return exit_code(lambda: _print(args.file))


def _print(files: list[str]) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for file in files:
        if not os.path.isfile(file):
            raise UsageError(
                f"there is no file {file}", hint="the path of a .keras file"
            )
    import keras

    from collective.training.virtual.digest import state_sha256

    for file in files:
        try:
            model = keras.saving.load_model(file)
        except (ValueError, TypeError, OSError) as error:
            first = first_line(error)
            raise UsageError(
                f"{file} cannot be loaded: {first}",
                hint="a file of model.save; where the model has classes of your own: "
                "collective.training.virtual.digest.state_sha256(model) after loading it",
            ) from None
        print(f"{state_sha256(model)}  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
