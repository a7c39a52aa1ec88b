"""The summary of a training: shown, and written."""

import io
import json
import os
import threading

import numpy as np
import pytest
from rich.console import Console

from collective.errors import CollectiveError
from collective.training.loop.summary import Summary


def summary(**more):
    names = Summary.__dataclass_fields__
    known = {"seconds_per_step": {"compute": 0.5}, "samples_per_second": 8.0}
    known |= {"backend": "single", "chosen_because": "asked for"}
    known |= {"processes": 1, "replicas": 1, "test": {}, "history": {}, "losses": []}
    return Summary(**({name: None for name in names} | known | more))


def test_a_metric_may_give_one_number_for_each_class(tmp_path):
    each = np.array([0.25, np.nan], np.float32)
    test = {"loss": 1.5, "recall": each}
    run = summary(test=test, history={"recall": [each]}, options={})
    printed = io.StringIO()
    run.print(Console(file=printed, width=80))
    assert "test recall" in printed.getvalue() and "0.2500 nan" in printed.getvalue()
    # Another user has made this.
    (tmp_path / "run.json.part").symlink_to(tmp_path / "planted")
    run.write_json(str(tmp_path / "run.json"))
    assert not (tmp_path / "planted").exists()
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["test"] == {"loss": 1.5, "recall": [0.25, None]}
    assert written["history"] == {"recall": [[0.25, None]]}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    summary().write_json(str(pipe))
    reader.join(120)
    assert json.loads(read[0])["backend"] == "single"
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("collective.json_file.os.replace", full)
    with pytest.raises(CollectiveError, match="No space left") as caught:
        summary().write_json(str(tmp_path / "run.json"))
    assert caught.value.exit_code == 1 and not list(tmp_path.iterdir())
