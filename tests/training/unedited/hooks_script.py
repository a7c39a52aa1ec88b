"""Prints every call of hooks, resets and reads of data in many programs, one line a program.

    python hooks_script.py                             stock Keras
    collectiverun -np 2 --keras hooks_script.py        ranks

Data are read ahead by threads, so their reads are a list of their own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH = 22, 8  # the last batch is shorter
X = np.random.default_rng(0).normal(size=(ROWS, 3))
Y = X.sum(axis=1, keepdims=True)
calls: list[str] = []
reads: list[str] = []


def hook(name: str) -> Callable[..., None]:
    """Return a hook that notes its arguments, and the names of its logs."""

    def note(self: Noting, *args: Any, logs: Any = None) -> None:
        shown = [sorted(a) if isinstance(a, dict) else a for a in (*args, logs)]
        calls.append(f"{self.name}.{name[3:]}({','.join(map(str, shown))})")
        self.after(name, args)

    return note


class Noting(keras.callbacks.Callback):
    """Notes the calls of all hooks; may do something in one of them."""

    def __init__(self, name: str = "a", when: str = "", act: Any = None):
        super().__init__()
        self.name, self._when, self._act = name, when, act

    def after(self, name: str, args: Any) -> None:
        if name == self._when:
            self._act(self.model)

    def set_params(self, params: Any) -> None:
        calls.append(f"{self.name}.set_params({sorted(params.items())})")
        super().set_params(params)


for part, end in itertools.product(("train", "test", "predict"), ("begin", "end")):
    for name in (f"on_{part}_{end}", f"on_{part}_batch_{end}"):
        setattr(Noting, name, hook(name))
for name in ("on_epoch_begin", "on_epoch_end"):
    setattr(Noting, name, hook(name))


class Error(keras.metrics.MeanAbsoluteError):
    """A metric that notes its resets."""

    def reset_state(self) -> None:
        calls.append("reset")
        super().reset_state()


class Items(keras.utils.PyDataset):
    """Batches by number; notes which are read, and the ends of epochs."""

    def __init__(self, name: str = "items"):
        super().__init__()
        self._name = name

    def __len__(self) -> int:
        return -(-ROWS // BATCH)

    def __getitem__(self, index: int) -> Any:
        reads.append(f"{self._name}[{index}]")
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]

    def on_epoch_begin(self) -> None:
        reads.append(f"{self._name}.begin")

    def on_epoch_end(self) -> None:
        reads.append(f"{self._name}.end")


def batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def generated() -> Iterator[Any]:
    for index in itertools.cycle(range(3)):
        reads.append(f"next {index}")
        rows = slice(index * BATCH, (index + 1) * BATCH)
        yield X[rows], Y[rows]


class Own(keras.Model):
    """A model of which each method that Keras calls notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def reset_metrics(self) -> None:
        calls.append("reset_metrics")
        super().reset_metrics()

    def make_train_function(self, force: bool = False) -> Any:
        calls.append("make_train_function")
        return super().make_train_function(force)


def made(kind: Any = None, **options: Any) -> keras.Model:
    """Return a compiled model with a metric that notes its resets."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(1)]
    model = keras.Sequential(layers) if kind is None else kind()
    model.compile("sgd", "mse", metrics=[Error(name="mae")], **options)
    return model


def fit(*args: Any, model: Any = None, **options: Any) -> Callable[[], Any]:
    """Return a program that fits a model with a callback that notes."""

    def run() -> None:
        trained = made() if model is None else model()
        given = [a() if callable(a) else a for a in args]
        more = {k: v() if callable(v) else v for k, v in options.items()}
        callbacks = more.pop("callbacks", [Noting()])
        trained.fit(*given, callbacks=callbacks, verbose=0, **more)

    return run


def call(method: str, *args: Any, **options: Any) -> Callable[[], Any]:
    """Return a program that calls another method, with a callback that notes."""

    def run() -> None:
        given = [a() if callable(a) else a for a in args]
        getattr(made(), method)(*given, callbacks=[Noting()], verbose=0, **options)

    return run


def stops(model: keras.Model) -> None:
    model.stop_training = True


def stops_evaluating(model: keras.Model) -> None:
    model.stop_evaluating = True


def stops_predicting(model: keras.Model) -> None:
    model.stop_predicting = True


def raises(model: keras.Model) -> None:
    raise RuntimeError("of a callback")


def at(when: str, act: Any) -> Callable[[], list[Noting]]:
    return lambda: [Noting("a", when, act), Noting("b")]


def caught(program: Callable[[], Any]) -> Callable[[], None]:
    """Return a program that catches the error of another one."""

    def run() -> None:
        try:
            program()
        except RuntimeError as error:
            calls.append(f"{type(error).__name__}: {error}")

    return run


def twice() -> None:
    model = made()
    for _ in range(2):
        model.fit(X, Y, BATCH, callbacks=[Noting()], verbose=0)
    model.evaluate(X, Y, BATCH, callbacks=[Noting("e")], verbose=0)
    model.predict(X, BATCH, callbacks=[Noting("p")], verbose=0)


def on_batches() -> None:
    model = made()
    for _ in range(2):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        model.test_on_batch(X[:BATCH], Y[:BATCH])
        model.predict_on_batch(X[:BATCH])


def by_list() -> None:
    model = made()
    given = keras.callbacks.CallbackList([Noting()], model=model, add_history=True)
    model.fit(X, Y, BATCH, callbacks=given, verbose=0)


def early() -> list[Any]:
    stop = keras.callbacks.EarlyStopping("loss", min_delta=1e6, patience=1)
    return [Noting(), stop, Noting("b")]


def evaluates(model: keras.Model) -> None:
    model.evaluate(X[:5], Y[:5], callbacks=[Noting("inner")], verbose=0)


XY = (X, Y, BATCH)
PROGRAMS: dict[str, Callable[[], Any]] = {
    "arrays": fit(*XY, epochs=2),
    "data set": fit(batches, epochs=2),
    "items": fit(Items, epochs=2),
    "items without shuffle": fit(Items, epochs=2, shuffle=False),
    "generator": fit(generated, steps_per_epoch=3, epochs=2),
    "endless data set": fit(
        lambda: batches().repeat(), steps_per_epoch=4, epochs=2, initial_epoch=1
    ),
    "steps of arrays": fit(*XY, steps_per_epoch=2, epochs=3),
    "steps of a data set": fit(batches, steps_per_epoch=2, epochs=2),
    "steps of items": fit(Items, steps_per_epoch=2, epochs=2, shuffle=False),
    "validated arrays": fit(*XY, validation_data=(X, Y), epochs=2),
    "validated split": fit(*XY, validation_split=0.3, epochs=2),
    "validated by items": fit(
        Items, validation_data=lambda: Items("val"), epochs=2, shuffle=False
    ),
    "validated by a data set": fit(*XY, validation_data=batches, epochs=2),
    "validated by a generator": fit(
        *XY, validation_data=generated, validation_steps=2, epochs=2
    ),
    "validated at times": fit(*XY, validation_data=(X, Y), validation_freq=2, epochs=3),
    "validated in some epochs": fit(
        *XY, validation_data=(X, Y), validation_freq=[1, 3], epochs=3
    ),
    "validated in steps": fit(
        *XY, validation_data=batches, validation_steps=2, validation_batch_size=4
    ),
    "class weights": fit(X, (Y > 0).astype(float), class_weight={0: 1.0, 1: 2.0}),
    "sample weights": fit(*XY, sample_weight=np.ones(ROWS)),
    "several steps": fit(
        *XY, epochs=2, model=lambda: made(steps_per_execution=2), validation_split=0.5
    ),
    "several steps of items": fit(
        Items, shuffle=False, model=lambda: made(steps_per_execution=2)
    ),
    "eager": fit(*XY, model=lambda: made(run_eagerly=True), validation_data=(X, Y)),
    "own model": fit(*XY, epochs=2, model=lambda: made(Own), validation_data=(X, Y)),
    "own eager model": fit(*XY, model=lambda: made(Own, run_eagerly=True)),
    "stop in a batch": fit(
        *XY, epochs=3, callbacks=at("on_train_batch_end", stops), validation_split=0.3
    ),
    "stop before a batch": fit(*XY, callbacks=at("on_train_batch_begin", stops)),
    "stop in an epoch": fit(*XY, epochs=3, callbacks=at("on_epoch_end", stops)),
    "stop at the beginning": fit(*XY, epochs=3, callbacks=at("on_train_begin", stops)),
    "early stopping": fit(*XY, epochs=4, callbacks=early),
    "no more validation": fit(
        *XY, validation_data=(X, Y), callbacks=at("on_test_batch_end", stops_evaluating)
    ),
    "evaluates between": fit(*XY, callbacks=at("on_epoch_end", evaluates)),
    "raises in a batch": caught(
        fit(*XY, epochs=2, callbacks=at("on_train_batch_end", raises))
    ),
    "raises in a validation": caught(
        fit(*XY, validation_data=(X, Y), callbacks=at("on_test_begin", raises))
    ),
    "raises at the end": caught(fit(*XY, callbacks=at("on_train_end", raises))),
    "evaluate": call("evaluate", X, Y, BATCH),
    "evaluate a data set": call("evaluate", batches, steps=2),
    "evaluate items": call("evaluate", Items),
    "evaluate a generator": call("evaluate", generated, steps=3),
    "predict": call("predict", X, BATCH),
    "predict a data set": call("predict", batches, steps=2),
    "predict items": call("predict", Items),
    "stop predicting": lambda: made().predict(
        X,
        BATCH,
        verbose=0,
        callbacks=[Noting("a", "on_predict_batch_end", stops_predicting)],
    ),
    "twice": twice,
    "on batches": on_batches,
    "a list of callbacks": by_list,
}


def main() -> None:
    keras.config.set_floatx("float64")
    for name, program in PROGRAMS.items():
        calls.clear()
        reads.clear()
        program()
        print("PROGRAM", json.dumps([name, calls, reads]), flush=True)


if __name__ == "__main__":
    main()
