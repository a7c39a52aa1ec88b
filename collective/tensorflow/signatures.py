"""Horovod's orders of arguments, of which each of its modules has its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf


def ordered(
    order: str, options: Callable[..., Any] | None = None, module: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a function take its arguments in another order; it gets them by name.

    Args:
        order: The names, with the defaults that they have now. ``new=old`` is what
            the function calls ``old``.
        options: What the function hands its ``**options`` to: they have its defaults.
        module: Where the result is, if not beside the function; pickle looks there.
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
