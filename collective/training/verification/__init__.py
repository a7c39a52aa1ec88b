"""What the ranks are about to train is compared; and, where asked, with Keras' own step.

``compare_data``, ``compare_models`` and ``compare_graphs`` run before the first update.
``StockRun`` makes the first steps of a training by Keras, too (``verify``).
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
