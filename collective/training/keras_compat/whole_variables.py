"""Shows Keras variables that hold a shard as whole ones, to code that expects whole ones.

Inside ``whole_variables`` such a variable has the whole shape. The first read or write of
any of them fetches the whole values of all. Code that reads none, like most callbacks, costs
nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Values = Mapping[int, np.ndarray]
"""Whole values, by ``id`` of the variable."""


class Whole:
    """The variables inside ``whole_variables``: their shards, whole values and writes."""

    def __init__(
        self, variables: Sequence[keras.Variable], fetch: Callable[[], Values]
    ):
        self._variables = variables
        self._fetch = fetch
        self._shards: list[tf.Variable] = []
        self._before: Values = {}
        self._assigned: set[int] = set()
        self._fetching = False

    def fetch(self) -> None:
        """Give the variables their whole values, once."""
        if self._before or self._fetching:  # whole already, or it reads the shards now
            return
        self._fetching = True
        try:
            self._before = self._fetch()
        finally:
            self._fetching = False
        for variable in self._variables:
            self._shards.append(variable._value)
            whole = tf.Variable(self._before[id(variable)], dtype=variable._dtype)
            variable._value = whole

    def assigned(self, variable: keras.Variable) -> None:
        """Note that a variable gets another value."""
        self.fetch()
        self._assigned.add(id(variable))

    def written(self) -> dict[int, np.ndarray]:
        """Return the values of variables that were written; called inside."""
        if not self._before:
            return {}
        now = {id(v): np.asarray(v._value) for v in self._variables}
        return {
            key: value
            for key, value in now.items()
            if key in self._assigned or value.tobytes() != self._before[key].tobytes()
        }

    def put_back(self) -> None:
        """Give the variables their shards again."""
        for variable, shard in zip(self._variables, self._shards, strict=False):
            variable._value = shard


@contextlib.contextmanager
def whole_variables(
    variables: Sequence[tuple[keras.Variable, tuple[int, ...]]],
    fetch: Callable[[], Values],
) -> Iterator[Whole]:
    """Have variables that hold shards be whole inside.

    Args:
        variables: Each with its whole shape.
        fetch: Returns whole values of all; called once, if any is read or written.
    """
    whole = Whole([variable for variable, _ in variables], fetch)
    before = [(type(variable), variable._shape) for variable, _ in variables]
    for variable, shape in variables:
        variable._shape = shape
        object.__setattr__(variable, "_whole", whole)
        variable.__class__ = _fetching(type(variable))  # type: ignore[arg-type]
    try:
        yield whole
    finally:
        for (variable, _), (kind, shape) in zip(variables, before, strict=True):
            variable.__class__ = kind
            object.__delattr__(variable, "_whole")
            variable._shape = shape
        whole.put_back()


@functools.cache
def _fetching(kind: type[Any]) -> type[Any]:
    """Return a class of variables that fetch their whole value before a read or write."""

    class Fetching(kind):
        @property
        def value(self) -> Any:
            self._whole.fetch()
            return super().value

        def _direct_assign(self, value: Any) -> None:
            self._whole.assigned(self)
            super()._direct_assign(value)

    Fetching.__name__ = kind.__name__
    return Fetching
