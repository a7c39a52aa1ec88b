"""A pure pass over rows as a TensorFlow function, and what tracing it has found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collective.training.step.found import Found
from collective.training.traced import traced


class TracedPass:
    """A pass, traced once.

    It is traced outside any strategy: it touches no variable, and its outputs must be
    known before a loop over micro-batches is traced.

    Args:
        run: Returns sums, or other tensors, and what it has found.
    """

    def __init__(
        self,
        run: Callable[..., tuple[Any, Found]],
        signature: Sequence[Any],
        jit_compile: bool = False,
    ):
        records: list[Found] = []

        def sums(*args: Any) -> Any:
            result, found = run(*args)
            if not records:  # later calls are of a model that runs eagerly
                records.append(found)
            return result

        # The pass; returns the sums alone.
        self.function = traced(sums, input_signature=signature, jit_compile=jit_compile)
        self.concrete = self.function.get_concrete_function()  # as it was traced
        self.found = records[0]  # by the trace

    @property
    def shapes(self) -> Any:
        """Shapes and dtypes of the sums, or of what else the pass returns."""
        return self.concrete.structured_outputs
