"""``collective.training.fit`` in users' scripts: its arguments, refusals and results.

Plain, it runs in one process; ``test_on_ranks`` starts this file, and those of callbacks,
evaluation, checkpoints and the ledger, on three ranks at once.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from collective.errors import CollectiveError, UsageError
from collective.training import fit
from collective.training.input.plan import share
from collective.training.loop.times import PARTS
from tests import launch
from tests.training import cases
from tests.training.small import (
    BATCH,
    NAMES,
    PER_EPOCH,
    ROWS,
    assert_ranks_agree,
    gather,
    model,
    rows,
    train,
)

pytestmark = pytest.mark.usefixtures("clean_keras")


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    return backends_by_name(request.param)


def refused(backend, message: str, made, **more) -> None:
    with pytest.raises(UsageError, match=message) as error:
        train(backend, model=made, steps=1, **more)
    assert "\nHINT: " in str(error.value) and error.value.exit_code == 2
    assert error.value.everywhere


def test_a_plain_fit_afterwards_sums_gradients(backend):
    """The user's optimizer has its former state again."""
    if backend.size > 1:
        pytest.skip("each process would train by itself")
    x, y = rows(12)

    def make():
        return model(lambda: keras.optimizers.SGD(0.1))()

    with backend.scope():
        made = make()
    fit(made, x, y, batch_size=12, backend=backend, shuffle=False, verbose=0)
    alone = make()
    alone.set_weights(made.get_weights())
    for each in (made, alone):
        each.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    for one, other in zip(made.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


# --- its results -----------------------------------------------------------


def test_losses_history_and_times_of_every_step(backend):
    result = train(backend, epochs=2)
    assert_ranks_agree(backend, result)
    assert len(result.losses) == 2 * PER_EPOCH
    assert {name: len(v) for name, v in result.history.items()} == {
        "loss": 2,
        "accuracy": 2,
    }
    sizes = [BATCH] * 5 + [ROWS - 5 * BATCH]
    for epoch in (0, 1):
        losses = result.losses[epoch * PER_EPOCH :][:PER_EPOCH]
        mean = np.average(losses, weights=sizes)
        # Keras sums in float32.
        assert result.history["loss"][epoch] == pytest.approx(mean, rel=1e-6)
    assert result.history["loss"][1] < result.history["loss"][0]
    timing = result.timing
    assert timing.rows == sizes * 2
    spans = (timing.all_reduce, timing.wait, timing.update)
    for seconds in (timing.input, timing.step, *spans):
        assert len(seconds) == 2 * PER_EPOCH and min(seconds) >= 0
    assert tuple(timing.per_step()) == PARTS
    assert timing.samples_per_second > 0
    assert result.backend is backend and isinstance(result.model, keras.Model)


def test_steps_override_epochs(backend):
    result = train(backend, steps=PER_EPOCH + 2, epochs=50)
    assert len(result.losses) == PER_EPOCH + 2
    assert len(result.history["loss"]) == 2


def test_a_seed_gives_the_same_training_again_and_another_gives_another(backend):
    dropped = model(None, keras.layers.Dropout(0.5, seed=1))
    first, again, other = (
        train(backend, model=dropped, epochs=1, seed=seed) for seed in (5, 5, 6)
    )
    assert first.losses == again.losses
    for value, wanted in zip(
        again.model.get_weights(), first.model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(value, wanted)
    assert first.losses != other.losses


def test_every_rank_starts_from_rank_zero(backend):
    """First weights depend on the rank; the result must not."""

    def own():
        made = model()()
        made.set_weights([w + backend.rank for w in made.get_weights()])
        return made

    same, different = (train(backend, model=m, epochs=1) for m in (model(), own))
    assert_ranks_agree(backend, different)
    assert same.losses == different.losses


def test_batch_statistics_are_those_of_the_rows(backend):
    """The data are shifted: the moving statistics cover all rows, on every rank."""
    x, y = rows(90)
    x = x + np.arange(6, dtype="float32")

    def make():
        layers = [
            keras.Input((6,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(3),
        ]
        return cases.compiled(keras.Sequential(layers), cases.sgd())

    result = train(
        backend, model=make, data=(x, y), global_batch_size=90, epochs=25, shuffle=False
    )
    assert_ranks_agree(backend, result)
    layer = result.model.layers[0]
    np.testing.assert_allclose(np.array(layer.moving_mean), x.mean(0), atol=1e-4)
    np.testing.assert_allclose(np.array(layer.moving_variance), x.var(0), rtol=1e-4)


@pytest.mark.parametrize("terminates", [False, True])
def test_not_finite_is_trained_on_as_in_keras_or_ends(terminates, backend, caplog):
    """Row 15, which one replica has, is in the second step."""
    x, y = rows(30)
    x[15] = np.nan
    holder = next(r for r in range(9) if share(10, r, backend.replicas)[1] > 5)
    where = f"step 1: the loss or its gradient is not finite on (rank|replica) {holder}"
    words = {"data": (x, y), "shuffle": False, "epochs": 1}
    if terminates:
        with pytest.raises(CollectiveError, match=where):
            train(backend, **words, terminate_on_nan=True)
        return
    result = train(backend, **words)
    assert np.isnan(result.losses).tolist() == [False, True, True]
    alone = model()()
    if backend.rank == 0:
        keras.Model.fit(alone, x, y, 10, shuffle=False, verbose=0)
        for got, wanted in zip(result.model.weights, alone.weights, strict=True):
            np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    found = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    found = [text for text in found if text.startswith("step")]
    assert len(found) == (backend.rank == 0)
    assert all(re.match(f"{where}; .*kernel.*as in Keras", text) for text in found)


# --- data ---------------------------------------------------------------------------


def test_a_metric_that_is_not_finite_is_not_called_a_gradient(backend):
    class Broken(keras.metrics.Mean):
        def update_state(self, y, predicted, sample_weight=None):
            return super().update_state(float("nan") * predicted)

    made = model(metrics=[Broken(name="broken")])
    with pytest.raises(CollectiveError, match="or what a metric adds up is not finite"):
        train(backend, model=made, terminate_on_nan=True)


def test_arrays_and_a_dataset_of_the_same_rows_train_the_same(backend):
    arrays = train(backend, shuffle=False, epochs=2)
    dataset = tf.data.Dataset.from_tensor_slices(rows())
    streamed = train(backend, data=dataset, epochs=2)
    assert_ranks_agree(backend, streamed)
    np.testing.assert_allclose(streamed.losses, arrays.losses, rtol=1e-6)


def test_trees_of_inputs_and_outputs(backend):
    x, y, _ = cases.two_and_two(np.random.default_rng(0), 31, 0)
    result = train(
        backend,
        model=cases.functional,
        data=(x, y),
        validation_data=(x, y),
        epochs=2,
        accumulate=2,
    )
    assert_ranks_agree(backend, result)
    wanted = {"loss", "kind_loss", "size_loss", "kind_accuracy", "size_mae"}
    assert set(result.history) == wanted | {f"val_{name}" for name in wanted}


def test_sample_weights_count(backend):
    """Rows of weight zero do not train, so their values do not change the losses."""
    x, y = rows()
    weight = (np.arange(ROWS) % 3 > 0).astype("float32")
    other = np.where(weight[:, None] > 0, x, 9 - x).astype("float32")
    first, second = (
        train(backend, data=(data, y, weight), epochs=1) for data in (x, other)
    )
    assert_ranks_agree(backend, first)
    np.testing.assert_allclose(first.losses, second.losses, rtol=1e-6)
    assert train(backend, data=(x, y), epochs=1).losses != first.losses


# --- models ---------------------------------------------------------------------------


def test_a_model_built_in_scope_trains_as_one_made_by_a_function(backend):
    made = train(backend, model=model(), epochs=1)
    with backend.scope():
        ready = model()()
    given = train(backend, model=ready, epochs=1)
    assert given.model is ready and given.losses == made.losses


def test_a_model_from_outside_the_scope_is_refused(backend):
    outside = model()()
    if not hasattr(backend, "strategy"):
        assert len(train(backend, model=outside, steps=1).losses) == 1
        return
    refused(backend, "made outside the scope of backend", outside)


def test_a_model_that_is_not_compiled_is_refused(backend):
    def bare():
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])

    refused(backend, "is not compiled", bare)


def test_what_is_no_model_is_refused(backend):
    refused(backend, "a keras.Model was expected, not str", lambda: "a model")


def test_data_that_does_not_fit_is_refused(backend):
    x, y = rows()
    refused(backend, "does not fit the data", model(), data=(x[:, :4], y))
    refused(backend, "labels go from 0 to 7", model(), data=(x, y % 2 * 7))
    refused(backend, "accumulate must be at least 1", model(), accumulate=0)
    refused(backend, "a global batch of 0 rows", model(), global_batch_size=0)
    refused(backend, "has no rows", model(), data=(x[:0], y[:0]))


def test_a_stream_in_an_order_of_its_own_is_refused(backend):
    """A shuffle without a seed gives each rank different rows."""
    x, y = rows()
    mine = tf.data.Dataset.from_tensor_slices((x + backend.rank, y))
    if backend.size == 1:
        assert len(train(backend, data=mine, steps=1).losses) == 1
        return
    with pytest.raises(UsageError, match="training first rows are others on rank 1"):
        train(backend, data=mine, steps=1)


def test_small_batches_leave_replicas_idle(backend, caplog):
    train(backend, data=rows(), global_batch_size=1, steps=1)
    idle = f"{backend.replicas - 1} of them idle in every step"
    wanted = backend.replicas > 1 and backend.rank == 0
    assert sum(idle in message for message in caplog.messages) == wanted


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_rank_zero_alone_draws_the_bar(backend, verbose, capfd):
    fit(model(), *rows(), backend=backend, verbose=verbose, epochs=2)
    first, *others = gather(backend, capfd.readouterr().out)
    assert others == [""] * (backend.size - 1)
    assert ("Epoch 2/2" in first and "accuracy" in first) == (verbose > 0)


# --- launches -------------------------------------------------------------------------

LOOP = ("fit", "callbacks", "evaluation", "desync")
KEEPING = ("checkpoint", "ledger")
# TensorFlow's collectives start slowly, so they run only tests that could hang.
BRIEFLY = (
    "restores_the_best or saves_once or collectives or validation or from_outside"
    " or optimizer or resumed_anywhere or notes_what_was_read"
)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("name", "ranks", "files", "chosen"),
    [
        (
            "native",
            2,
            LOOP,
            ["-k", f"{BRIEFLY} or weights or statistics or trees or finite"],
        ),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("native", 2, LOOP, []),
                ("mpi", 2, LOOP, []),
                ("mpi", 3, LOOP + KEEPING, []),
                ("tf-multiworker", 2, LOOP + KEEPING, ["-k", BRIEFLY]),
            )
        ),
    ],
)
def test_on_ranks(name, ranks, files, chosen, tmp_path):
    pytest.importorskip("mpi4py")
    folder = launch.ROOT / "tests/training"
    paths = [str(next(folder.rglob(f"test_{file}.py"))) for file in files]
    ended = launch.launch(name, ranks, [*paths, *chosen], tmp_path, seconds=400)
    assert ended.passed(skips=True) >= 7


@pytest.mark.launches
@pytest.mark.matrix
def test_a_script_of_the_users_own_runs_on_two_ranks(tmp_path):
    script = Path(__file__).with_name("ranks_script.py")
    code, printed = launch.run(
        [*launch.command("mpi", 2), sys.executable, str(script), str(tmp_path)],
        launch.environment(),
        100,
    )
    assert code == 0, printed
    assert printed.count("trained by native on 2 replicas") == 1
    assert printed.count("Epoch 1/3") == 1
    assert [f.name for f in tmp_path.iterdir()] == ["model.keras"]
