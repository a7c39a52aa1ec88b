"""A script's ``tf.function`` that takes gradients runs on each rank's rows."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import tensorflow as tf

from collective.training import keras_compat
from collective.training.unedited.job import Job
from collective.training.unedited.loops.check import agree
from collective.training.unedited.loops.notice import NOT_CUT
from collective.training.unedited.loops.rows import is_array
from collective.training.unedited.loops.step import RowStep, is_running, running

Found = RowStep | None


def replace_functions(job: Job) -> None:
    """From now on, a ``tf.function`` that takes gradients of a model's is a step."""
    owner = keras_compat.function_class()
    stock = owner.__call__
    steps: weakref.WeakKeyDictionary[Any, Found] = weakref.WeakKeyDictionary()

    @functools.wraps(stock)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nested = job.inside or is_running() or not tf.executing_eagerly()
        eager = tf.config.functions_run_eagerly()
        if nested or eager or not keras_compat.is_users(self):
            return stock(self, *args, **kwargs)
        if self not in steps:
            steps[self] = find_step(job, self, args, kwargs)
        step = steps[self]
        return step((args, kwargs)) if step else stock(self, *args, **kwargs)

    job.replace(owner, "__call__", call)


def find_step(job: Job, function: Any, args: Any, kwargs: Any) -> Found:
    """The step that a function is; None: it takes no gradients of a model's.

    One that only applies gradients has those of a step already, as where a script adds
    them up.
    """
    applied: list[Any] = []
    differentiated: list[Any] = []
    with (
        running(),
        keras_compat.record_applied(applied),
        keras_compat.record_differentiated(differentiated),
    ):
        function.get_concrete_function(*args, **kwargs)
    name = f"{getattr(function, '__name__', 'a tf.function')}()"
    if not differentiated:
        return None
    if not applied and not any(map(is_array, tf.nest.flatten((args, kwargs)))):
        job.warn_once(name, NOT_CUT, job.backend.size)
        return None
    weak = weakref.ref(function)

    def call(inputs: Any) -> Any:
        alive = weak()
        assert alive is not None, "it is being called"
        return alive(*inputs[0], **inputs[1])  # inlined: see keras_compat.intercept

    return RowStep(job, call, name, in_graph=True, agree=agree)
