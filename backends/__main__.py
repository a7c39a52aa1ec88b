"""``python -m collective.backends [--json]``: which backends can be used here, and why not.

``--json`` is for programs, such as ``python -m collective.doctor``, which is a floor
below and so must not import this. It lists each backend as this process could use it,
and as processes could that its launcher started.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from collective import backends
from collective.backends import registry
from collective.backends.factory import check_name
from collective.environment import Environment, detect
from collective.errors import UsageError


def main() -> None:
    """Prints the list."""
    parser = argparse.ArgumentParser(
        "python -m collective.backends", description=__doc__
    )
    add = parser.add_argument
    add("--json", action="store_true", help="for programs")
    add("--check", metavar="NAME", help="exit code 2 where ranks cannot use it here")
    add("--launcher", default="collectiverun", help="which starts them")
    add("--size", type=int, default=2, help="how many there are, on this host")
    options = parser.parse_args()
    if options.check:
        sys.exit(_check(options.check, options.launcher, options.size))
    if not options.json:
        backends.print_list()
        return
    found: dict[str, dict[str, Any]] = {}
    for name, kind in backends.BACKENDS.items():
        alone, launched = kind.availability(detect()), registry.can_start(name, 2)
        found[name] = {
            "summary": kind.summary,
            "alone": dataclasses.asdict(alone),
            "launched": dataclasses.asdict(launched),
        }
    print(json.dumps(found))


def _check(name: str, launcher: str, size: int) -> int:
    """Prints why so many ranks cannot use a backend; returns the exit code."""
    try:
        check_name(name)
        if name == "auto":  # takes what there is
            return 0
        place = Environment(launcher, 0, size, 0, size)
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
