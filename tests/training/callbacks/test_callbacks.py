"""Ordinary Keras callbacks in a job of many ranks: all follow one decision.

Plain, it runs in one process; ``test_fit.test_on_ranks`` runs this file on several. Each rank
has a folder of its own, so that a file written by another rank than 0 is found.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.errors import CollectiveError
from tests import launch
from tests.training.small import (
    NAMES,
    PER_EPOCH,
    assert_ranks_agree,
    gather,
    learning_rate,
    model,
    rows,
    train,
)

pytestmark = pytest.mark.usefixtures("clean_keras")


@pytest.fixture(params=NAMES[:1])  # in one process all are equal
def backend(request, backends_by_name):
    return backends_by_name(request.param)


class Scores(keras.callbacks.Callback):
    """Puts given scores into the logs for a later callback."""

    def __init__(self, *scores):
        super().__init__()
        self.scores = scores

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]


class Predicts(keras.callbacks.Callback):
    """Predicts and evaluates by Keras' own methods, between epochs and batches."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.seen = x, y, []

    def on_train_batch_end(self, batch, logs=None):
        self.model.predict_on_batch(self.x)

    def on_epoch_end(self, epoch, logs=None):
        predicted = self.model.predict(self.x, verbose=0).sum()
        found = self.model.evaluate(self.x, self.y, verbose=0, return_dict=True)
        self.seen.append([found["loss"], predicted])


def test_a_callback_calls_keras_own_methods(backend):
    """They run on rank 0 alone; the training's functions are not theirs."""
    x, y = rows()
    predicts = Predicts(x, y)
    words = {"backend": backend, "epochs": 2, "verbose": 0, "callbacks": predicts}
    result = collective.fit(model(), x, y, validation_data=(x, y), **words)
    losses, sums = zip(*predicts.seen, strict=True)
    np.testing.assert_allclose(losses, result.history["val_loss"], rtol=1e-5)
    predicted = collective.predict(result.model, x, backend=backend, verbose=0).sum()
    np.testing.assert_allclose(sums[-1], predicted, rtol=1e-4)
    assert_ranks_agree(backend, result)


class Weights(keras.callbacks.Callback):
    """Stores the weights of each epoch."""

    def __init__(self):
        super().__init__()
        self.of_epoch = []

    def on_epoch_end(self, epoch, logs=None):
        self.of_epoch.append(self.model.get_weights())


def files(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def written_once(backend, folder: Path) -> list[str]:
    """Return the files of rank 0; check that no other rank has written files."""
    first, *others = gather(backend, files(folder))
    assert not any(others)
    return first


def test_metrics_are_read_as_in_keras(backend):
    """They are read in hooks of batches and epochs, and after the training."""

    class Reads(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.batches, self.epochs = [], []

        def on_train_batch_end(self, batch, logs=None):
            self.batches.append([float(m.result()) for m in self.model.metrics[:1]])
            assert self.batches[-1] == pytest.approx([logs["loss"]], rel=1e-6)

        def on_epoch_end(self, epoch, logs=None):
            self.epochs.append(float(self.model.metrics[0].result()))
            assert self.epochs[-1] == pytest.approx(logs["loss"], rel=1e-6)

    reads = Reads()
    result = train(backend, callbacks=[reads], epochs=2)
    loss = result.history["loss"][-1]
    if backend.rank == 0:
        assert len(reads.batches) == 2 * PER_EPOCH and len(reads.epochs) == 2
    assert float(result.model.metrics[0].result()) == pytest.approx(loss, rel=1e-6)


def test_early_stopping_is_followed_and_restores_the_best_weights(backend):
    weights = Weights()
    stopping = keras.callbacks.EarlyStopping(
        "score", patience=2, mode="max", restore_best_weights=True
    )
    scores = Scores(1.0, 3.0, 2.0, 2.5, 9.0, 9.0)
    result = train(backend, [scores, stopping, weights], epochs=6)
    assert_ranks_agree(backend, result)
    assert len(result.losses) == 4 * PER_EPOCH
    assert len(result.history["loss"]) == 4
    best, last = gather(backend, weights.of_epoch[1::2] if backend.rank == 0 else None)[
        0
    ]
    for value, wanted in zip(result.model.get_weights(), best, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert not np.array_equal(best[0], last[0])


def test_early_stopping_on_exact_validation_loss(backend):
    stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=1e3, patience=1)
    result = train(backend, [stopping], validate=True)
    assert_ranks_agree(backend, result)
    assert len(result.losses) == 2 * PER_EPOCH


@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_model_checkpoint_saves_once_and_what_was_trained(backend, save_freq, tmp_path):
    path = str(tmp_path / "{epoch}.keras")
    callback = keras.callbacks.ModelCheckpoint(path, save_freq=save_freq)
    result = train(backend, [callback])
    assert_ranks_agree(backend, result)
    found = written_once(backend, tmp_path)
    assert found == [f"{epoch}.keras" for epoch in (1, 2, 3, 4)]
    x, _ = rows(9, seed=3)
    after = gather(backend, np.array(result.model(x)))
    if backend.rank == 0:  # save_freq=4: 24 steps, so the last save is the last step
        loaded = keras.models.load_model(tmp_path / "4.keras")
        np.testing.assert_array_equal(np.array(loaded(x)), after[0])
        assert int(loaded.optimizer.iterations) == len(result.losses)
    for value in after:
        np.testing.assert_array_equal(value, after[0])


def test_model_checkpoint_keeps_the_best_weights_only(backend, tmp_path):
    path = str(tmp_path / "best.weights.h5")
    weights = Weights()
    best = keras.callbacks.ModelCheckpoint(
        path, "score", save_best_only=True, save_weights_only=True, mode="min"
    )
    train(backend, [Scores(3.0, 1.0, 2.0, 4.0), best, weights])
    assert written_once(backend, tmp_path) == ["best.weights.h5"]
    if backend.rank == 0:
        again = model()()
        again.load_weights(path)
        for value, wanted in zip(again.get_weights(), weights.of_epoch[1], strict=True):
            np.testing.assert_array_equal(value, wanted)


def test_tensorboard_writes_on_rank_zero(backend, tmp_path):
    # TensorFlow leaves its summaries to the package tensorboard.
    pytest.importorskip("tensorboard")
    callback = keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1)
    result = train(backend, [callback], epochs=2)
    assert_ranks_agree(backend, result)
    found = written_once(backend, tmp_path)
    assert any("tfevents" in name for name in found)


def test_csv_logger_writes_the_history(backend, tmp_path):
    callback = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    result = train(backend, [callback], validate=True)
    assert_ranks_agree(backend, result)
    assert written_once(backend, tmp_path) == ["log.csv"]
    if backend.rank == 0:
        lines = list(csv.DictReader((tmp_path / "log.csv").open()))
        for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
            assert [float(row[name]) for row in lines] == result.history[name]


def test_reduce_lr_on_plateau_is_followed(backend):
    callback = keras.callbacks.ReduceLROnPlateau(
        "score", factor=0.5, patience=1, mode="max", min_delta=0.1
    )
    result = train(backend, [Scores(1.0, 1.0, 2.0, 2.0), callback])
    assert_ranks_agree(backend, result)
    assert gather(backend, learning_rate(result.model)) == [pytest.approx(0.005)] * max(
        1, backend.size
    )


def test_learning_rate_scheduler_is_followed_in_every_epoch(backend):
    """An epoch is one plain SGD step, whose length shows the rate in use."""
    moves = []

    class Moves(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            moves.append(self.model.get_weights())

    rate = keras.callbacks.LearningRateScheduler(lambda epoch, _: 0.4 / 2**epoch)
    result = train(
        backend,
        [rate, Moves()],
        model=model(lambda: keras.optimizers.SGD(7.0)),
        global_batch_size=64,
        epochs=3,
    )
    assert_ranks_agree(backend, result)
    rates = gather(backend, learning_rate(result.model))
    assert rates == [pytest.approx(0.1)] * len(rates)
    if backend.rank == 0:
        # The reference: plain Keras, one process, the same rates.
        alone = model(lambda: keras.optimizers.SGD(7.0))()
        alone.fit(
            *rows(), batch_size=64, epochs=3, callbacks=[rate], verbose=0, shuffle=False
        )
        for value, wanted in zip(
            result.model.get_weights(), alone.get_weights(), strict=True
        ):
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def test_learning_rate_set_after_a_batch_is_followed(backend):
    class Warm(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.01 * (batch + 1)

    result = train(backend, [Warm()], epochs=1)
    assert_ranks_agree(backend, result)
    rates = gather(backend, learning_rate(result.model))
    assert rates == [pytest.approx(0.06)] * len(rates)


def test_stop_training_after_a_batch_is_followed(backend):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == PER_EPOCH + 3:
                self.model.stop_training = True

    result = train(backend, [Stops()], validate=True)
    assert_ranks_agree(backend, result)
    assert len(result.losses) == PER_EPOCH + 3
    assert len(result.history["val_loss"]) == 2


def test_weights_that_a_callback_sets_are_followed(backend):
    class Resets(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.model.set_weights([w * 0 + 3 for w in self.model.get_weights()])

    result = train(backend, [Resets()], epochs=1)
    assert_ranks_agree(backend, result)
    assert all((w == 3).all() for w in result.model.get_weights())


def test_hooks_come_in_keras_order_on_rank_zero_only(backend):
    hooks = [
        f"on_{what}_{when}"
        for what in ("train", "epoch", "train_batch", "test")
        for when in ("begin", "end")
    ]

    def recorder(calls):
        def record(hook):
            def called(*args, **named):
                number = args[0] if isinstance(args[0] if args else {}, int) else None
                calls.append((hook, number, backend.rank))

            return called

        callback = keras.callbacks.LambdaCallback(
            **{h: record(h) for h in hooks if "test" not in h}
        )
        callback.on_test_begin = record("on_test_begin")
        callback.on_test_end = record("on_test_end")
        return callback

    calls: list = []
    result = train(backend, [recorder(calls)], validate=True, epochs=2)
    assert_ranks_agree(backend, result)
    first, *others = gather(backend, calls)
    assert others == [first] * (backend.size - 1)  # they get what rank 0's has gathered
    assert {rank for *_, rank in first} == {0}
    wanted: list = []
    if backend.rank == 0:
        model()().fit(
            *rows(),
            batch_size=10,
            epochs=2,
            verbose=0,
            validation_data=rows(17, seed=2),
            callbacks=[recorder(wanted)],
        )
        assert first == wanted


def test_logs_of_a_batch_are_averages_of_the_epoch_so_far(backend):
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])
    )
    result = train(backend, [callback], epochs=1)
    if backend.rank == 0:
        sizes = np.array([10, 10, 10, 10, 10, 3])
        wanted = np.cumsum(sizes * result.losses) / np.cumsum(sizes)
        np.testing.assert_allclose(seen, wanted, rtol=1e-6)  # Keras: float32


def test_collectives_raise_at_once_where_one_rank_would_take_part(backend):
    made = train(backend, steps=1).model
    if backend.size == 1:
        return  # there is no other rank to wait for
    calls = {
        "all_reduce": lambda: backend.all_reduce([tf.ones(3)]),
        "broadcast_array": lambda: backend.broadcast_array(np.ones(3)),
        "broadcast": lambda: backend.broadcast(made.trainable_variables),
        "barrier": backend.barrier,
    }
    for call in calls.values():
        with (
            backend.only_rank_zero("a callback's on_epoch_end"),
            pytest.raises(CollectiveError, match=r"on_epoch_end, which runs on rank 0"),
        ):
            call()
    backend.barrier()  # and afterwards all works as before


@pytest.mark.launches
@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("mpi", "raises", "ValueError: the disk is full"),
        ("mpi", "all_reduce", "a collective was called from a callback's on_epoch_end"),
        ("tf-multiworker", "barrier", "a callback's on_train_batch_end"),
    ],
)
def test_a_callback_that_fails_on_rank_zero_ends_the_job(name, how, message):
    script = Path(__file__).with_name("ranks_failing.py")
    before = launch.command(name, 2)
    code, output = launch.run(
        [*before, sys.executable, str(script), name, how],
        launch.environment(forked=True),
        90,
    )
    assert code not in (0, None), output
    assert output.count(message) == 1, output
    assert ("HINT: " in output) == (how != "raises"), output
    assert ("Traceback" in output) == (how == "raises"), output
    assert "rank 0" in output and "trained" not in output, output
    assert "collective: rank 0 failed: " in output and "flight recorder: " in output
