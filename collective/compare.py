"""``python -m collective.compare``: the same as ``compare.py`` in a checkout."""

import sys

from collective.comparison.cli import main

if __name__ == "__main__":
    sys.exit(main())
