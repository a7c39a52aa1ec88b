"""Scripts that are interrupted and resumed: the numbers of one that nobody interrupts."""

from __future__ import annotations

import json
import os
import pickle
import sys

import numpy as np
import pytest
import tensorflow as tf

from collective.errors import UsageError
from collective.training.unedited import record
from collective.training.unedited.record import OtherUnit, Record, Replay
from collective.training.unedited.resume import Saved, StateFolder, identify
from tests import launch
from tests.training.unedited.small_model import MAKE

LAUNCHER = [sys.executable, "-m", "collective.launch"]


def saved(count: int = 1, script: str = "mine") -> Saved:
    found = Record()
    for number in range(count):
        found.add({"loss": tf.constant(float(number))}, "a step")
    return Saved(script, found, [((2,), "float64")], [np.arange(2.0)], [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: (3, "text"),
        lambda: {"loss": tf.constant(1.5), "n": tf.constant([[1, 2]])},
        lambda: [tf.constant(2.0, tf.bfloat16), tf.constant(True)],
        lambda: tf.constant(["a", "b"]),
        lambda: {"ragged": tf.ragged.constant([[1], [2, 3]]), "text": "x"},
        lambda: np.arange(3),
    ],
    ids=["none", "tuple", "logs", "list", "text", "ragged", "array"],
)
def test_a_record_gives_back_what_it_was_given(make):
    result = make()
    kept = Record()
    assert kept.add(result, "first") and kept.add(result, "second")
    kept = pickle.loads(pickle.dumps(kept))
    replay = Replay(kept)
    for what in ("first", "second"):
        found = replay.result(what)
        tf.nest.assert_same_structure(found, result, expand_composites=True)
        for one, other in zip(
            tf.nest.flatten(found, expand_composites=True),
            tf.nest.flatten(result, expand_composites=True),
            strict=True,
        ):
            assert type(one) is type(other)
            if isinstance(other, tf.Tensor):
                assert one.dtype == other.dtype
                one, other = one.numpy(), other.numpy()
            np.testing.assert_array_equal(one, other)
    assert replay.is_over


def test_a_record_has_limits(monkeypatch):
    assert not Record().add(lambda: None)  # no pickle
    monkeypatch.setattr(record, "MOST_BYTES", 1000)
    assert Record().add(tf.zeros([10])) and not Record().add(tf.zeros([1000]))


def test_removals_are_passed_by_whoever_does_not_make_them():
    kept = Record()
    for what, is_removal in (("a", False), ("", True), ("b", False), ("", True)):
        kept.add(what, what, is_removal)
    replay = Replay(kept)
    assert replay.result("a") == "a" and not replay.is_over
    assert replay.takes_removal() and not replay.takes_removal()
    assert replay.result("b") == "b" and replay.is_over and replay.takes_removal()
    replay = Replay(kept)
    assert replay.result("a") == "a"
    replay.skip_removals()
    with pytest.raises(OtherUnit, match="comes to 'other', where 'b' is recorded"):
        replay.result("other")


def test_a_folder_keeps_two_states_and_passes_by_one_that_is_torn(tmp_path):
    folder = StateFolder(tmp_path / "new" / "runs", "mine")
    folder.open()
    assert folder.newest() is None
    for count in (1, 2, 3):
        folder.write(saved(count))
    names = sorted(p.name for p in folder.folder.glob("*.state"))
    assert names == ["script-000000002.state", "script-000000003.state"]
    assert len(folder.newest().record) == 3
    for torn in (b"", b"collective.script 1 00000000\n", b"\x80"):
        (folder.folder / names[1]).write_bytes(torn)
        found = folder.newest()
        assert len(found.record) == 2
        np.testing.assert_array_equal(found.values[0], np.arange(2.0))


def test_a_folder_of_another_script_or_job_is_refused(tmp_path, monkeypatch):
    folder = StateFolder(tmp_path, "mine")
    folder.open()
    folder.write(saved(script="another"))
    with pytest.raises(UsageError, match="the state of another script"):
        folder.newest()
    with pytest.raises(UsageError, match="another job uses this folder"):
        StateFolder(tmp_path, "mine").open()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--resume .*file"):
        StateFolder(tmp_path / "file", "mine").open()
    monkeypatch.setenv("COLLECTIVE_RESUME_SECONDS", "often")
    with pytest.raises(UsageError, match="is no time"):
        StateFolder(tmp_path, "mine")


def test_a_state_that_cannot_be_written_is_said_once(tmp_path, caplog):
    folder = StateFolder(tmp_path / "gone", "mine")
    for _ in range(2):
        folder.write(saved())
    assert caplog.text.count("no state was written") == 1
    assert not folder.is_due


def test_a_script_is_known_by_its_content_and_arguments(tmp_path):
    file = tmp_path / "a.py"
    file.write_text("x = 1")
    first = identify(str(file), ["--epochs", "3"])
    assert first == identify(str(file), ["--epochs", "3"])
    assert first != identify(str(file), ["--epochs", "4"])
    file.write_text("x = 2")
    assert first != identify(str(file), ["--epochs", "3"])
    assert identify("", []) == identify("", [])


SCRIPT = (
    """
import json, os, sys, keras, numpy as np
keras.config.set_floatx("float64")
x, y = np.random.normal(size=(48, 5)), np.random.normal(size=(48, 1))  # without a seed
"""
    + MAKE
    + """class Dies(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if os.environ.get("DIES") == str(self.steps):
            os._exit(3)
    def on_epoch_end(self, epoch, logs=None):
        if os.environ.get("READS"):
            self.model.get_weights()
best = keras.callbacks.EarlyStopping("loss", patience=200, restore_best_weights=True)
slower = keras.callbacks.ReduceLROnPlateau("loss", patience=2, min_delta=0.01)
first, second = make(), make()
h = first.fit(x, y, batch_size=8, epochs=6, validation_split=0.2, verbose=0,
              callbacks=[Dies(), best, slower])
first.save("first.keras")
os.rename("first.keras", "last.keras")
second.fit(x, first.predict(x, verbose=0), verbose=0, callbacks=[Dies()])
for step in range(4):
    second.train_on_batch(x[:32], y[:32])
    if os.environ.get("DIES") == f"batch{step}":
        os._exit(3)
found = [h.history, second.evaluate(x, y, verbose=0)]
print("RESULT", json.dumps([*found, *[w.tolist() for w in first.get_weights()]]))
"""
)


@pytest.mark.launches
@launch.NEEDS_CORE
def test_a_script_continues_in_the_middle_of_an_epoch(tmp_path):
    """Three jobs, of 2, 1 and 2 ranks, make what one process makes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    seed = {"COLLECTIVE_SEED": "5", "COLLECTIVE_RESUME_SECONDS": "0.01"}
    folder = ["--resume", str(tmp_path / "states")]
    ranks = [*LAUNCHER, "-np", "2", "--keras"]
    alone = [sys.executable, "-m", "collective.distribute"]
    outputs = []
    for words, expected, more in (
        (alone, 0, {}),
        ([*ranks, *folder], 3, {"DIES": "13"}),
        ([*alone, *folder], 3, {"DIES": "batch2"}),
        ([*ranks, *folder], 0, {}),
    ):
        env = launch.environment(forked=True, **seed, **more)
        code, printed = launch.run([*words, str(script)], env, 150, tmp_path)
        assert code == expected, printed
        outputs.append(printed)
    wanted, found = (json.loads(outputs[i].split("RESULT ")[1]) for i in (0, 3))
    for one, other in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-12)
    for name, values in wanted[0].items():
        np.testing.assert_allclose(found[0][name], values, 1e-9)
    assert len(os.listdir(tmp_path / "states")) == 3  # two states and a lock


@pytest.mark.matrix
@launch.NEEDS_CORE
def test_a_script_that_reads_weights_between_steps_is_refused_by_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = [*LAUNCHER, "-np", "2", "--keras", "--resume", "states", str(script)]
    more = {"READS": "1", "COLLECTIVE_RESUME_SECONDS": "0.01"}
    env = launch.environment(**more, DIES="13")
    code, printed = launch.run(words, env, 100, tmp_path)
    assert code == 3, printed
    code, printed = launch.run(words, launch.environment(**more), 100, tmp_path)
    assert code == 2 and "the script cannot be resumed" in printed, printed
    assert "script.py:19 reads " in printed or "script.py:19" in printed, printed
