"""Ranks that would train different models are refused before the first step.

Every case runs on two ranks (``test_on_two_ranks``); rank 1 differs in one thing.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from collective.errors import CollectiveError, UsageError
from collective.training import evaluate, fit
from collective.training.input.pipeline import Input
from collective.training.steps.batch_function import BatchFunction
from collective.training.steps.distributed import distributed
from collective.training.steps.settings import StepSettings
from collective.training.verification import ranks
from collective.training.verification import settings as settings_module
from collective.training.verification.descriptions import describe_model
from collective.training.verification.ranks import compare_newcomers, describe_data
from collective.training.verification.same_calls import SameCalls
from tests import launch
from tests.training.small import BATCH, FEATURES, NAMES, assert_ranks_agree, gather

pytestmark = pytest.mark.usefixtures("clean_keras")
ROWS = 40
on_ranks = pytest.mark.skipif(not launch.launched(), reason="needs several ranks")


@pytest.fixture
def backend(backends_by_name):
    return backends_by_name(NAMES[0])


def data(order=None, rows: int = ROWS, seed: int = 2):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    y = rng.normal(size=(rows, 2)).astype("float32")
    return (x, y) if order is None else (x[order], y[order])


def model(
    activation="tanh", rate=0.1, optimizer=keras.optimizers.Adam, loss="mse", **settings
):
    def make():
        layers = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(4, activation),
            keras.layers.Dropout(rate),
            keras.layers.Dense(2),
        ]
        made = keras.Sequential(layers)
        made.compile(optimizer(), loss, **settings)
        return made

    return make


class Branches(keras.Model):
    """Has two equal layers, made in either order."""

    def __init__(self, first, second, power=1.0):
        super().__init__()
        for name in (first, second):
            setattr(self, name, keras.layers.Dense(2, name=name))
        self.power = power

    def call(self, x):
        return self.left(x) - 2 * ops.abs(self.right(x)) ** self.power


def branches(*arguments, **settings):
    def make():
        made = Branches(*arguments, **settings)
        made.compile("adam", "mse")
        return made

    return make


def weighted(factor):
    return lambda y, p: factor * ops.square(y - p)


def called_loss(rank):
    """Return a loss with the same source text and another constant."""
    made: dict = {}
    exec(f"def error(y, p): return {1 + rank} * abs(y - p)", made)
    return made["error"]


x, y = data()
last_row = np.arange(ROWS) == ROWS - 1
# The arguments of fit on each rank, and the text of the error.
CASES = {
    "order": (lambda r: {"data": data(np.roll(np.arange(ROWS), r))}, "training x rows"),
    "one other row": (
        lambda r: {"data": (x, y + r * last_row[:, None].astype("f"))},
        "training y rows are others on rank 1",
    ),
    "weights of rows": (
        lambda r: {"data": (x, y, np.full(ROWS, 1.0 + r, "f"))},
        "training sample_weight rows",
    ),
    "number of rows": (
        lambda r: {"data": data(rows=ROWS - r)},
        "number of rows of the training data differs: 39 on rank 1, 40 on rank 0",
    ),
    "validation": (
        lambda r: {"validation_data": data(seed=5 + r)},
        "validation x rows",
    ),
    "no validation": (
        lambda r: {"validation_data": None if r else data()},
        "number of rows of the validation data differs: none on rank 1",
    ),
    "seed": (lambda r: {"seed": r}, "seed of the training data differs: 1 on rank 1"),
    "shuffle": (lambda r: {"shuffle": not r}, "shuffle="),
    "batch size": (
        lambda r: {"global_batch_size": BATCH + r},
        "batch size of the training data differs: 11 on rank 1, 10 on rank 0",
    ),
    "epochs": (
        lambda r: {"epochs": 1 + r},
        "epochs= differs: 2 on rank 1, 1 on rank 0",
    ),
    "accumulate": (lambda r: {"accumulate": 1 + r}, "accumulate= differs"),
    "loss": (
        lambda r: {"model": model(loss=["mse", "mae"][r])},
        "loss differs: 'mae' on rank 1, 'mse' on rank 0",
    ),
    "loss closes over": (
        lambda r: {"model": model(loss=weighted(1.0 + r))},
        "loss differs: code or values",
    ),
    "code of a loss": (
        lambda r: {"model": model(loss=called_loss(r))},
        "loss differs: code or values",
    ),
    "weights of losses": (
        lambda r: {"model": model(loss_weights=[1.0 + r])},
        r"loss_weights differs: \[2.0\] on rank 1, \[1.0\] on rank 0",
    ),
    "metrics": (
        lambda r: {"model": model(metrics=["mae", "mse"][r:])},
        "metrics differs",
    ),
    "rate": (
        lambda r: {"model": model(rate=0.1 + 0.2 * r)},
        r"layer 2 \(dropout#1\): rate differs: 0.3.* on rank 1, 0.1 on rank 0",
    ),
    "activation": (
        lambda r: {"model": model(activation=["tanh", "relu"][r])},
        r"layer 1 \(dense#1\): activation differs: 'relu' on rank 1, 'tanh' on rank 0",
    ),
    "order of layers": (
        lambda r: {"model": branches(*["left", "right"][:: 1 - 2 * r])},
        "layer 0|order of its layers",
    ),
    "attribute": (
        lambda r: {"model": branches("left", "right", power=1.0 + r)},
        "power of the model differs: 2.0 on rank 1, 1.0 on rank 0",
    ),
    "optimizer": (
        lambda r: {
            "model": model(
                optimizer=[keras.optimizers.Adam, keras.optimizers.RMSprop][r]
            )
        },
        "class of the optimizer differs",
    ),
    "optimizer's settings": (
        lambda r: {
            "model": model(
                optimizer=lambda: keras.optimizers.Adam(beta_1=0.9 - 0.1 * r)
            )
        },
        "optimizer: beta_1 differs: 0.8 on rank 1, 0.9 on rank 0",
    ),
    "schedule": (
        lambda r: {
            "model": model(
                optimizer=lambda: keras.optimizers.SGD(
                    keras.optimizers.schedules.ExponentialDecay(0.1, 10 + r, 0.9)
                )
            )
        },
        "optimizer: learning_rate differs",
    ),
}


def train(backend, **given):
    settings = {"model": model(), "data": data(), "global_batch_size": BATCH}
    settings |= {"epochs": 1, "verbose": 0, "verify": False} | given
    return fit(settings.pop("model"), settings.pop("data"), backend=backend, **settings)


@on_ranks
@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_refused_on_every_rank(case, backend):
    given, message = CASES[case]
    with pytest.raises(UsageError, match=message) as error:
        train(backend, **given(backend.rank))
    assert error.value.everywhere
    text = str(error.value)
    assert "rank 1" in text and "would train different models" in text
    assert gather(backend, text) == [text] * backend.size


SETTINGS = {
    "epsilon": (keras.config.set_epsilon, 1e-7, 0.2),
    "image_data_format": (
        keras.config.set_image_data_format,
        "channels_last",
        "channels_first",
    ),
    "TensorFloat-32": (
        tf.config.experimental.enable_tensor_float_32_execution,
        True,
        False,
    ),
    "version of NumPy": (
        lambda version: setattr(np, "__version__", version),
        np.__version__,
        "2.0.99",
    ),
    "code of collective": (
        lambda code: setattr(settings_module, "_digest_of_code", lambda: code),
        "the same",
        "another",
    ),
}


@on_ranks
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_one_rank_is_refused_by_name(name, backend, monkeypatch):
    """The ``keras.json`` of one host may do so."""
    setter, usual, other = SETTINGS[name]
    monkeypatch.setattr(
        settings_module, "_digest_of_code", settings_module._digest_of_code
    )
    setter(other if backend.rank else usual)
    try:
        with pytest.raises(UsageError, match=f"{name}.* differs: .* on rank 1"):
            train(backend)
        with pytest.raises(UsageError, match=f"{name}.* differs: .* on rank 1"):
            evaluate(model()(), *data(), backend=backend, verbose=0)
    finally:
        setter(usual)


@on_ranks
def test_a_stream_that_differs_after_its_first_rows(backend):
    """The first 32 rows are equal, which are compared at the start."""
    changed = np.where(np.arange(ROWS)[:, None] == 37, x + backend.rank, x)
    stream = tf.data.Dataset.from_tensor_slices((changed.astype("float32"), y))
    words = "the training rows are others on rank 1 than on rank 0"
    with pytest.raises(UsageError, match=words) as error:
        train(backend, data=stream)
    assert gather(backend, str(error.value)) == [str(error.value)] * backend.size
    alike = tf.data.Dataset.from_tensor_slices((x, y))
    assert_ranks_agree(backend, train(backend, data=alike))


@on_ranks
def test_newcomers_to_an_elastic_job_are_compared(backend):
    """They are compared with rank 0, whose training has continued: only they are refused."""
    errors = []
    for other in (
        {"shift": backend.rank},
        {"activation": ["tanh", "relu"][backend.rank]},
    ):
        rows = x + np.float32(other.pop("shift", 0)), y
        made = model(**other)()
        made.build((None, FEATURES))
        described = describe_data("training", Input(rows, BATCH)) | describe_model(made)
        try:
            compare_newcomers(backend, described)
        except UsageError as error:
            assert not error.everywhere
            errors.append(str(error))
    first, second = gather(backend, errors)
    assert first == [] and len(second) == 2
    assert "training x rows are others on rank 1" in second[0]
    assert "activation differs: 'relu' on rank 1" in second[1]


@on_ranks
def test_what_may_differ(backend):
    """These are first values, the learning rate, numbers in Keras' names, and callbacks."""
    keras.utils.set_random_seed(backend.rank)
    for _ in range(backend.rank):
        keras.layers.Dense(3)
        keras.optimizers.Adam()
    callbacks = [keras.callbacks.TerminateOnNaN()] * (1 - backend.rank)
    rate = 0.01 + 0.01 * backend.rank
    made = model(optimizer=lambda: keras.optimizers.Adam(rate), loss=weighted(2.0))
    result = train(backend, model=made, callbacks=callbacks, validation_data=data())
    assert_ranks_agree(backend, result)


@on_ranks
def test_another_learning_rate_is_named_once(backend, monkeypatch):
    said: list[str] = []
    warning = lambda text, *values: said.append(text % values)  # noqa: E731
    monkeypatch.setattr(ranks.log, "warning", warning)
    rate = 0.01 + 0.01 * backend.rank
    made = model(optimizer=lambda: keras.optimizers.Adam(rate))()
    for _ in range(2):
        ranks.compare_models(backend, made)
    found = [line for line in said if "0.02 on rank 1 and 0.01 on rank 0" in line]
    assert len(said) == len(found) == (backend.rank == 0)


@on_ranks
def test_rows_of_an_epoch_are_compared_before_its_callbacks(backend):
    """Rank 1 has another third batch, of which no step asks at once."""

    def batches():
        for number in range(6):
            x, y = data()
            yield x + (number == 2) * backend.rank, y

    ended: list[int] = []
    hook = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ended.append(epoch)
    )
    more = {"epochs": 2, "steps_per_epoch": 3, "verbose": 0, "backend": backend}
    with pytest.raises(UsageError, match="the training rows are others on rank 1"):
        fit(model()(), batches(), callbacks=[hook], **more)
    assert not ended


@on_ranks
def test_replicas_are_compared_after_the_last_step(backend, monkeypatch):
    """Only one rank changes a weight, between two comparisons of the alarm."""
    run, steps = BatchFunction.run, []

    def odd(self, *args):
        outputs = run(self, *args)
        steps.append(outputs)
        if len(steps) == 3 and backend.rank:
            weight = self.model.trainable_variables[0]
            weight.assign(weight + 1.0)
        return outputs

    monkeypatch.setattr(BatchFunction, "run", odd)
    with pytest.raises(CollectiveError, match=f"step {ROWS // BATCH}: rank"):
        train(backend, model=model(), check_every=1000)


@on_ranks
@pytest.mark.parametrize(
    "call, what",
    [
        (lambda m, x, y: m.evaluate(x, y, verbose=0), "evaluated rows"),
        (lambda m, x, y: m.predict(x, verbose=0), "predicted rows"),
        (lambda m, x, y: m.fit(x, y, shuffle=False, verbose=0), "training rows"),
        (lambda m, x, y: m.train_on_batch(x, y), "training rows"),
    ],
)
def test_calls_of_keras_that_read_other_rows(call, what, backend):
    """Every rank raises the error, and may catch it; the next call is right."""
    same = SameCalls(backend, lambda compare: compare())
    order = np.arange(ROWS)[:: -1 if backend.rank else 1]
    made = model()()
    with distributed(StepSettings(backend), [same]):
        with pytest.raises(UsageError, match=f"the {what} are others"), same.call():
            call(made, *data(order))
        with same.call():
            call(made, *data())
    weights = gather(backend, [np.array(v) for v in made.weights])
    for other in weights[1:]:
        for mine, wanted in zip(other, weights[0], strict=True):
            np.testing.assert_array_equal(mine, wanted)


@on_ranks
def test_batches_that_a_script_gives_after_a_call(backend):
    """The first after a call is compared; others at the latest as the next call begins."""
    same = SameCalls(backend, lambda compare: compare())
    order = np.arange(ROWS)[:: -1 if backend.rank else 1]
    made = model()()
    with distributed(StepSettings(backend), [same]):
        for _ in range(2):
            with same.call():
                made.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
            with pytest.raises(UsageError, match="the training rows are others"):
                made.train_on_batch(*data(order))
        with same.call():
            made.evaluate(*data(), verbose=0)
        for rows in (data(), data(), data(order)):  # of which the third is not compared
            made.train_on_batch(*rows)
        with (
            pytest.raises(UsageError, match="the training rows are others"),
            same.call(),
        ):
            raise AssertionError("the call has begun")
        made.train_on_batch(*data())
