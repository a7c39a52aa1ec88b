"""Runs programs one after another in one process, so that TensorFlow is imported once.

together.py FILE...
"""

import runpy
import sys

programs = sys.argv[1:]
for name in programs:
    print(f"== {name}", flush=True)
    sys.argv[1:] = []
    runpy.run_path(name, run_name="__main__")
