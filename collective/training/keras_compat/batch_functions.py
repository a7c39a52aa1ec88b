"""Replaces the functions that Keras' loops call with each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import keras

from collective.replacements import replacing

#: By the attribute that holds a function: the method of the model that it runs.
FUNCTIONS = {
    "train_function": "train_step",
    "test_function": "test_step",
    "predict_function": "predict_step",
}
_own = 0  # how many contexts ask for Keras' own functions
Make = Callable[[keras.Model, str], Any]
Step = Callable[[Any], Any]


class Eager(NamedTuple):
    """The step of Keras' own function, which ``make`` may return for a model that runs eagerly."""

    step: Step


@contextlib.contextmanager
def made_by(make: Make) -> Iterator[None]:
    """Have models get their train, test and predict functions from ``make``.

    A model keeps its functions until it is compiled again, as it keeps Keras' own.

    Args:
        make: Called with a model and the name of a method. It returns the function, an
            ``Eager`` step for Keras' own function, or None for Keras' function unchanged.
    """
    with contextlib.ExitStack() as stack:
        for attribute, method in FUNCTIONS.items():
            stack.enter_context(_made_by(make, attribute, method))
        yield


def forget(model: keras.Model) -> None:
    """Have Keras make the functions of a model anew: its variables are others now."""
    for attribute in FUNCTIONS:
        setattr(model, attribute, None)


@contextlib.contextmanager
def keras_own(
    model: keras.Model, kept: MutableMapping[str, Any] | None = None
) -> Iterator[None]:
    """Inside, models get Keras' own functions, and this one has none of ours.

    Args:
        kept: Functions that the model had in an earlier context, by attribute; those
            that it has at the end are added.
    """
    global _own
    kept = {} if kept is None else kept
    with contextlib.ExitStack() as stack:
        for attribute in FUNCTIONS:
            before = kept.get(attribute)
            stack.enter_context(replacing(model, attribute, before, new=True))
        _own += 1
        try:
            yield
        finally:
            _own -= 1
            kept.update({name: getattr(model, name, None) for name in FUNCTIONS})


def _made_by(
    make: Make, attribute: str, method: str
) -> contextlib.AbstractContextManager[None]:
    name = f"make_{attribute}"
    # Of Model, not of its trainer: the Horovod drop-in replaces what Model has.
    stock = getattr(keras.Model, name)

    def made(self: keras.Model, force: bool = False) -> Any:
        if getattr(self, attribute) is not None and not force:
            return getattr(self, attribute)
        function = None if _own else make(self, method)
        if function is None:
            return stock(self, force)
        if isinstance(function, Eager):
            with replacing(self, method, function.step):
                return stock(self, force)
        setattr(self, attribute, function)
        return function

    return replacing(keras.Model, name, made, new=True)
