"""Checkpoints at a URL: they are copied completely or not at all, and a training resumes from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from collective.errors import CollectiveError, UsageError
from collective.training import Checkpoint
from collective.training.observers.checkpoint import storage, stores
from tests import launch
from tests.training.small import Waiting, state, train

fsspec = pytest.importorskip("fsspec", reason="pip install fsspec")
pytestmark = [
    pytest.mark.usefixtures("clean_keras"),
    pytest.mark.skipif(launch.launched(), reason="rank 0 alone writes"),
]


@pytest.fixture
def alone(backends_by_name):
    return backends_by_name("single")


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return an object store in memory, and the test's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = fsspec.filesystem("memory")
    with contextlib.suppress(FileNotFoundError):
        found.rm("/runs", recursive=True)
    return found


def steps(files, root="/runs/a"):
    names = [name.rpartition("/")[2] for name in files.ls(root, detail=False)]
    return sorted(name for name in names if storage.NAME.fullmatch(name))


URL = "memory://runs/a"


def test_a_resumed_training_is_that_of_one_go(alone, files, tmp_path, capsys):
    whole = train(alone, steps=8)
    train(alone, steps=5, checkpoint=Waiting(URL, every=1, keep=2))
    assert steps(files) == ["step-000000004", "step-000000005"]
    with pytest.raises(UsageError, match="memory://runs/a has checkpoints already"):
        train(alone, steps=8, checkpoint=Checkpoint(URL))
    resumed = train(alone, steps=8, checkpoint=Checkpoint(URL + "/", resume=True))
    for value, wanted in zip(state(resumed.model), state(whole.model), strict=True):
        np.testing.assert_array_equal(value, wanted)
    printed = capsys.readouterr().out
    assert "resumed from memory://runs/a/step-000000005: epoch 1, step 5" in printed
    assert not [*tmp_path.glob("collective/checkpoints/*")]


@pytest.mark.parametrize("name", [storage.WEIGHTS, storage.ARRAYS, storage.MANIFEST])
def test_half_a_checkpoint_is_none(alone, files, name):
    train(alone, steps=4, checkpoint=Waiting(URL, every=2))
    files.rm(f"/runs/a/step-000000004/{name}")
    resumed = train(alone, steps=6, checkpoint=Checkpoint(URL, resume=True))
    assert len(resumed.losses) == 6
    assert steps(files)[-1] == "step-000000006"


def test_a_store_that_fails_does_not_end_the_training(
    alone, files, monkeypatch, capsys
):
    def full(*_, **__):
        raise OSError("no room")

    monkeypatch.setattr(type(files), "put_file", full)
    checkpoint = Checkpoint(URL)
    with pytest.raises(CollectiveError, match=r"was not written: .*OSError: no room"):
        train(alone, steps=2, checkpoint=checkpoint)
    assert "HINT: see whether the bucket can be reached" in capsys.readouterr().err


def test_what_cannot_be_reached_is_named(alone, files, monkeypatch):
    with pytest.raises(UsageError, match="nosuch://a") as got:
        train(alone, steps=1, checkpoint=Checkpoint("nosuch://a"))
    assert "keras-collective[url]" in got.value.hint
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UsageError, match="fsspec") as got:
        train(alone, steps=1, checkpoint=Checkpoint(URL))
    assert "pip install" in got.value.hint


def test_a_path_is_no_url(tmp_path):
    for place in (tmp_path, str(tmp_path), "runs/digits", "c:/runs"):
        assert not isinstance(stores.make(place), stores.UrlStore)


KILLED = """
import os, signal, sys
from collective.backends.factory import get
from tests.training.small import Waiting, train
import s3fs
url, copies = sys.argv[1], int(sys.argv[2])
plain = s3fs.S3FileSystem.put_file

def put_file(self, *arguments, **named):
    global copies
    copies -= 1
    if copies < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *arguments, **named)

s3fs.S3FileSystem.put_file = put_file
train(get("single"), steps=8, checkpoint=Waiting(url, every=2))
"""


@pytest.mark.matrix
def test_killed_while_it_writes_to_s3(alone, tmp_path, monkeypatch):
    pytest.importorskip("s3fs", reason="pip install s3fs")
    server = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")
    s3 = server.ThreadedMotoServer(port=0)
    s3.start()
    try:
        host, port = s3.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "XDG_CACHE_HOME": str(tmp_path),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        files = fsspec.filesystem("s3")
        files.mkdir("runs")
        whole = train(alone, steps=8)
        for copies in (0, 1, 4, 5):  # within the first and within the second checkpoint
            url = f"s3://runs/{copies}"
            words = [sys.executable, "-c", KILLED, url, str(copies)]
            done = subprocess.run(
                words, env={**os.environ, "PYTHONPATH": str(launch.ROOT)}, timeout=400
            )
            assert done.returncode == -signal.SIGKILL
            checkpoint = Checkpoint(url, resume=True)
            resumed = train(alone, steps=8, checkpoint=checkpoint)
            pairs = zip(state(resumed.model), state(whole.model), strict=True)
            for value, wanted in pairs:
                np.testing.assert_array_equal(value, wanted)
    finally:
        s3.stop()
