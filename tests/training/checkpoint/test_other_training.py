"""A checkpoint of another training with variables of the same shapes."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from collective.errors import CollectiveError, UsageError
from collective.training import Checkpoint
from collective.training.observers.checkpoint import schedule, storage
from tests import launch
from tests.training.small import Waiting, learning_rate, model, rows, train

pytestmark = [
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.skipif(launch.launched(), reason="rank 0's error ends the job"),
]
SOONER, LATER = {"epochs": 1}, {"epochs": 2}


@pytest.fixture
def alone(backends_by_name):
    return backends_by_name("single")


def adam(rate: float = 0.02, **more):
    return lambda: keras.optimizers.Adam(rate, **more)


def relu():
    made = model(adam())()
    made.layers[0].activation = keras.activations.relu
    return made


def others():
    x, y = rows()
    return x + 1, y


SAME_SHAPES = {
    "clipnorm": ({"model": model(adam(clipnorm=1.0))}, "optimizer: clipnorm None"),
    "optimizer": (
        {"model": model(lambda: keras.optimizers.AdamW(0.02))},
        "class of the optimizer",
    ),
    "loss": ({"model": model(adam(), loss=keras.losses.Poisson())}, "loss differs"),
    "activation": ({"model": relu}, "activation 'tanh'"),
    "data": ({"data": others()}, "training x rows differ"),
}


def test_another_training_is_refused_by_name(tmp_path, alone):
    train(alone, model=model(adam()), checkpoint=Waiting(tmp_path), **SOONER)
    for changed, name in SAME_SHAPES.values():
        with pytest.raises(UsageError) as refused:
            again = Checkpoint(tmp_path, resume=True)
            train(
                alone, **({"model": model(adam())} | changed), checkpoint=again, **LATER
            )
        assert name in str(refused.value), name
        assert "--resume-anyway" in refused.value.hint
    anyway = Checkpoint(tmp_path, resume="anyway")
    train(alone, model=model(adam()), data=others(), checkpoint=anyway, **LATER)


def test_a_new_learning_rate_is_taken_over_and_named(tmp_path, alone, caplog):
    train(alone, model=model(adam()), checkpoint=Waiting(tmp_path), **SOONER)
    again = Waiting(tmp_path, resume=True)
    result = train(alone, model=model(adam(0.005)), checkpoint=again, **LATER)
    assert learning_rate(result.model) == pytest.approx(0.005)
    assert "the learning rate is now 0.00" in caplog.text


def test_a_rate_that_a_callback_has_changed_stays(tmp_path, alone):
    def halved(epoch, rate):
        return rate / 2

    halves = [keras.callbacks.LearningRateScheduler(halved)]
    train(alone, halves, model=model(adam()), checkpoint=Waiting(tmp_path), **SOONER)
    again = Waiting(tmp_path, resume=True)
    result = train(alone, model=model(adam()), checkpoint=again, **LATER)
    assert learning_rate(result.model) == pytest.approx(0.01)


def forge(folder, change):
    """Change a manifest, and correct its checksums."""
    file = folder / storage.MANIFEST
    body = json.loads(file.read_text())
    del body["crc32"]
    change(body)
    body["crc32"] = storage._sum_of(body)
    file.write_text(json.dumps(body))


FORGED = [
    lambda body: body["state"].pop("epoch"),
    lambda body: body.pop("plan"),
    lambda body: body.pop("files"),
    lambda body: body["state"].update(step=-5),
    lambda body: body["state"].update(step="5"),
    lambda body: body["state"].update(step=1),
    lambda body: body["state"].update(step=10**18),
    lambda body: body.update(files={}),
    lambda body: body["state"].update(arrays=[{"name": "x"}]),
    lambda body: body.update(state=None),
]


def test_a_valid_checksum_is_not_enough(tmp_path, alone):
    train(alone, model=model(adam()), checkpoint=Waiting(tmp_path), **SOONER)
    [saved] = storage.saved_in(tmp_path)
    whole = (saved / storage.MANIFEST).read_text()
    for change in (*FORGED, None):
        if change is None:  # deeper than the reader of JSON allows
            (saved / storage.MANIFEST).write_text("[" * 100_000)
        else:
            forge(saved, change)
        with pytest.raises(UsageError, match=r"no checkpoint .* can be used"):
            again = Checkpoint(tmp_path, resume=True)
            train(alone, model=model(adam()), checkpoint=again, **LATER)
        (saved / storage.MANIFEST).write_text(whole)


def test_a_lock_that_was_removed_is_made_again(tmp_path, alone):
    lock = tmp_path / schedule.LOCK

    class Cleaned(Waiting):
        def _write(self, state):
            lock.unlink()
            super()._write(state)
            assert lock.exists() and schedule._is_same(lock, self._lock)

    elsewhere = tmp_path / "elsewhere"
    lock.symlink_to(elsewhere)
    train(alone, checkpoint=Cleaned(tmp_path), **SOONER)
    assert not elsewhere.exists() and not lock.is_symlink()


def test_fit_fails_if_its_last_checkpoint_was_not_written(tmp_path, alone, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write", full)
    made = model()()
    before = [np.array(v) for v in made.trainable_variables]
    with pytest.raises(CollectiveError, match="the last checkpoint was not written"):
        train(alone, model=made, checkpoint=Checkpoint(tmp_path), **SOONER)
    after = [np.array(v) for v in made.trainable_variables]
    assert any((a != b).any() for a, b in zip(before, after, strict=True))
