"""The ``horovodrun`` of this environment: Horovod's own launcher, with five changes.

- Built with MPI, it hands the job to ``mpirun`` in the spelling of Open MPI 4
  (``-bind-to none``), which Open MPI 5 refuses. ``--binding-args``, an option of
  Horovod's, gives a spelling that both take.
- It allows ``mpirun`` more ranks than cores. Each of them would spin on a core that
  another rank needs; so a variable makes idle ranks yield.
- Ranks that ``mpirun`` starts cannot see that the user typed ``horovodrun``. A variable
  says so.
- With Gloo it always ends with 1. Here it ends with the failing rank's exit code.
- It takes no abbreviated options: options of the program that it starts, such as
  ``--timeline``, would be refused as ambiguous.

Everything else, options and defaults too, is Horovod's.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from pathlib import Path

# Set for the ranks of horovodrun; collective/environment reads it.
MARK = "COLLECTIVE_HOROVODRUN"
YIELD = "OMPI_MCA_mpi_yield_when_idle"
# Before the user's own options, so that theirs win. Other MPIs ignore it.
BINDING = "--binding-args=--bind-to none --map-by slot"


def main() -> int | None:
    """Run the command line, as ``.venv/bin/horovodrun``."""
    from horovod.runner.launch import run_commandline

    os.environ[MARK] = "1"
    os.environ.setdefault(YIELD, "1")
    sys.argv.insert(1, BINDING)
    whole = functools.partialmethod(
        argparse.ArgumentParser.__init__, allow_abbrev=False
    )
    argparse.ArgumentParser.__init__ = whole  # type: ignore[assignment, method-assign]
    try:
        return run_commandline()
    except RuntimeError as error:
        # With Gloo, Horovod's launcher knows the exit code and still ends with 1.
        found = re.search(r"^Exit code: (\d+)", str(error), re.MULTILINE)
        if not found:
            raise
        print(error, file=sys.stderr)
        return int(found[1])


def install(scripts: Path) -> None:
    """Put this in place of the ``horovodrun`` that came with Horovod.

    Args:
        scripts: The folder of the environment's programs.
    """
    program = scripts / "horovodrun"
    program.write_text(
        f"#!{sys.executable}\n"
        "# Horovod's launcher, called by way of backends/horovod/run.py.\n"
        "import sys\n\n"
        "from collective.backends.horovod.run import main\n\n"
        'if __name__ == "__main__":  # Horovod starts processes that import this\n'
        "    sys.exit(main())\n"
    )
    program.chmod(0o755)
