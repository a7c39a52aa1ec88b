"""Runs a script on every rank: ``python -m collective.distribute script.py``."""

import signal
import sys

# Until the script runs, Ctrl-C ends this process without a traceback of our imports.
if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from collective.distribute.command import main

if __name__ == "__main__":
    sys.exit(main())
