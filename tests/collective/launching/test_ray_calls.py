"""What passes between a Ray actor and its rank, without Ray: a rank is a thread here."""

from __future__ import annotations

import pickle
import tempfile
import threading

import cloudpickle
import pytest

from collective.errors import CollectiveError, UsageError
from collective.library import PeerLost
from collective.ray import RayExecutor
from collective.ray.serve import serve
from collective.ray.worker import Worker


class Sum:
    def __init__(self, start, step=1):
        self.total, self.step = start, step

    def add(self, number):
        self.total += self.step * number
        return self.total


@pytest.fixture
def worker(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    worker = Worker()
    worker.listen("job", 0)
    return worker


def rank(*arguments):
    """Starts the rank; returns its thread and the list of the error it ends with."""
    ended = []

    def run():
        try:
            serve("job", *arguments)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def call(function):
    return cloudpickle.dumps(function)


def test_calls_share_the_executable_until_the_end(worker):
    thread, ended = rank(Sum, (5,), {"step": 10})
    assert worker.accept() == 0
    assert worker.execute(call(lambda made: made.add(1))) == 15
    assert worker.execute(call(lambda made: made.add(2))) == 35
    worker.end()
    thread.join(120)
    assert not ended and not thread.is_alive()


def test_a_failure_ends_the_rank(worker):
    thread, ended = rank(None, (), {})
    worker.accept()
    with pytest.raises(
        CollectiveError, match=r"(?s)rank 0 failed.*ZeroDivisionError"
    ) as got:
        worker.execute(call(lambda _: 1 / 0))
    assert "all ranks have ended" in got.value.hint
    thread.join(120)
    assert isinstance(ended[0], ZeroDivisionError)
    with pytest.raises(CollectiveError, match="the rank has ended"):
        worker.execute(call(lambda _: 0))


def test_a_lost_actor_ends_the_rank(worker):
    thread, ended = rank(None, (), {})
    worker.accept()
    worker.rank.close()
    thread.join(120)
    assert isinstance(ended[0], EOFError)


def test_arguments():
    with pytest.raises(UsageError, match="elastic jobs on Ray"):
        RayExecutor(min_workers=1, max_workers=4)
    for arguments in ({}, {"num_workers": 2, "num_hosts": 2}):
        with pytest.raises(UsageError, match="one of num_workers and num_hosts"):
            RayExecutor(RayExecutor.create_settings(), **arguments)
    executor = RayExecutor(num_hosts=2, num_workers_per_host=3, use_gpu=True)
    assert executor._request.bundles() == ([{"CPU": 3, "GPU": 3}] * 2, "STRICT_SPREAD")
    assert [executor._request.bundle_of(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UsageError, match="not started"):
        executor.run(print)
    executor.shutdown()


@pytest.mark.parametrize("kind", [CollectiveError, UsageError, PeerLost])
def test_errors_are_pickled(kind):
    error = kind("what", hint="do", everywhere=False)
    error.rank = 3
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == "what\nHINT: do"
    assert (copy.rank, copy.everywhere) == (3, False)
