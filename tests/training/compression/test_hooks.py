"""Communication hooks in a training equal NumPy's result, on any number of ranks.

Plain, this file starts itself on the ranks of a backend.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

from collective.errors import UsageError
from collective.fit_options import NOT_EQUAL
from collective.training import Checkpoint
from collective.training.compression import named
from collective.training.loop.summary import Summary
from collective.training.model.record import record_of
from tests import launch
from tests.training import small
from tests.training.compression import linear
from tests.training.compression.everything import Everything
from tests.training.elastic.ranks_killed import JOINED_AT, TOLD_AT

pytestmark = pytest.mark.usefixtures("clean_keras")
HERE = "tests/training/compression/test_hooks.py"
EARLY, ALL = 9, 14  # steps, in the second and in the third epoch
NAME = os.environ.get(launch.BACKEND, "single")


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(NAME)


def assert_trained(result, wanted: linear.Trained) -> None:
    np.testing.assert_allclose(result.losses, wanted.losses, rtol=1e-9)
    for variable, value in zip(
        result.model.trainable_variables, (wanted.kernel, wanted.bias), strict=True
    ):
        np.testing.assert_allclose(variable, value, rtol=1e-9, atol=1e-12)


@pytest.mark.on_ranks
@pytest.mark.parametrize("weighted", [False, True], ids=["rows", "weights"])
def test_trains_as_numpy_does(weighted, backend):
    result = linear.train(backend, ALL, weighted)
    wanted = linear.reference(backend.replicas, ALL, weighted)
    assert_trained(result, wanted)
    small.assert_ranks_agree(backend, result)
    state = record_of(result.model).hook
    (error,) = state.errors.values()
    np.testing.assert_allclose(error, wanted.errors[backend.rank], atol=1e-12)
    (summed,) = state.gather().values()
    np.testing.assert_allclose(summed, sum(wanted.errors), atol=1e-12)
    # The hook is linear: one process with it trains the same.
    assert_trained(result, linear.reference(1, ALL, weighted))


@pytest.mark.on_ranks
def test_continues_from_a_checkpoint(backend, tmp_path, reference):
    folder = reference.folder if launch.launched() else tmp_path
    for steps in (EARLY, ALL):
        checkpoint = Checkpoint(folder / f"by-{NAME}", every=4, resume=True)
        result = linear.train(backend, steps, checkpoint=checkpoint)
    assert len(result.losses) == ALL
    assert_trained(result, linear.reference(backend.replicas, ALL))


@pytest.mark.on_ranks
def test_a_hook_of_the_users_own(backend):
    result = linear.train(backend, ALL, hook=Everything())
    wanted = linear.train(backend, ALL, hook=None)
    assert record_of(wanted.model).hook is None
    for got, value in zip(
        small.state(result.model), small.state(wanted.model), strict=True
    ):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-12)
    ((count,),) = record_of(result.model).hook.shared.values()
    assert count.numpy() == ALL


class TakesGradients(keras.Model):
    """Computes the gradients of its loss so many times in a step."""

    times = 1

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        for _ in range(self.times):
            gradients = tape.gradient(loss, variables)
        gradients = [tf.clip_by_norm(gradient, 0.1) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def with_own_step(backend, times=1, **more):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    given = keras.Input((linear.FEATURES,))
    model = TakesGradients(given, keras.layers.Dense(linear.OUTPUTS)(given))
    model.times = times
    model.compile("adam", "mse")
    words = {"model": model, "data": linear.data()[:2], "steps": ALL} | more
    return small.train(backend, **words)


@pytest.mark.on_ranks
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_train_step_of_the_models_own(accumulate, backend):
    result = with_own_step(backend, hook=Everything(), accumulate=accumulate)
    ((count,),) = record_of(result.model).hook.shared.values()
    assert count.numpy() == ALL
    wanted = with_own_step(backend, hook=None)
    for got, value in zip(
        small.state(result.model), small.state(wanted.model), strict=True
    ):
        np.testing.assert_allclose(got, value, rtol=1e-12, atol=1e-12)


@pytest.mark.launches
@pytest.mark.parametrize(
    "name, ranks",
    [
        ("native", 2),
        pytest.param("mpi", 3, marks=pytest.mark.matrix),
        pytest.param("tf-multiworker", 2, marks=pytest.mark.matrix),
        pytest.param("horovod", 2, marks=[pytest.mark.matrix, pytest.mark.horovod]),
        pytest.param("native", 4, marks=pytest.mark.matrix),  # some ranks have no rows
    ],
)
def test_on_ranks(name, ranks, tmp_path, backends_by_name):
    ended = launch.launch(name, ranks, [HERE], tmp_path)
    assert ended.passed() == 6
    # One process continues with the sum of all ranks' unsent errors.
    more = Checkpoint(tmp_path / f"by-{name}", resume=True)
    single = backends_by_name("single")
    result = linear.train(single, ALL + 3, checkpoint=more)
    assert_trained(result, linear.reference(ranks, ALL + 3))


if not launch.launched():

    @pytest.mark.launches
    @pytest.mark.matrix
    def test_a_rank_leaves_with_its_errors_and_another_joins(tmp_path):
        script = str(Path(__file__).with_name("ranks_elastic.py"))
        before = [*launch.command("native", 2), "--min-np", "1", "--max-np", "2"]
        code, printed = launch.run(
            [*before, sys.executable, script, str(tmp_path)],
            launch.environment(forked=True),
            100,
        )
        assert code == 0, printed
        left, joined = TOLD_AT + 1, JOINED_AT + 1
        assert f"rank 0 of 2 left; 1 rank continues from step {left} " in printed
        assert f"1 joined; 2 ranks continue from step {joined} " in printed
        changes = {
            left: lambda errors: errors[1:],
            joined: lambda errors: [*errors, np.zeros_like(errors[0])],
        }
        wanted = linear.reference(2, ALL, changes=changes)
        np.testing.assert_allclose(
            np.load(tmp_path / "losses.npy"), wanted.losses, rtol=1e-9
        )

    @pytest.mark.launches
    @pytest.mark.matrix
    def test_a_rank_is_killed_with_its_errors(tmp_path):
        """The other rank's step is repeated with the errors from before that step."""
        script = str(Path(__file__).with_name("ranks_elastic.py"))
        before = [*launch.command("native", 2), "--min-np", "1"]
        line = [*before, sys.executable, script, str(tmp_path), "killed"]
        code, printed = launch.run(line, launch.environment(forked=True), 100)
        assert code == 0, printed
        assert f"1 rank continues from step {TOLD_AT} " in printed
        wanted = linear.reference(2, ALL, changes={TOLD_AT: lambda errors: errors[1:]})
        np.testing.assert_allclose(
            np.load(tmp_path / "losses.npy"), wanted.losses, rtol=1e-9
        )

    def test_two_gradients_of_a_variable_are_refused(backend):
        with pytest.raises(UsageError, match="a step computes 2 gradients of"):
            with_own_step(backend, times=2, hook=linear.HOOK)

    def test_it_learns_what_the_whole_gradients_teach(backend):
        """With error feedback, rank 1 finds the optimum of 120 numbers."""
        x, y, _ = linear.data()
        words = {"batch_size": linear.ROWS, "verify": False}
        hook = named.make("powersgd:1")
        result = linear.train(backend, 800, hook=hook, **words)
        with_ones = np.concatenate([x, np.ones((linear.ROWS, 1))], axis=1)
        best = np.linalg.lstsq(with_ones, y, rcond=None)[0]
        kernel, bias = result.model.trainable_variables
        np.testing.assert_allclose(kernel, best[:-1], atol=1e-3)
        np.testing.assert_allclose(bias, best[-1], atol=1e-3)

    def test_every_output_names_it(backend, capsys, caplog):
        result = linear.train(backend, 2, hook="powersgd:2", verify="run:1")
        name = f"hook {linear.HOOK!r}"
        assert result.not_equal_to_one_process == name
        (line,) = [r.message for r in caplog.records if NOT_EQUAL in r.message]
        assert line.startswith(f"{name}: the trained model is {NOT_EQUAL}")
        beside_keras = " ".join(capsys.readouterr().err.split())
        assert f"The training with {name} is {NOT_EQUAL}, by design." in beside_keras
        assert "432 bytes a step instead of 1,040, 2.4 times fewer" in line
        summary = Summary.of({}, result, {}, 130, linear.ROWS)
        assert summary.not_equal_to_one_process == name
        shown = io.StringIO()
        summary.print(Console(file=shown, width=120))
        assert f"{NOT_EQUAL}: {name}" in shown.getvalue()
        assert linear.train(backend, 1, hook=None).not_equal_to_one_process is None

    @pytest.mark.parametrize("name", ["powersg", "powersgd:", "powersgd:x", 4])
    def test_an_unknown_hook_is_refused(name, backend):
        with pytest.raises(UsageError, match="unknown communication hook") as caught:
            linear.train(backend, 1, hook=name)
        assert "powersgd:4" in caught.value.hint

    @pytest.mark.parametrize(
        "before, after, why",
        [
            (linear.HOOK, None, "made with hook PowerSGD(rank=2"),
            (None, linear.HOOK, "made with hook None"),
            (linear.HOOK, named.make("powersgd:1"), "made with hook PowerSGD(rank=2"),
        ],
    )
    def test_a_checkpoint_of_another_hook(before, after, why, backend, tmp_path):
        linear.train(backend, 2, hook=before, checkpoint=Checkpoint(tmp_path))
        with pytest.raises(UsageError) as caught:
            again = Checkpoint(tmp_path, resume=True)
            linear.train(backend, 4, hook=after, checkpoint=again)
        assert why in str(caught.value)

    def test_a_state_without_errors_leaves_those_of_the_rank(backend):
        """An elastic job broadcasts such a state."""
        state = record_of(linear.train(backend, 3).model).hook
        (error,) = state.errors.values()
        before = error.numpy()
        state.put(state.values({}))
        np.testing.assert_array_equal(error, before)
        assert before.any()
        state.forget()
        assert not error.numpy().any()

    def test_overflows_of_a_loss_scale_are_refused(backend):
        made = keras.Sequential([keras.Input((12,)), keras.layers.Dense(10)])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        made.compile(optimizer, "mse")
        with pytest.raises(UsageError, match="does not work with a communication hook"):
            small.train(backend, model=made, data=linear.data()[:2], hook=linear.HOOK)
