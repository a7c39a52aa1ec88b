"""Compares the trainings of all ranks before they begin; if asked, also with Keras' own step.

``ranks`` compares data, models and graphs before the first update. ``stock_run`` also
makes the first steps of a training by Keras' own step (``--verify``).
"""

from collective.training.verification.ranks import (
    compare_data,
    compare_graphs,
    compare_models,
    compare_settings,
)
from collective.training.verification.stock_run import (
    StockRun,
    can_run_beside,
    steps_beside,
)

__all__ = [
    "StockRun",
    "can_run_beside",
    "compare_data",
    "compare_graphs",
    "compare_models",
    "compare_settings",
    "steps_beside",
]
