"""The step proves itself before it trains, and the ranks that they train alike.

``verify_step`` compares the shared step with Keras' own on a few rows; ``compare_data``,
``compare_models`` and ``compare_graphs`` compare what the ranks are about to do. All run
before the first update. ``StockRun`` makes the first steps of a training by Keras, too.
"""

from collective.training.verification.predictions import couples_rows
from collective.training.verification.ranks import (
    compare_data,
    compare_graphs,
    compare_models,
    compare_settings,
)
from collective.training.verification.verify import is_wanted, verify_step, verify_test
from collective.training.verification.whole_run import (
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
    "couples_rows",
    "is_wanted",
    "steps_beside",
    "verify_step",
    "verify_test",
]
