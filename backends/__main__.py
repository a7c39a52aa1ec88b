"""``python -m collective.backends [--json]``: which backends can be used here, and why not.

``--json`` is for programs, such as ``python -m collective.doctor``, which is a floor
below and so must not import this. It lists each backend as this process could use it,
and as two processes started by mpirun could.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from collective import backends
from collective.environment import Environment, detect


def main() -> None:
    """Prints the list."""
    parser = argparse.ArgumentParser(
        "python -m collective.backends", description=__doc__
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    if not parser.parse_args().json:
        backends.print_list()
        return
    places = {"alone": detect(), "launched": Environment("mpirun", 0, 2, 0, 2)}
    found: dict[str, dict[str, Any]] = {}
    for name, kind in backends.BACKENDS.items():
        found[name] = {"summary": kind.summary} | {
            when: dataclasses.asdict(kind.availability(environment))
            for when, environment in places.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
