#!/usr/bin/env python
"""Trains a Keras model; gradients are summed by the backend you name.

    python train.py
    python train.py --backend tf-mirrored
    mpirun -np 4 python train.py

Also ``python -m collective.train``. The options are in ``collective.train``.
"""

import sys

from collective.train import main

if __name__ == "__main__":
    sys.exit(main())
