"""The folder of checkpoints: it serves one training, on a disk that may be full."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import shutil
import subprocess
import sys

import keras
import pytest

from collective import disk
from collective.errors import CollectiveError, UsageError
from collective.training import Checkpoint
from collective.training.observers.checkpoint import schedule, storage
from tests import launch
from tests.training.small import Waiting, names, train

pytestmark = [
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.skipif(launch.launched(), reason="rank 0's error ends the job"),
]


@pytest.fixture
def alone(backends_by_name):
    return backends_by_name("single")


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_is_one_trainings_at_a_time(tmp_path, alone, monkeypatch):
    monkeypatch.setattr(schedule, "PATIENCE_SECONDS", 0.2)
    command = [sys.executable, "-c", HOLDS, str(tmp_path / schedule.LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        with pytest.raises(UsageError, match="another training writes"):
            train(alone, steps=1, checkpoint=Checkpoint(tmp_path))
        other.kill()
    train(alone, steps=1, checkpoint=Checkpoint(tmp_path))


def test_a_dead_process_that_cannot_end_holds_no_folder(tmp_path, alone, monkeypatch):
    command = [sys.executable, "-c", HOLDS, str(tmp_path / schedule.LOCK)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        dead = lambda pid: pid == other.pid  # noqa: E731
        monkeypatch.setattr(schedule.processes, "kill_is_pending", dead)
        train(alone, steps=1, checkpoint=Checkpoint(tmp_path))
        other.kill()


class Frees(keras.callbacks.Callback):
    """Calls a function after some steps."""

    def __init__(self, step: int, free):
        super().__init__()
        self.step, self.free = step, free

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            self.free()


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here: needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def goes_on_without_the_disk(backend, folder, free, capsys) -> str:
    """Train without a disk in steps 3 and 4; check the checkpoints of the others."""
    checkpoint = Waiting(folder, every=1, keep=2)
    full = Frees(3, lambda: free(False))
    result = train(
        backend, [full, Frees(5, lambda: free(True))], steps=7, checkpoint=checkpoint
    )
    assert result.losses == train(backend, steps=7).losses
    assert checkpoint.failed is None
    assert names(folder) == ["step-000000006", "step-000000007"]
    assert not list(folder.glob(".part*"))
    printed = capsys.readouterr().err
    for step in (3, 4):
        assert f"the checkpoint of step {step} could not be written to " in printed
    assert printed.count("step-000000002 is the last there") == 2
    assert printed.count("HINT: free some space") == 2
    return printed


def test_a_full_disk_is_reported_and_the_training_goes_on(alone, small_disk, capsys):
    filler = small_disk / ".filler"

    def free(there: bool) -> None:
        if there:
            filler.unlink()
            return
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    goes_on_without_the_disk(alone, small_disk, free, capsys)


def test_a_write_that_fails_is_reported_and_leaves_nothing(alone, tmp_path, capsys):
    """A limit on the size of files cannot be noticed before the write."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)

    def free(there: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, old if there else (9000, old[1]))

    try:
        goes_on_without_the_disk(alone, tmp_path / "c", free, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_folder_that_was_removed_is_reported(alone, tmp_path, capsys):
    folder = tmp_path / "c"
    removed = Frees(3, lambda: shutil.rmtree(folder))
    checkpoint = Waiting(folder, every=1, keep=2)
    with pytest.raises(CollectiveError, match="the last checkpoint was not written"):
        train(alone, [removed], steps=3, checkpoint=checkpoint)
    printed = capsys.readouterr().err
    assert "none is there" in printed
    assert "HINT: the folder was removed: make it again" in printed


def test_a_disk_without_sync_maps_and_locks_holds_checkpoints(
    tmp_path, alone, monkeypatch, capsys
):
    """As some FUSE, NFS and object mounts: named once, and used as they are."""

    def refuses(code):
        def call(*_, **__):
            raise OSError(code, os.strerror(code))

        return call

    monkeypatch.setattr(disk, "_warned", set())
    monkeypatch.setattr(os, "fsync", refuses(errno.EINVAL))
    monkeypatch.setattr(mmap, "mmap", refuses(errno.ENODEV))
    checkpoint = Waiting(tmp_path, every=1, keep=2)
    train(alone, steps=3, checkpoint=checkpoint)
    assert checkpoint.failed is None
    assert capsys.readouterr().err.count("cannot be synced to its disk") == 1
    [*_, saved] = sorted(tmp_path.glob("step-*"))
    with (saved / storage.WEIGHTS).open("rb") as weights:
        fcntl.flock(weights, fcntl.LOCK_EX)  # a second lock fails, as any does there
        train(alone, steps=4, checkpoint=Waiting(tmp_path, resume=True))
    assert names(tmp_path)[-1] == "step-000000004"
    monkeypatch.setattr(os, "fsync", refuses(errno.EIO))
    with pytest.raises(CollectiveError, match="Input/output error"):
        train(alone, steps=5, checkpoint=Waiting(tmp_path, resume=True))


@pytest.mark.parametrize("renamed", [False, True])
def test_killed_while_one_is_replaced_there_is_one(renamed, tmp_path):
    folder = tmp_path / "step-000000010"
    aside = tmp_path / f"{storage.REPLACED}{folder.name}"
    aside.mkdir()
    (aside / "old").touch()
    if renamed:
        folder.mkdir()
    storage.remove_parts(tmp_path)
    assert names(tmp_path) == [folder.name]
    assert names(folder) == ([] if renamed else ["old"])


def test_one_that_comes_too_early_is_left_out_and_counted(alone, tmp_path, monkeypatch):
    import threading

    free, write = threading.Event(), storage.write

    def slow(*arguments):
        free.wait()
        return write(*arguments)

    monkeypatch.setattr(storage, "write", slow)
    result = train(
        alone,
        [Frees(5, free.set)],
        steps=6,
        checkpoint=Checkpoint(tmp_path, every=2, keep=9),
    )
    assert len(result.losses) == 6
    assert names(tmp_path) == ["step-000000002", "step-000000006"]
