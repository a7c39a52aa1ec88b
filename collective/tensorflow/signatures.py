"""Horovod's orders of arguments, which differ between its modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def ordered(
    order: str, options: Callable[..., Any] | None = None, module: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function take its arguments in another order; it gets them by name.

    Args:
        order: The names, with their new defaults. ``new=old`` names an argument that
            the function calls ``old``.
        options: The function that gets the ``**options``, whose defaults are used.
        module: The module of the result, if it is not the function's; for pickle.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        known = {**inspect.signature(function).parameters}
        if options is not None:
            known = {**inspect.signature(options).parameters, **known}
        pairs = [part.partition("=") for part in order.split()]
        old = {name: renamed or name for name, _, renamed in pairs}
        signature = inspect.Signature(
            [known[mine].replace(name=name) for name, mine in old.items()]
        )

        @tf.autograph.experimental.do_not_convert
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(**{old[name]: value for name, value in given.items()})

        call.__signature__ = signature
        call.__module__ = module or function.__module__
        return call

    return decorate
