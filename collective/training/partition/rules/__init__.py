"""A rule for each type of operation: the layouts that it takes and gives.

``collective.training.partition.propagation`` has what a rule is given and returns. One
file for each family; ``elementwise`` is the one to begin with. Importing this package
declares all of them.
"""

from collective.training.partition.rules import (
    by_rows,
    channels,
    classes,
    control_flow,
    crops,
    diagonals,
    effects,
    elementwise,
    exchanges,
    handles,
    indexing,
    lists,
    look_ups,
    moments,
    orders,
    owned,
    picked,
    products,
    random,
    recurrent,
    reductions,
    segments,
    shapes,
    slices,
    text,
)

__all__ = [
    "by_rows",
    "channels",
    "classes",
    "control_flow",
    "crops",
    "diagonals",
    "effects",
    "elementwise",
    "exchanges",
    "handles",
    "indexing",
    "lists",
    "look_ups",
    "moments",
    "orders",
    "owned",
    "picked",
    "products",
    "random",
    "recurrent",
    "reductions",
    "segments",
    "shapes",
    "slices",
    "text",
]
