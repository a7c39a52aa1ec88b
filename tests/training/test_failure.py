"""One rank fails: its report, and how it ends the job."""

import io
import os
import sys

import pytest
import tensorflow as tf

from collective.backends import base
from collective.log import log
from collective.training.process import readers
from collective.training.process.failure import ends_the_job


class Aborted(Exception):
    pass


class Rank:
    """Stands for rank 1 of 2; records the exit code with which it ends the job."""

    rank, size = 1, 2
    alike = False

    def fails_alike(self, mark, seconds):
        return self.alike

    def ended_by_another(self, error):
        return None

    def abort(self, exit_code):
        self.exit_code = exit_code
        raise Aborted


@pytest.mark.parametrize(
    "error, code, message",
    [
        (KeyboardInterrupt(), 130, "rank 1: interrupted"),
        (KeyError("x"), 1, "rank 1: KeyError ended the job"),
    ],
)
def test_a_rank_that_fails_ends_the_job(error, code, message, capfd):
    rank = Rank()
    with pytest.raises(Aborted), ends_the_job(rank):
        raise error
    assert rank.exit_code == code
    printed = capfd.readouterr().err
    assert message in printed
    assert ("Traceback" in printed) == (code == 1)


def test_a_rank_that_has_closed_its_streams_ends_the_job(monkeypatch):
    for name in ("stdout", "stderr"):
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, name, closed)
    rank = Rank()
    with pytest.raises(Aborted), ends_the_job(rank):
        raise KeyError("x")
    assert rank.exit_code == 1
    monkeypatch.setattr(os, "_exit", rank.abort)
    with pytest.raises(Aborted):
        base.end_process(3)
    assert rank.exit_code == 3
    log.warning("nobody reads this")


def test_what_every_rank_raises_can_be_caught_and_others_not():
    rank = Rank()
    rank.alike = True
    error = ValueError("of every rank")
    with pytest.raises(ValueError) as caught, ends_the_job(rank), ends_the_job(rank):
        raise error
    assert caught.value is error
    # Ranks may still wait for parts of a graph's sums, so these are never alike.
    Rank.call = lambda self, function: function()
    with pytest.raises(Aborted), ends_the_job(rank):
        rank.call(lambda: tf.debugging.assert_equal(1, 2))


@pytest.mark.parametrize("chained", [False, True])
def test_an_error_of_a_script_keeps_no_reader_of_its_data(chained, monkeypatch):
    """With the interpreter's end its threads would wait for ever, and so would the job."""
    ended = []

    def rows():
        try:
            while True:
                yield 1
        finally:
            ended.append("rows")

    def fail(batches):
        try:
            next(batches)
            raise ValueError("of a callback")
        except ValueError:
            if chained:
                raise KeyError("of what handles it") from None
            raise

    kind = tf.TensorSpec([], tf.int64)
    data = tf.data.Dataset.from_generator(rows, output_signature=kind).prefetch(2)
    with pytest.raises((ValueError, KeyError)) as error:
        fail(iter(data))
    readers.end_readers()  # the script has caught it
    assert not ended
    monkeypatch.setattr(sys, "last_value", error.value, raising=False)
    readers.end_readers()
    assert ended
