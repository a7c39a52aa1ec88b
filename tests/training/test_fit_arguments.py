"""The arguments of ``keras.Model.fit``: each trains, reports, calls hooks as in Keras.

The reference is stock Keras, in one process, on the same data without a shuffle. Plain, this
file runs in one process; ``test_on_ranks`` starts it and the files of data and prediction on
several ranks.
"""

from __future__ import annotations

import csv
import functools
import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.errors import UsageError
from collective.training.calls import keras_fit
from tests import launch
from tests.training.small import NAMES, gather, model, rows

pytestmark = [
    pytest.mark.on_ranks,
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.filterwarnings("ignore"),
]
X, Y = rows()
X2, Y2 = rows(17, seed=2)


@pytest.fixture(params=NAMES[:1])
def backend(request, backends_by_name):
    return backends_by_name(request.param)


def both(backend, data, make=None, **words):
    """Check that history and weights of Keras and of ours are equal; return ours."""
    make = make or model()
    words = {"verbose": 0, "shuffle": False} | words
    again = data if callable(data) else lambda: data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone, made = make(), make()
        wanted = alone.fit(*again(), **words)
        got = collective.fit(made, *again(), backend=backend, **words)
    assert list(got.history) == list(wanted.history)
    assert (got.epoch, got.params) == (wanted.epoch, wanted.params)
    for name, values in wanted.history.items():
        np.testing.assert_allclose(
            got.history[name], values, rtol=1e-5, atol=2e-6, err_msg=name
        )
    for value, other in zip(made.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=5e-6)
    assert isinstance(got, keras.callbacks.History)
    assert made.history is got and got.model is made
    message = gather(backend, got.history)
    assert all(other == message[0] for other in message)
    return got


WORDS = {
    "defaults": {"epochs": 3},
    "batch_size": {"batch_size": 10, "epochs": 2},
    "validation_split": {"batch_size": 10, "epochs": 2, "validation_split": 0.25},
    "validation_freq": {
        "epochs": 4,
        "validation_data": (X2, Y2),
        "validation_freq": 2,
    },
    "validation_freq_list": {
        "epochs": 4,
        "validation_data": (X2, Y2, np.linspace(0, 1, 17)),
        "validation_freq": [1, 4],
    },
    "validation_steps": {
        "epochs": 2,
        "validation_data": (X2, Y2),
        "validation_steps": 2,
        "validation_batch_size": 5,
    },
    "class_weight": {"epochs": 2, "class_weight": {0: 2.0, 1: 0.5}},
    "sample_weight": {"epochs": 2, "sample_weight": np.linspace(0, 1, 53)},
    "initial_epoch": {"epochs": 5, "initial_epoch": 2},
    "nothing_left": {"epochs": 2, "initial_epoch": 2},
    "steps_per_epoch": {"batch_size": 10, "epochs": 4, "steps_per_epoch": 2},
    "steps_that_do_not_divide": {"batch_size": 10, "epochs": 5, "steps_per_epoch": 4},
    "too_many_steps": {"batch_size": 10, "epochs": 2, "steps_per_epoch": 9},
    "steps_without_a_size": {"epochs": 2, "steps_per_epoch": 5},
}


@pytest.mark.parametrize("name", WORDS)
def test_arguments_mean_what_they_mean_in_keras(backend, name):
    both(backend, (X, Y), **WORDS[name])


@pytest.mark.parametrize(
    "words", [{"run_eagerly": True}, {"steps_per_execution": 4}, {"jit_compile": False}]
)
def test_arguments_of_compile(backend, words):
    both(backend, (X, Y), model(**words), epochs=2, batch_size=10)


def test_a_step_that_xla_does_not_compile_says_so_once(backend, caplog):
    keras_fit._say_not_compiled.cache_clear()
    for _ in range(2):
        collective.fit(model()(), X, Y, backend=backend, verbose=0, jit_compile=True)
    said = [r for r in caplog.records if "XLA does not compile" in r.getMessage()]
    assert len(said) == (backend.rank == 0)


class Reshuffled(keras.utils.PyDataset):
    """Has another order of batches after each epoch, as users write it."""

    def __init__(self):
        super().__init__()
        self.rng, self.order = np.random.default_rng(5), np.arange(len(X))

    def __len__(self):
        return 4

    def __getitem__(self, number):
        chosen = self.order[number * 8 : number * 8 + 8]
        return X[chosen], Y[chosen]

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


def test_a_data_set_that_shuffles_itself(backend):
    """Keras calls ``on_epoch_end`` once before the first epoch, and in ``evaluate``."""
    made = []

    def data():
        made.append(Reshuffled())
        return (made[-1],)

    got = both(backend, data, epochs=2)
    theirs, ours = made
    np.testing.assert_array_equal(ours.order, theirs.order)
    collective.evaluate(got.model, ours, backend=backend, verbose=0)
    theirs.on_epoch_end(), theirs.on_epoch_end()
    np.testing.assert_array_equal(ours.order, theirs.order)


def recorder():
    """Return a callback that overrides every hook, and the list of calls."""
    calls: list = []

    class Recorder(keras.callbacks.Callback):
        pass

    def add(name):
        def hook(self, *given, **named):
            logs = named.get("logs", given[-1] if given else None)
            logs = logs if isinstance(logs, dict) else {}
            numbers = [n for n in given if isinstance(n, int)]
            floats = {k: v for k, v in logs.items() if isinstance(v, float)}
            calls.append((name, *numbers, list(logs), floats))

        setattr(Recorder, name, hook)

    of = ("train", "epoch", "train_batch", "test", "test_batch", "predict")
    for what, when in itertools.product((*of, "predict_batch"), ("begin", "end")):
        add(f"on_{what}_{when}")
    return Recorder(), calls


@pytest.mark.parametrize(
    ("form", "together"), [(lambda c: c, 1), (lambda c: [c], 4), (lambda c: [[c]], 1)]
)
def test_hooks_and_their_logs_are_those_of_keras(backend, together, form):
    make = model(steps_per_execution=together)
    words = {"shuffle": False, "verbose": 0, "batch_size": 10, "epochs": 2}
    words |= {"validation_data": (X2, Y2), "validation_batch_size": 5}
    (wanting, wanted), (getting, got) = recorder(), recorder()
    alone, made = make(), make()
    alone.fit(X, Y, callbacks=form(wanting), **words)
    alone.evaluate(X, Y, batch_size=10, callbacks=form(wanting), verbose=0)
    alone.predict(X, batch_size=10, callbacks=form(wanting), verbose=0)
    ours = {"backend": backend, "callbacks": form(getting)}
    collective.fit(made, X, Y, **words, **ours)
    collective.evaluate(made, X, Y, batch_size=10, verbose=0, **ours)
    collective.predict(made, X, batch_size=10, verbose=0, **ours)
    # On each rank, because other ranks' callbacks get the records of rank 0's.
    assert [call[:-1] for call in got] == [call[:-1] for call in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine[-1] == pytest.approx(theirs[-1], rel=1e-4, abs=1e-5), mine


def test_callbacks_of_keras_do_what_they_do_there(backend, tmp_path):
    named = keras.callbacks

    def train(run, folder):
        folder.mkdir()
        made = model()()
        history = run(
            made,
            X,
            Y,
            epochs=8,
            batch_size=10,
            shuffle=False,
            verbose=0,
            validation_split=0.2,
            callbacks=[
                named.EarlyStopping("val_loss", patience=1, min_delta=0.02),
                named.ModelCheckpoint(f"{folder}/{{epoch}}.keras"),
                named.ReduceLROnPlateau("loss", patience=1, min_delta=0.3),
                named.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
                named.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
                named.CSVLogger(f"{folder}/log.csv"),
                named.BackupAndRestore(f"{folder}/kept", delete_checkpoint=False),
            ],
        )
        assert list(history.history)[-1] == "learning_rate"
        return history

    wanted = train(lambda made, *a, **k: made.fit(*a, **k), tmp_path / "keras")
    got = train(
        lambda made, *a, **k: collective.fit(made, *a, backend=backend, **k),
        tmp_path / "ours",
    )
    assert got.epoch == wanted.epoch and 1 < len(got.epoch) < 8
    assert list(got.history) == list(wanted.history)
    for name, values in wanted.history.items():
        np.testing.assert_allclose(got.history[name], values, rtol=1e-4, err_msg=name)
    written = [
        {f.name for f in (tmp_path / which).iterdir()} for which in ("ours", "keras")
    ]
    assert written[0] == (written[1] if backend.rank == 0 else set())
    if backend.rank == 0:
        heads = [
            next(csv.reader((tmp_path / which / "log.csv").open()))
            for which in ("ours", "keras")
        ]
        assert heads[0] == heads[1]


def test_a_variable_outside_the_model_that_a_callback_sets(backend):
    """It may be the weight of a term that grows from epoch to epoch."""
    scale = keras.Variable(1.0)

    def loss(y, p):
        logits = keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)
        return scale * logits

    class Grows(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            scale.assign(0.5 + epoch)

    make = model(lambda: keras.optimizers.SGD(0.1), loss=loss)
    both(backend, (X, Y), make, epochs=3, callbacks=[Grows()])
    assert gather(backend, float(scale)) == [2.5] * backend.size


def test_a_layer_that_a_callback_freezes(backend):
    """As in Keras, it is too late for the compiled step; the ranks stay equal."""

    class Freezes(keras.callbacks.Callback):
        def __init__(self, hook):
            super().__init__()
            setattr(self, hook, self.freeze)

        def freeze(self, *_, **__):
            self.model.layers[0].trainable = False

    made = both(backend, (X, Y), epochs=3, callbacks=Freezes("on_epoch_end")).model
    assert not made.layers[0].trainable
    with pytest.raises(UsageError, match=r"has changed layer\.trainable"):
        words = {"callbacks": Freezes("on_train_begin"), "verbose": 0}
        collective.fit(model()(), X, Y, backend=backend, **words)


def test_a_stateful_layer(backend):
    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.GRU(4, stateful=True), keras.layers.Dense(3)]
        made = keras.Sequential([keras.Input(batch_shape=(4, 5, 6)), *layers])
        logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.SGD(0.1), logits)
        return made

    x = np.random.default_rng(0).normal(size=(12, 5, 6)).astype("float32")
    model, alone = make(), make()
    collective.fit(model, x, Y[:12], 4, backend=backend, verbose=0, shuffle=False)
    alone.fit(x, Y[:12], 4, verbose=0, shuffle=False)
    for value, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)


def test_code_that_cannot_be_traced(backend):
    class Reads(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x * float(x.numpy().max() > 0))

    def make():
        keras.utils.set_random_seed(3)
        made = Reads()
        made.compile("sgd", "mse", run_eagerly=True)
        return made

    if backend.replicas > 1:  # replicas of one process are traced together
        with pytest.raises(UsageError, match="it cannot be traced even once"):
            collective.fit(make, X, Y, backend=backend, verbose=0)
        return
    model, alone, y = make(), make(), Y[:, None].astype("float32")
    collective.fit(model, X, y, backend=backend, verbose=0, shuffle=False)
    alone.fit(X, y, verbose=0, shuffle=False)
    for value, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-7)


def test_python_code_runs_in_each_step_of_a_model_that_runs_eagerly(backend):
    seen = []

    class Counts(keras.layers.Layer):
        def call(self, x):
            seen.append(tf.executing_eagerly())
            return x

    make = model(None, Counts(), run_eagerly=True)
    collective.fit(make(), X, Y, 10, 2, backend=backend, verbose=0, verify=False)
    assert seen.count(True) == 12


class Power(Exception):
    """An exception of the user's code."""


def test_what_a_callback_raises_every_rank_raises_and_backup_goes_on(backend, tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise Power("off")

    def run(train, folder):
        words = {"epochs": 4, "shuffle": False, "verbose": 0}
        kept = keras.callbacks.BackupAndRestore(str(folder))
        with pytest.raises(Power, match="off"):
            train(model()(), X, Y, callbacks=[kept, Fails()], **words)
        made = model()()
        kept = keras.callbacks.BackupAndRestore(str(folder))
        return train(made, X, Y, callbacks=kept, **words), made.get_weights()

    def ours(made, *data, **words):
        return collective.fit(made, *data, backend=backend, **words)

    history, weights = run(ours, tmp_path / "ours")
    wanted, theirs = run(lambda made, *a, **k: made.fit(*a, **k), tmp_path / "keras")
    assert history.epoch == wanted.epoch == [2, 3]
    for value, other in zip(weights, theirs, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_an_unknown_argument_names_the_call_and_what_was_meant(call):
    with pytest.raises(
        TypeError, match=rf"collective.{call}\(\) got .* 'batchsize'"
    ) as e:
        getattr(collective, call)(model()(), X, batchsize=3)
    assert str(e.value).endswith("HINT: did you mean batch_size?")


def test_rows_in_one_value(backend):
    """``data=`` and ``global_batch_size=``; a tuple in place of x means inputs, as in Keras."""
    words = {"epochs": 2, "verbose": 0, "backend": backend, "shuffle": False}
    new = collective.fit(model()(), X, Y, batch_size=10, **words)
    for old in (
        collective.fit(model()(), (X, Y), global_batch_size=10, **words),
        collective.fit(model()(), data=(X, Y), global_batch_size=10, **words),
    ):
        assert old.losses == new.losses and old.history == new.history
    with pytest.raises(ValueError, match="None values not supported"):  # Keras' own
        collective.fit(model()(), (X, Y), **words)
    with pytest.raises(UsageError, match="are the same"):
        collective.fit(model()(), X, Y, batch_size=3, global_batch_size=3, **words)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((None,), {}),
        ((X, Y), {"class_weight": {0: 1.0}, "sample_weight": Y}),
        ((X, Y), {"validation_split": 1.0}),
        ((X, Y[1:]), {}),
        ((X, Y), {"validation_data": (X,) * 4}),
    ],
)
def test_errors_of_arguments_are_those_of_keras(backend, data, words):
    errors = []
    for fit in (keras.Model.fit, functools.partial(collective.fit, backend=backend)):
        with pytest.raises(Exception) as error:
            fit(model()(), *data, verbose=0, **words)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


# Tests that may differ between ranks, or in which one may wait for ever.
BRIEFLY = {
    "test_fit_arguments": "callback or stateful or divide",
    "test_kinds": "unknown or infinite or no_row",
    "evaluation/test_predict": "ragged or zero or ends_a_pass",
}


@pytest.mark.launches
@pytest.mark.parametrize(
    "ranks, whole",
    [
        (2, False),
        *(pytest.param(ranks, True, marks=pytest.mark.matrix) for ranks in (2, 3)),
    ],
)
def test_on_ranks(ranks, whole, tmp_path):
    pytest.importorskip("mpi4py")
    files = [f"tests/training/{file}.py" for file in BRIEFLY]
    chosen = [] if whole else ["-k", " or ".join(BRIEFLY.values())]
    ended = launch.launch("native", ranks, [*files, *chosen], tmp_path, seconds=1500)
    assert ended.passed(skips=True)
    outcomes = ended.outcomes[0].items()
    for file in files:
        passed = [t for t, how in outcomes if t.startswith(file) and how == "passed"]
        assert len(passed) >= (20 if whole else 4), file
