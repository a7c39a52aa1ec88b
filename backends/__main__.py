"""``python -m collective.backends``: which backends can be used here, and why not, as JSON.

It is for programs such as ``python -m collective.doctor``, which is a floor below and
so must not import this package.
"""

from __future__ import annotations

import argparse
import json
import sys

from collective import backends
from collective.backends import registry
from collective.backends.factory import check_name, check_unedited
from collective.environment import Environment
from collective.errors import UsageError


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(
        "python -m collective.backends", description=__doc__
    )
    add = parser.add_argument
    add("--check", metavar="NAME", help="exit code 2 where ranks cannot use it here")
    add("--launcher", default="collectiverun", help="which starts them")
    add("--size", type=int, default=2, help="how many there are, on this host")
    add("--unedited", metavar="SCRIPT", help="the Keras script that they run")
    options = parser.parse_args()
    if options.unedited:  # as in a rank, so that a hint says what to type
        sys.argv = [options.unedited]
        sys.orig_argv = ["python", "-m", "collective.distribute", options.unedited]
    if options.check:
        sys.exit(_check(options))
    print(json.dumps(registry.describe_backends()))


def _check(options: argparse.Namespace) -> int:
    """Print why so many ranks cannot use a backend; return the exit code."""
    name, size = options.check, options.size
    try:
        check_name(name)
        if name == "auto":  # it takes any backend that works
            return 0
        if options.unedited:
            check_unedited(backends.BACKENDS[name], size)
        place = Environment(options.launcher, 0, size, 0, size)
        found = backends.BACKENDS[name].availability(place)
        if not found.usable:
            raise UsageError(
                f"backend {name!r} cannot be used here: {found.reason}", hint=found.hint
            )
    except UsageError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    main()
