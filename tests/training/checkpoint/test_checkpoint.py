"""Checkpoints: a training continues bit by bit, files are whole, bad ones are skipped.

Plain, it runs in one process; ``test_fit.test_on_ranks`` runs this file on several, each rank
with a folder of its own, without a common disk. ``test_killing`` has whole jobs.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from collective.errors import CollectiveError, UsageError
from collective.training import Checkpoint, keras_compat
from collective.training.loop.state import values_of
from collective.training.model.variables import replicated_variables
from collective.training.observers.checkpoint import schedule, storage
from tests import launch
from tests.training import small
from tests.training.small import (
    BATCH,
    FEATURES,
    NAMES,
    PER_EPOCH,
    Waiting,
    adamw,
    assert_ranks_agree,
    gather,
    model,
    names,
    rows,
    state,
    train,
)

pytestmark = pytest.mark.usefixtures("clean_keras")
PLAIN = pytest.mark.skipif(launch.launched(), reason="rank 0's error ends the job")


@pytest.fixture
def first(backends_by_name):
    """Return the ranks' backend, or the first of one process, so that long tests run once."""
    return backends_by_name(NAMES[0])


@pytest.fixture
def alone(backends_by_name):
    return backends_by_name("single")


def everything():
    return small.everything(dropout=True)()


def callbacks() -> list[keras.callbacks.Callback]:
    """Return callbacks that reduce the rate, so that a hook called twice is noticed."""
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.7 * rate)]


def assert_equal(result, wanted) -> None:
    assert result.losses == wanted.losses
    assert result.history == wanted.history
    for value, other in zip(state(result.model), state(wanted.model), strict=True):
        np.testing.assert_array_equal(value, other)


def resumed(backend, folder, **more):
    checkpoint = Checkpoint(folder, resume=True)
    settings = {"model": everything, "validate": True, "callbacks": callbacks()}
    return train(backend, checkpoint=checkpoint, **(settings | more))


def test_resumed_anywhere_it_is_the_uninterrupted_run(first, tmp_path, capfd):
    settings = {"model": everything, "validate": True, "epochs": 3}
    wanted = train(first, callbacks(), **settings)
    checkpoint = Waiting(tmp_path / "a", every=4, keep=99)
    end = 2 * PER_EPOCH + 2
    train(first, callbacks(), **settings, steps=end, checkpoint=checkpoint)
    assert checkpoint.failed is None
    written, *others = gather(first, names(tmp_path / "a"))
    # Every fourth step, one of them between two epochs, and the last one within an epoch.
    assert written == [f"step-{s:09d}" for s in (4, 8, 12, 14)] and end == 14
    assert not any(others)
    for steps in (12, 14):
        folder = tmp_path / str(steps)
        if first.rank == 0:
            shutil.copytree(tmp_path / "a" / f"step-{steps:09d}", folder / written[-1])
        result = resumed(first, folder, epochs=3)
        assert_ranks_agree(first, result)
        assert_equal(result, wanted)
        assert len(result.timing.rows) == 3 * PER_EPOCH - steps
        if first.rank == 0:
            message = f"resumed from {folder / written[-1]}"
            assert f"{message}: epoch {steps // PER_EPOCH + 1}, step {steps}\n" in (
                capfd.readouterr().out
            )


@PLAIN
def test_resumed_when_all_is_done_it_gives_the_same_again(backends_by_name, tmp_path):
    """A callback stops it in the middle of an epoch, and it does not continue."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.model.optimizer.iterations == PER_EPOCH + 2

    backend = backends_by_name("tf-mirrored:3")
    checkpoint = Checkpoint(tmp_path)
    settings = {"model": everything, "validate": True, "epochs": 3}
    wanted = train(backend, [Stops()], **settings, checkpoint=checkpoint)
    assert len(wanted.losses) == PER_EPOCH + 2
    result = resumed(backend, tmp_path, epochs=3, callbacks=())
    assert_equal(result, wanted)
    assert not result.timing.rows


@PLAIN
def test_another_number_of_replicas_goes_on_the_same(backends_by_name, tmp_path):
    keras.config.set_floatx("float64")
    one, three = (backends_by_name(name) for name in ("single", "tf-mirrored:3"))
    settings = {"model": model(adamw), "data": rows()}
    wanted = train(one, **settings)
    for backend, steps in ((one, 5), (three, 2 * PER_EPOCH), (one, None)):
        checkpoint = Checkpoint(tmp_path, resume=True)
        result = train(backend, **settings, steps=steps, checkpoint=checkpoint)
    np.testing.assert_allclose(result.losses, wanted.losses, rtol=1e-12)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(
            result.history[name], wanted.history[name], rtol=1e-12
        )
    for value, other in zip(state(result.model), state(wanted.model), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-9, atol=1e-12)


@PLAIN
def test_a_state_stays_as_it_was_taken(alone):
    """Nothing is copied, so the step must not change buffers that are held elsewhere."""
    made = train(alone, model=everything, epochs=1).model
    taken = values_of(made)
    copies = [np.array(value) for value in taken]
    train(alone, model=made, epochs=1)
    moved = 0
    for value, copy, variable in zip(
        taken, copies, replicated_variables(made), strict=True
    ):
        np.testing.assert_array_equal(value, copy)
        moved += not np.array_equal(np.array(variable), copy)
    assert moved > len(copies) / 2


@PLAIN
def test_keras_alone_can_read_the_weights(alone, tmp_path):
    result = train(alone, model=model(), steps=4, checkpoint=Checkpoint(tmp_path))
    again = model()()
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "step-000000004" / "model.weights.h5")
    for value, wanted in zip(state(again), state(result.model), strict=True):
        np.testing.assert_array_equal(value, wanted)


@PLAIN
def test_keras_format_holds_all_but_seeds(alone, tmp_path):
    made = train(alone, model=everything, steps=1).model
    variables = replicated_variables(made)
    path = str(tmp_path / "x.weights.h5")
    values = [np.asarray(np.array(v) + np.array(1, v.dtype)) for v in variables]
    left = keras_compat.weights_file.save_weights(made, variables, values, Path(path))
    assert [variables[i].name for i in left] == [keras_compat.seeds.SEED_STATE]
    before = state(made)
    found = keras_compat.weights_file.load_weights(made, variables, Path(path))
    for i, (value, old) in enumerate(zip(found, before, strict=True)):
        if i in left:
            assert value is None
        else:
            np.testing.assert_array_equal(value, old + np.array(1, old.dtype))
    for value, old in zip(state(made), before, strict=True):
        np.testing.assert_array_equal(value, old)


@PLAIN
def test_a_layer_that_cannot_be_saved_is_reported(alone, tmp_path, capsys):
    class Unsaved(keras.layers.Dense):
        def save_own_variables(self, store):
            raise TypeError("no, never")

    made = model(None, Unsaved(4))
    with pytest.raises(CollectiveError, match="was not written: no, never"):
        train(alone, model=made, steps=3, checkpoint=Waiting(tmp_path, every=1))
    assert names(tmp_path) == []
    printed = capsys.readouterr().err
    assert printed.count("could not be written to ") == 3, printed
    assert printed.count("no, never; none is there; the training continues") == 3


@PLAIN
def test_global_generators_go_on_where_they_were(alone, tmp_path):
    def draw() -> list[float]:
        own = np.array(keras.random.normal((2,))).tolist()
        return [random.random(), random.gauss(0, 1), np.random.normal(), *own]

    class Draws(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            drawn.append(draw())

    drawn: list = []
    train(alone, [Draws()], steps=8)
    wanted, drawn = drawn, []
    train(alone, [Draws()], steps=5, checkpoint=Checkpoint(tmp_path))
    random.seed(99)
    np.random.seed(99)
    train(alone, [Draws()], steps=8, checkpoint=Checkpoint(tmp_path, resume=True))
    assert drawn == wanted


# --- bad ones -----------------------------------------------------------------------


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    for one in file.parent.iterdir():
        one.unlink()


def foreign(file: Path) -> None:
    file.write_text('{"format": "zip"}')


def other_plan(file: Path) -> None:
    """Make it a valid checkpoint of another training."""
    change(file, lambda body: body["plan"].update(seed=77))


def other_model(file: Path) -> None:
    change(file, lambda body: body["state"]["arrays"][0].update(shape=[9, 9]))


def pipe(file: Path) -> None:
    """A reader would wait for ever; nothing in the manifest names the file."""
    file.unlink()
    os.mkfifo(file)
    manifest = file.with_name(storage.MANIFEST)
    if manifest != file:
        change(manifest, lambda body: body["files"].pop(file.name))


def sealed(file: Path) -> None:
    """Put the checksums of the files of now into the manifest."""
    sums = {
        n: storage._sum(file.with_name(n)) for n in (storage.WEIGHTS, storage.ARRAYS)
    }
    change(file.with_name(storage.MANIFEST), lambda body: body.update(files=sums))


def bomb(file: Path) -> None:
    """Two members of 64 MB in a few KB."""
    with np.load(file) as arrays:
        huge = dict.fromkeys(arrays, np.zeros(1 << 23))
    np.savez_compressed(file, **huge)
    sealed(file)


def absurd(file: Path) -> None:
    """The header of an array of 8 TB."""
    header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
    with np.load(file) as arrays:
        names = list(arrays)
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array_header_1_0(member, header)
    sealed(file)


def weights(make) -> Callable[[Path], None]:
    """A fault that puts another array in the place of the first one of the weights."""

    def harm(file: Path) -> None:
        with h5py.File(file, "r+") as opened:
            found: list[str] = []
            opened.visit(lambda n: found.append(n) if n.endswith("vars/0") else None)
            del opened[found[0]]
            make(opened, found[0], file)
        sealed(file)

    return harm


def huge(opened: h5py.File, name: str, file: Path) -> None:
    opened.create_dataset(name, (1 << 20, 1 << 9), "f4", compression="gzip")


def linked(opened: h5py.File, name: str, file: Path) -> None:
    opened[name] = h5py.ExternalLink(file.parent / "other.h5", "x")


def outside(opened: h5py.File, name: str, file: Path) -> None:
    opened.create_dataset(name, (FEATURES, 8), "f4", external=file.parent / "other.bin")


def change(file: Path, how) -> None:
    body = json.loads(file.read_text())
    del body["crc32"]
    how(body)
    body["crc32"] = storage._sum_of(body)
    file.write_text(json.dumps(body))


BAD = {
    "short-weights": (cut_short, storage.WEIGHTS, "model.weights.h5 is torn"),
    "flipped-weights": (flip, storage.WEIGHTS, "model.weights.h5 is torn"),
    "flipped-arrays": (flip, storage.ARRAYS, "training.npz is torn"),
    "no-arrays": (Path.unlink, storage.ARRAYS, "training.npz is missing"),
    "flipped-manifest": (flip, storage.MANIFEST, "checkpoint.json is torn"),
    "short-manifest": (cut_short, storage.MANIFEST, "checkpoint.json is torn"),
    "empty": (empty, storage.MANIFEST, "it has no checkpoint.json"),
    "foreign": (foreign, storage.MANIFEST, "it is not a checkpoint of this program"),
    "other-plan": (
        other_plan,
        storage.MANIFEST,
        "it was made with seed 77, and here it is 5",
    ),
    "other-model": (
        other_model,
        storage.MANIFEST,
        "it is of another model, optimizer",
    ),
    "pipe-weights": (
        pipe,
        storage.WEIGHTS,
        "model.weights.h5 is missing, or not a file",
    ),
    "pipe-arrays": (pipe, storage.ARRAYS, "training.npz is missing, or not a file"),
    "pipe-manifest": (pipe, storage.MANIFEST, "it has no checkpoint.json"),
    "bomb": (bomb, storage.ARRAYS, "its arrays are larger than the file"),
    "absurd": (
        absurd,
        storage.ARRAYS,
        "it cannot be read: Unable to allocate 8.00 TiB",
    ),
    "huge-weights": (weights(huge), storage.WEIGHTS, "vars/0 is compressed, or in"),
    "linked-weights": (weights(linked), storage.WEIGHTS, "or in another file"),
    "outside-weights": (weights(outside), storage.WEIGHTS, "or in another file"),
}


@pytest.fixture(scope="module")
def three(tmp_path_factory, backends_by_name):
    """Return a folder of three good checkpoints."""
    folder = tmp_path_factory.mktemp("three")
    checkpoint = Waiting(folder, every=2)
    train(backends_by_name("single"), model=model(), steps=6, checkpoint=checkpoint)
    assert len(names(folder)) == 3
    return folder


def read_all(folder: Path, trained: keras.Model) -> str:
    """Return the name of the checkpoint that is used."""
    from collective.training.input.pipeline import Input

    plan = asdict(Input(rows(), BATCH, seed=5).plan)
    found = Checkpoint(folder)._newest(trained, plan, resumes=True)
    return f"step-{found.step:09d}"


@pytest.fixture(scope="module")
def trained(backends_by_name):
    return train(backends_by_name("single"), model=model(), steps=1).model


@PLAIN
@pytest.mark.parametrize("what", BAD)
def test_a_bad_one_is_passed_over_and_reported(what, three, trained, tmp_path, capsys):
    harm, file, message = BAD[what]
    folder = shutil.copytree(three, tmp_path / "all")
    first, second, third = names(folder)
    assert read_all(folder, trained) == third
    capsys.readouterr()
    harm(folder / third / file)
    (folder / "step-000000099").write_text("not even a folder")
    assert read_all(folder, trained) == second
    printed = capsys.readouterr()
    assert f"resumed from {folder / second}: " in printed.out
    warned = f"warning: {folder / third} is not used: "
    (line,) = (w for w in printed.err.splitlines() if w.startswith(warned))
    assert message in line
    assert "step-000000099 is not used: it is not a checkpoint" in printed.err
    for name in (first, second):
        harm(folder / name / file)
    with pytest.raises(UsageError, match=r"no checkpoint in .* can be used") as error:
        read_all(folder, trained)
    assert "HINT: " in str(error.value) and error.value.exit_code == 2


@PLAIN
@pytest.mark.parametrize("method", ["is_file", "open", "read_text"])
def test_one_that_the_disk_does_not_give_is_passed_over(
    method, three, trained, monkeypatch, capsys
):
    *_, second, third = names(three)
    stock = getattr(Path, method)

    def refused(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.parent.name == third:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stock(path, *arguments, **named)

    monkeypatch.setattr(Path, method, refused)
    assert read_all(three, trained) == second
    assert (
        f"{third} is not used: it cannot be read: [Errno 13]" in capsys.readouterr().err
    )


@PLAIN
def test_after_a_bad_one_training_goes_on_from_the_one_before(alone, three, tmp_path):
    folder = shutil.copytree(three, tmp_path / "all")
    flip(folder / "step-000000006" / storage.WEIGHTS)
    checkpoint = Waiting(folder, every=2, keep=2, resume=True)
    result = train(alone, steps=10, checkpoint=checkpoint)
    assert result.losses == train(alone, steps=10).losses
    # The bad checkpoint has been written again, and the last two are kept.
    assert names(folder) == ["step-000000008", "step-000000010"]


@PLAIN
def test_fewer_steps_than_were_made_are_refused(alone, three):
    with pytest.raises(UsageError, match="is at step 6 already, and 3 steps") as error:
        train(alone, steps=3, checkpoint=Checkpoint(three, resume=True))
    assert "HINT: " in str(error.value) and error.value.everywhere


@PLAIN
def test_what_costs_too_much_is_left_out(alone, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schedule, "PART_OF_TIME", 1e-9)
    train(alone, steps=9, checkpoint=Checkpoint(tmp_path, every=2))
    # The first is written to measure its cost, and the last at any cost.
    assert names(tmp_path) == ["step-000000002", "step-000000009"]
    assert "warning: 3 checkpoints were skipped" in capsys.readouterr().err


@PLAIN
def test_a_folder_in_use_or_out_of_reach_is_refused(alone, three, tmp_path):
    with pytest.raises(UsageError, match=r"has checkpoints already, up to step-0+6\n"):
        train(alone, steps=1, checkpoint=Checkpoint(three))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written to"):
        train(alone, steps=1, checkpoint=Checkpoint(tmp_path / "file" / "x"))
    for wrong in ({"every": 0}, {"keep": 0}):
        with pytest.raises(UsageError, match="every 1 or more steps"):
            Checkpoint(tmp_path, **wrong)
