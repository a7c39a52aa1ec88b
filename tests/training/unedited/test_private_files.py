"""What a rank other than 0 writes to logs: copies of its own, until it becomes rank 0."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from keras.src.callbacks.callback_list import CallbackList

from collective.training.unedited.private_files import keep_writes_private


class Job:
    """A job of two ranks of which this is the second; replaces nothing."""

    def __init__(self) -> None:
        self.backend = SimpleNamespace(rank=1)
        self.undone = False
        self.copies: dict[str, str] = {}
        self.made: set[str] = set()
        self.takes_over: list[Any] = []
        self.open: Any = None
        self.writer: Any = None
        self.connect: Any = None

    def replace(self, owner: Any, name: str, value: Any) -> None:
        if name == "open":
            self.open = value
        if name == "create_file_writer":
            self.writer = value
        if name == "connect":
            self.connect = value


def in_callback(action: Any) -> Any:
    """Call it as a method of a callback is called."""
    callback = SimpleNamespace(on_epoch_begin=lambda *_: found.append(action()))
    found: list[Any] = []
    listed = CallbackList([])
    listed.callbacks = [callback]
    listed.on_epoch_begin(0)
    return found[0]


def test_a_log_is_private_until_this_rank_becomes_rank_zero(tmp_path):
    job = Job()
    keep_writes_private(job)
    log, other = tmp_path / "log.txt", tmp_path / "data.txt"
    with job.open(other, "w") as file:  # of the script: every rank writes it
        file.write("all")
    assert other.read_text() == "all"
    log.write_text("rank 0\n")
    file = in_callback(lambda: job.open(log, "w"))
    print("first", file=file, flush=True)
    with job.open(log) as read:  # what it has written it also reads
        assert read.read() == "first\n"
    assert log.read_text() == "rank 0\n"
    job.takes_over[0]()
    assert log.read_text() == "first\n"
    print("second", file=file, flush=True)
    assert log.read_text() == "first\nsecond\n"
    file.close()


def test_what_is_appended_is_private_wherever_it_is_written(tmp_path):
    job = Job()
    keep_writes_private(job)
    log = tmp_path / "log.txt"
    for line in ("one", "two"):
        with job.open(log, "a") as file:
            print(line, file=file)
    assert not log.exists() and job.open(log).read() == "one\ntwo\n"
    with in_callback(lambda: job.open(tmp_path / "new.txt", "x")) as file:
        file.write("1")
    assert not (tmp_path / "new.txt").exists()


def rows_of(connected: sqlite3.Connection) -> int:
    with contextlib.closing(connected):
        return connected.execute("select count(*) from trials").fetchone()[0]


def add(connected: sqlite3.Connection) -> None:
    with contextlib.closing(connected), connected:
        connected.execute("create table if not exists trials(value)")
        connected.execute("insert into trials values (1.0)")


def test_a_data_base_is_private_and_begins_as_the_real_one(tmp_path):
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    add(sqlite3.connect(old))
    time.sleep(1.1)  # the clock of a file system may be behind
    job = Job()
    keep_writes_private(job)
    add(sqlite3.connect(new))  # by rank 0
    for path, count in ((old, 2), (new, 1)):
        add(job.connect(path))
        assert rows_of(job.connect(str(path))) == count
        assert rows_of(sqlite3.connect(path)) == 1
    job.connect(":memory:").close()
    made = tmp_path / "made.db"  # by the script, on each rank
    with job.open(made, "wb") as file:
        file.write(new.read_bytes())
    job.made.add(str(made))  # as ``removals`` notes it
    assert rows_of(job.connect(made)) == 1
    job.takes_over[0]()
    add(job.connect(old))
    assert rows_of(sqlite3.connect(old)) == 3


def test_summaries_are_private_and_the_step_that_writes_them_is_the_same(tmp_path):
    job = Job()
    keep_writes_private(job)

    def types(create):
        writer = create(str(tmp_path / "logs"))

        @tf.function
        def step(x):
            with writer.as_default():
                tf.summary.scalar("x", x, step=1)

        made = step.get_concrete_function(tf.TensorSpec([])).graph.get_operations()
        return [op.type for op in made]

    assert types(job.writer) and not list(tmp_path.iterdir())
    assert types(job.writer) == types(tf.summary.create_file_writer)
    job.takes_over[0]()
    job.writer(str(tmp_path / "later"))
    assert (tmp_path / "later").is_dir()
