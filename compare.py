#!/usr/bin/env python
"""Trains the same model on every backend: is it equal, and which is fastest?

    python compare.py -np 4

Also ``python -m collective.compare``. The options are in ``collective.compare``.
"""

import sys

from collective.compare import main

if __name__ == "__main__":
    sys.exit(main())
