"""What a step exchanges, noted while it is made."""

from __future__ import annotations

from collective.training.partition.graph import Value


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
