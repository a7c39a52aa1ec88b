"""``collectiverun -np 4 python train.py``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

try:
    from collective import environment
    from collective.elastic import generations
    from collective.errors import CollectiveError
    from collective.launch import choosing, command_line, job, versions
    from collective.launch.output import print_message
    from collective.streams import open_streams
except KeyboardInterrupt:  # Ctrl-C right after the start prints no traceback
    raise SystemExit(130) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 if every rank returned 0; 2 for bad arguments; 130 if it was interrupted;
        else the exit code of the first rank that failed, or 128 + the signal that ended
        it.
    """
    open_streams()
    try:
        options = command_line.parse(arguments)
        if options.check_build:
            print(versions.check_build())
            return 0
        for warning in environment.unknown.warnings(os.environ):
            print_message(f"warning: {warning}")
        for name in generations.VARIABLES:
            os.environ.pop(name, None)  # set by the job that runs this launcher
        return job.run(choosing.choose(options))
    except CollectiveError as error:
        print_message(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # the ranks have not been started yet
        print_message("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
