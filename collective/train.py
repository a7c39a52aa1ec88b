"""``python -m collective.train``: the same as ``train.py`` in a checkout."""

import sys

from collective.training.cli import main

if __name__ == "__main__":
    sys.exit(main())
