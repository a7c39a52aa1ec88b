"""Validation over any number of replicas equals one process exactly.

The reference is Keras' own ``evaluate`` on all rows in one batch, in which an average of
averages cannot hide. No size here is a multiple of the number of replicas.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

from collective.training import evaluate, fit, keras_compat, predict
from collective.training.input.conversion import as_source
from tests import launch
from tests.training import cases
from tests.training.small import (
    NAMES,
    assert_ranks_agree,
    gather,
    model,
    rows,
    train,
)

pytestmark = pytest.mark.usefixtures("clean_keras")

MODELS = {
    "accuracy": (model(metrics=["accuracy", "sparse_categorical_crossentropy"]), None),
    "auc": (cases.classifier, cases.binary),
    "masked": (cases.masked, cases.sentences),
    "weighted": (cases.mlp(cases.sgd), cases.weighted),
    "two-outputs": (cases.functional, cases.two_and_two),
    "regularised": (cases.regularised, cases.labelled),
    "batchnorm": (cases.normalised, cases.labelled),
}


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    return backends_by_name(request.param)


@pytest.mark.parametrize("name", MODELS)
def test_metrics_are_those_of_one_process(backend, name):
    keras.config.set_floatx("float64")
    make, data = MODELS[name]

    def some(count):
        return data(np.random.default_rng(count), count, 0) if data else rows(count)

    with backend.scope():
        keras.utils.set_random_seed(backend.rank)  # rank 0's weights must count
        made = make()
        x, y, weight = (*some(4), None)[:3]
        keras_compat.model.build(made, tuple(cases.spec_of((x, y, weight)))[:3])
    backend.broadcast(made.variables[: len(made.weights)])
    alone = make()
    keras_compat.model.build(alone, tuple(cases.spec_of((x, y, weight)))[:3])
    alone.set_weights(made.get_weights())
    # Four batches with a short last one; one batch; fewer rows than replicas.
    for count, batch in ((23, 7), (5, 64), (1, 4)):
        x, y, weight = (*some(count), None)[:3]
        wanted = alone.evaluate(
            x, y, batch, sample_weight=weight, verbose=0, return_dict=True
        )
        given = (x, y) if weight is None else (x, y, weight)
        got = evaluate(
            made,
            as_source(given),
            batch_size=batch,
            verbose=0,
            return_dict=True,
            backend=backend,
        )
        assert all(other == got for other in gather(backend, got))
        assert set(got) == set(wanted)
        for metric, value in wanted.items():
            assert got[metric] == pytest.approx(value, rel=1e-6, abs=1e-7), metric


def test_validation_of_fit_is_that_of_the_weights_of_its_epoch(backend):
    result = train(backend, validate=True, epochs=3)
    assert_ranks_agree(backend, result)
    alone = model()()
    alone.set_weights(result.model.get_weights())
    wanted = alone.evaluate(
        *rows(17, seed=2), batch_size=17, verbose=0, return_dict=True
    )
    assert result.history["val_loss"][-1] == pytest.approx(wanted["loss"], rel=1e-5)
    assert result.history["val_accuracy"][-1] == pytest.approx(wanted["accuracy"])
    assert len(set(result.history["val_loss"])) == 3


def test_averages_of_an_epoch_are_over_its_rows(backend):
    """With a rate of zero, every step and Keras' evaluate see one model."""
    still = model(lambda: keras.optimizers.SGD(0.0))
    result = fit(still, rows(), backend=backend, global_batch_size=9, verbose=0)
    wanted = still().evaluate(*rows(), batch_size=53, verbose=0, return_dict=True)
    assert result.history["loss"][0] == pytest.approx(wanted["loss"], rel=1e-5)
    assert result.history["accuracy"][0] == pytest.approx(wanted["accuracy"])


@pytest.mark.skipif(launch.launched(), reason="one process shows it")
def test_what_is_shown_at_the_end_has_the_mean_time_of_a_step(capsys):
    alone, (x, y) = model()(), rows()
    batches = ((x[i : i + 9], y[i : i + 9]) for i in range(0, 53, 9))
    evaluate(alone, x, y, batch_size=9, verbose=2, backend="single")
    evaluate(alone, batches, verbose=2, backend="single")
    predict(alone, x, batch_size=9, verbose=2, backend="single")
    shown = capsys.readouterr().out.strip().splitlines()
    assert len(shown) == 3 and " 0us/step" not in "".join(shown)
    assert all(line.startswith("6/6 - ") for line in shown)
    assert "accuracy: " in shown[0] and "accuracy: " in shown[1]
