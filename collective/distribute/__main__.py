"""Runs a script on every rank: ``python -m collective.distribute script.py``."""

import sys

from collective.distribute.command import main

if __name__ == "__main__":
    sys.exit(main())
