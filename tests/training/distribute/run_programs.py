"""Runs programs of ``examples/distribute/`` one after another, in one process or on ranks.

``run_programs.py HOW FOLDER [NAME ...]``; HOW is ``stock``, or the name of a backend with
``written`` (the strategy is ``collective.distribute.Strategy``) or ``unedited``:
``native:written``; ``native:written:2`` gives each rank two devices.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parents[3] / "examples" / "distribute"


def names() -> list[str]:
    return sorted(p.stem for p in PROGRAMS.glob("*.py") if p.stem != "common")


def main(how: str, folder: str, *wanted: str) -> None:
    sys.path.insert(0, str(PROGRAMS))
    backend, way, devices, *_ = [*how.split(":"), "", ""]
    given = None
    if way == "unedited":
        import collective

        collective.distribute_keras(backend)
    elif way == "written":
        from collective import backends

        given = backends.get(backend)
    for name in wanted or names():
        os.environ["OUT"] = os.path.join(folder, name)
        print("---", name, flush=True)
        if given is None:
            runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
            continue
        from collective.distribute import Strategy

        # In an unedited program: the strategy that the program would make.
        text = (PROGRAMS / f"{name}.py").read_text()
        one_host = "MultiWorker" not in text
        several = int(devices) if devices else None
        strategy = Strategy(given, several, one_host=one_host)
        importlib.import_module(name).main(strategy)


if __name__ == "__main__":
    main(*sys.argv[1:])
