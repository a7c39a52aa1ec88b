"""What a step exchanges, noted while it is made."""

from __future__ import annotations

from collective.training import keras_compat
from collective.training.partition.graph import Value
from collective.training.partition.layouts import SUM


class Traffic:
    """What the replicas of an emitted graph exchange."""

    def __init__(self) -> None:
        self.sums: list[list[Value]] = []  # value by value, message by message
        self.gathers: list[Value] = []
        # What each rank has a piece of, and all need whole.
        self.joins: list[Value] = []
        # What is summed for its pieces alone.
        self.scattered: list[Value] = []
        self.broadcasts: list[Value] = []  # what all have as rank 0 made it
        # Others: of the program itself, along another axis, in the middle of an operation.
        self.in_groups = 0
        # Whether variables are written, and whether that is before the last exchange.
        self.writes = self.writes_early = False

    @property
    def exchanges(self) -> int:
        """Return how often something is exchanged."""
        of_values = len(self.gathers) + len(self.joins) + len(self.broadcasts)
        return len(self.sums) + of_values + self.in_groups


def names_of_first_sum(traffic: Traffic) -> list[str]:
    """Return for each tensor of the first sum whose gradient it becomes, or an empty name."""
    kinds = (values for values in traffic.sums if values[:1])
    first = next((v for v in kinds if v[0].layout == SUM), [])
    return [_name_of(value) for value in first]


def _name_of(value: Value, depth: int = 6) -> str:
    """Return the path of the variable whose gradient a value becomes, or nothing."""
    ahead = [value]
    for _ in range(depth):
        for found in ahead:
            if found.variable is not None:
                return keras_compat.model.path_of(found.variable)
        ahead = [out for v in ahead for node in v.users for out in node.outputs][:64]
    return ""
