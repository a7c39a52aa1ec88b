"""What ``horovodrun`` does here: Horovod's own launcher, with five things settled.

- Built with MPI, it hands the job to ``mpirun`` in the spelling of Open MPI 4
  (``-bind-to none``), which Open MPI 5 refuses. ``--binding-args``, an option of
  Horovod's, gives a spelling that both take.
- It tells ``mpirun`` that there is room for all ranks. With more of them than cores,
  each then spins on a core that another one needs; so they are told to yield.
- Ranks that ``mpirun`` starts cannot see that ``horovodrun`` was typed. A variable
  says so.
- With Gloo it ends with 1 whatever happened. The failing rank's exit code is passed.
- It takes no abbreviations: among them would be options of the program it starts, as
  ``--timeline``, which it would refuse as ambiguous.

All else, options and defaults too, is Horovod's.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from pathlib import Path

# Tells the ranks who started the job; collective/environment.py reads it.
MARK = "COLLECTIVE_HOROVODRUN"
YIELD = "OMPI_MCA_mpi_yield_when_idle"
# In front of the user's own options, so that theirs wins. Other MPIs ignore it.
BINDING = "--binding-args=--bind-to none --map-by slot"


def main() -> int | None:
    """Runs the command line, as ``.venv/bin/horovodrun``."""
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
        # With Gloo, Horovod's launcher knows the exit code and ends with 1 all the same.
        found = re.search(r"^Exit code: (\d+)", str(error), re.MULTILINE)
        if not found:
            raise
        print(error, file=sys.stderr)
        return int(found[1])


def install(scripts: Path) -> None:
    """Puts this in place of the ``horovodrun`` that came with Horovod.

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
