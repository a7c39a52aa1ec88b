"""``tensor_parallel``: the model of one process, of which each rank has a part.

Plain, this file starts itself on ranks. They compare their training with one process; and the
test continues from their checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from collective import backends
from collective.errors import UsageError
from collective.training import Checkpoint, evaluate, fit, predict
from collective.training.calls.models import transformer
from collective.training.observers.ledger.verify import check as check_ledger
from collective.training.process.object_collectives import broadcast_object
from collective.training.sharding.held import is_held
from tests import launch

pytestmark = pytest.mark.usefixtures("clean_keras")
HERE = "tests/training/test_tensor_parallel.py"
EARLY, ALL = 9, 14  # steps, in the second and in the third epoch
ROWS, BATCH, EPOCHS = 29, 7, 3
WORDS, LENGTH, CLASSES = 200, 4, 3
RANKS = int(os.environ.get("COLLECTIVE_TEST_RANKS", "2"))
GROUPS = [parts for parts in (2, 4) if RANKS % parts == 0]


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.integers(0, WORDS, (ROWS, LENGTH)).astype("int32")
    return x, rng.integers(0, CLASSES, ROWS).astype("int32")


def model(optimizer: keras.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(11)
    made = transformer(
        (LENGTH,), CLASSES, blocks=1, width=32, heads=4, vocabulary=WORDS
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, loss, metrics=["accuracy"])
    return made


def sgd() -> keras.Model:
    return model(keras.optimizers.SGD(0.1, momentum=0.9))


def adamw() -> keras.Model:
    return model(
        keras.optimizers.AdamW(
            0.02, global_clipnorm=0.1, weight_decay=0.1, use_ema=True
        )
    )


def scaled() -> keras.Model:
    inner = keras.optimizers.Adam(0.02, clipnorm=0.1)
    return model(keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0))


def own_step() -> keras.Model:
    """Return a model with a step of its own, that takes a norm of the gradients."""
    import tensorflow as tf

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            slopes = tape.gradient(loss, self.trainable_variables)
            slopes, norm = tf.clip_by_global_norm(slopes, 0.5)
            self.optimizer.apply(slopes, self.trainable_variables)
            return {"loss": loss, "norm": norm}

    inner = sgd()
    made = Own(inner.input, inner.output)
    made.compile(keras.optimizers.SGD(0.1), inner.loss)
    return made


# By name: the maker of the model, and options of ``fit``.
CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any]]] = {
    "adamw": (adamw, {"accumulate": 2}),
    "sgd": (sgd, {}),
    "scaled": (scaled, {}),
    "own-step": (own_step, {}),
    "shard-optimizer": (adamw, {"shard_optimizer": True}),
    "shard-weights": (adamw, {"shard_weights": True}),
}
# All of these run on four ranks.
CHOSEN = [*CASES] if RANKS > 2 else ["adamw"]
on_four = pytest.mark.skipif(RANKS < 4, reason="on four ranks")


def values(trained: keras.Model) -> dict[str, np.ndarray]:
    """Return all variables of a model and its optimizer; every rank calls it."""
    every = [*trained.weights, *trained.optimizer.variables]
    return {v.path: np.array(v) for v in every}


def assert_as_keras(
    make: Any, backend: Any, trained: Any = None, **options: Any
) -> Any:
    """Check that a training, and the trained model's results, equal stock Keras.

    Args:
        trained: What is trained; by default what ``make`` returns.
        options: Of ``collective.fit``.
    """
    keras.config.set_floatx("float64")
    keras.utils.clear_session(free_memory=False)
    wanted, (x, y) = make(), data()
    words: dict[str, Any] = {"batch_size": BATCH, "verbose": 0}
    fits = {"epochs": EPOCHS, "shuffle": False, "validation_split": 0.3} | words
    history = wanted.fit(x, y, **fits).history
    keras.utils.clear_session(free_memory=False)
    got = fit(trained or make, x, y, backend=backend, check_every=3, **fits, **options)
    assert sorted(got.history) == sorted(history)
    for key, numbers in history.items():
        np.testing.assert_allclose(got.history[key], numbers, rtol=1e-10)
    mine = values(got.model)
    for path, value in values(wanted).items():
        np.testing.assert_allclose(mine[path], value, 1e-10, 1e-10, err_msg=path)
    np.testing.assert_allclose(
        evaluate(got.model, x, y, backend=backend, **words),
        wanted.evaluate(x, y, **words),
        rtol=1e-10,
    )
    np.testing.assert_allclose(
        predict(got.model, x, backend=backend, **words),
        wanted.predict(x, **words),
        1e-10,
        1e-10,
    )
    return got.model


def continued(backend: Any, folder: Any, steps: int) -> np.ndarray:
    """Train up to a checkpoint; return the losses."""
    keras.config.set_floatx("float64")
    keras.utils.clear_session(free_memory=False)
    result = fit(
        adamw,
        *data(),
        backend=backend,
        batch_size=BATCH,
        verbose=0,
        steps=steps,
        seed=3,
        checkpoint=Checkpoint(folder, every=4, resume=True),
    )
    return np.array(result.losses)


if launch.launched():

    @pytest.fixture(scope="module", params=GROUPS)
    def backend(request):
        options = backends.Options(tensor_parallel=request.param)
        made = backends.get(os.environ[launch.BACKEND], options)
        yield made
        made.barrier()

    @pytest.mark.parametrize("name", CHOSEN)
    def test_trains_what_keras_trains(name, backend):
        if backend.options.tensor_parallel > 2 and name != "adamw":
            pytest.skip("in groups of two")
        make, options = CASES[name]
        trained = assert_as_keras(make, backend, **options)
        cut = [v for v in trained.trainable_variables if is_held(v)]
        paths = " ".join(v.path for v in cut)
        for layer in ("embedding", "query/kernel", "dense/kernel", "dense_1/kernel"):
            assert layer in paths, paths
        slots = sum(map(is_held, trained.optimizer.variables))
        assert slots == len(cut) * {"adamw": 3, "sgd": 1, "scaled": 2}.get(
            name, slots / len(cut)
        )

    @on_four
    def test_cuts_a_model_that_was_made_before(backend):
        keras.config.set_floatx("float64")
        trained = assert_as_keras(sgd, backend, trained=sgd())
        assert any(map(is_held, trained.variables))

    def test_cuts_a_model_that_the_data_build(backend):
        if backend.options.tensor_parallel == 2:
            trained = assert_as_keras(unbuilt, backend)
            assert any(map(is_held, trained.variables))

    def test_checkpoints_are_whole(backend, reference):
        parts = backend.options.tensor_parallel
        got = continued(backend, reference.folder / f"from-one-{parts}", ALL)
        wanted = np.load(reference.folder / "by-one.npy")
        np.testing.assert_allclose(got, wanted, rtol=1e-10)
        continued(backend, reference.folder / f"by-{parts}", EARLY)
        if parts > GROUPS[0]:  # the ranks were cut into other groups before
            folder = reference.folder / f"from-{GROUPS[0]}"
            if backend.rank == 0:
                shutil.copytree(reference.folder / f"by-{GROUPS[0]}", folder)
            backend.barrier()
            np.testing.assert_allclose(continued(backend, folder, ALL), wanted, 1e-10)

    @on_four
    def test_a_ledger_has_the_rows_once(backend, tmp_path):
        file = broadcast_object(backend, str(tmp_path / "rows.ledger"))
        fit(sgd, *data(), backend=backend, batch_size=BATCH, verbose=0, ledger=file)
        if backend.rank == 0:
            assert check_ledger(file).faults == []
        backend.barrier()

    @on_four
    def test_what_code_of_a_model_reads_and_writes_counts(backend):
        """Weights have no values yet while the function runs that makes the model."""

        def doubled() -> keras.Model:
            made = sgd()
            made.set_weights([2 * value for value in made.get_weights()])
            return made

        assert_as_keras(doubled, backend)

    REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "is worth being cut": (lambda: one_unit(), {}),
        "been built already": (lambda: built(), {}),
        "has run_eagerly": (lambda: eager(), {}),
        "does not work with": (sgd, {"virtual_replicas": 4}),
    }

    def one_unit() -> keras.Model:
        inputs = keras.Input((LENGTH,))
        made = keras.Model(inputs, keras.layers.Dense(1)(inputs[:, : LENGTH - 1]))
        made.compile("sgd", "mse")
        return made

    def unbuilt() -> keras.Model:
        keras.utils.set_random_seed(11)
        units = (64, 64, CLASSES)
        made = keras.Sequential([keras.layers.Dense(count) for count in units])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.Adam(1e-3), loss)
        return made

    def built() -> keras.Model:
        made = sgd()
        made.optimizer.build(made.trainable_variables)
        return made

    def eager() -> keras.Model:
        made = sgd()
        made.run_eagerly = True
        return made

    @pytest.mark.parametrize("message", REFUSED)
    def test_refuses_what_cannot_be_cut(message, backend):
        make, options = REFUSED[message]
        with pytest.raises(UsageError, match=message) as caught:
            fit(make(), *data(), backend=backend, verbose=0, **options)
        assert caught.value.exit_code == 2


@pytest.mark.launches
@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        ("native", 2),
        *(pytest.param(n, 4, marks=pytest.mark.matrix) for n in ("native", "mpi")),
    ],
)
def test_on_ranks(backend, ranks, tmp_path, backends_by_name):
    groups = [parts for parts in (2, 4) if ranks % parts == 0]
    single = backends_by_name("single")
    for parts in groups:
        continued(single, tmp_path / f"from-one-{parts}", EARLY)
    wanted = continued(single, tmp_path / "wanted", ALL)
    np.save(tmp_path / "by-one.npy", wanted)
    more = {"COLLECTIVE_TEST_RANKS": str(ranks)}
    ended = launch.launch(backend, ranks, [HERE], tmp_path, seconds=1500, **more)
    assert ended.code == 0, ended.output
    message = {outcome for outcomes in ended.outcomes for outcome in outcomes.values()}
    assert message <= {"passed", "skipped"}, ended.output
    for parts in groups:
        got = continued(single, tmp_path / f"by-{parts}", ALL)
        np.testing.assert_allclose(got, wanted, rtol=1e-10)


def command(*options: str, ranks: int = 1) -> tuple[int, str]:
    start = launch.command("native", ranks) if ranks > 1 else []
    words = [*start, sys.executable, "train.py", *options]
    return launch.run(words, launch.environment(forked=True), 600)


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_train_py_trains_the_model_of_one_process(optimizer, tmp_path):
    words = (
        f"--model transformer --steps 40 --optimizer {optimizer} --global-clipnorm 0.1"
    )
    words += " --precision float64 --global-batch-size 50"
    found = []
    for ranks, more in ((1, ()), (4, ("--tensor-parallel", "2"))):
        file = tmp_path / f"{ranks}.json"
        code, printed = command(*words.split(), *more, "--json", str(file), ranks=ranks)
        assert code == 0, printed
        found.append(json.loads(file.read_text()))
    one, four = found
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=1e-10)
    assert four["test"].keys() == one["test"].keys()
    for name, value in one["test"].items():
        np.testing.assert_allclose(four["test"][name], value, rtol=1e-10)


WRONG = {
    "2 ranks cannot be cut into groups of 3": "--tensor-parallel 3",
    "with a rank that dies": "--tensor-parallel 2 --min-np 1",
    "an option of backend 'mpi' and 'native'": "--tensor-parallel 2 --backend tf-multiworker",
}


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_end_with_2(message):
    code, printed = command("--steps", "1", *WRONG[message].split(), ranks=2)
    assert code == 2 and message in printed and "HINT: " in printed


def test_a_removed_option_says_what_replaces_it(capsys):
    from collective import train

    with pytest.raises(SystemExit) as caught:
        train.parser().parse_args(["--model-parallel", "2"])
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and "HINT: --tensor-parallel 2" in printed
    assert "shard_weights=True" in printed
