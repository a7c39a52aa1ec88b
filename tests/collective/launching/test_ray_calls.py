"""Messages between a Ray actor and its rank, without Ray: a rank is a thread here."""

from __future__ import annotations

import os
import pickle
import tempfile
import threading

import cloudpickle
import pytest

from collective import run_function
from collective.errors import CollectiveError, UsageError
from collective.launch.agents import folders
from collective.library import PeerLost
from collective.ray import RayExecutor
from collective.ray.elastic import Agent
from collective.ray.worker import Found, Worker, serve
from collective.run_function import by_rank


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
    """Start the rank; return its thread, and a list that gets its final error."""
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
    with pytest.raises(UsageError, match="are for elastic jobs"):
        RayExecutor(num_workers=2, max_workers=4)
    with pytest.raises(UsageError, match="min_workers=3, num_workers=3, max_workers=2"):
        RayExecutor(min_workers=3, max_workers=2)
    for refused in ({"num_hosts": 1}, {"override_discovery": False}):
        with pytest.raises(UsageError, match="only Ray chooses the nodes"):
            RayExecutor(min_workers=1, **refused)
    elastic = RayExecutor(min_workers=1, max_workers=4)
    for refused in (elastic.run_remote, elastic.execute_single):
        with pytest.raises(UsageError, match="with min_workers: ranks end"):
            refused(print)
    with pytest.raises(UsageError, match="not started"):
        elastic.run(print)
    elastic.shutdown()
    for arguments in ({}, {"num_workers": 2, "num_hosts": 2}):
        with pytest.raises(UsageError, match="one of num_workers and num_hosts"):
            RayExecutor(RayExecutor.create_settings(), **arguments)
    executor = RayExecutor(num_hosts=2, num_workers_per_host=3, use_gpu=True)
    assert executor._request.bundles() == ([{"CPU": 3, "GPU": 3}] * 2, "STRICT_SPREAD")
    assert [executor._request.bundle_of(i) for i in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(UsageError, match="not started"):
        executor.run(print)
    executor.shutdown()


def found(*gpus):
    return Found("node", "host:1", list(gpus))


def test_ranks_use_gpus_that_are_held():
    agent = Agent(None, 0, ["0", "1", "2", "3"], None)
    assert agent.slots([found(), found()]) == 2  # a job without GPUs
    assert agent.slots([found("2"), found("0"), found("1")]) == 3
    assert agent.slots([found("1"), found("0"), found("3")]) == 2
    assert agent.slots([found("1"), found("2")]) == 0
    assert agent.slots([found("0", "1"), found("2", "5")]) == 1
    assert agent.slots([]) == 0


def test_the_head_hears_how_many_slots_there_are(tmp_path):
    assert folders.read_slots(None) is None and folders.read_slots(tmp_path) is None
    folders.write_slots(tmp_path, {0: 2, 3: 1})
    folders.write_slots(tmp_path, {0: 1, 3: 4})
    assert folders.read_slots(tmp_path) == {0: 1, 3: 4}
    folders.write_slots(tmp_path / "gone", {0: 1})
    assert [file.name for file in tmp_path.iterdir()] == ["slots"]


def test_the_last_that_uses_a_folder_removes_it(tmp_path):
    folder = tmp_path / "job"
    with folders.used(folder):
        with folders.used(folder):
            folders.remove(folder)
        assert folder.exists()
    assert not any(tmp_path.iterdir())
    folders.remove(folder)


def test_results_are_those_of_the_last_generation():
    names = ["0-0.result", "0-3.result", "1-1.result", "1-0.result", "0-2.failure"]
    assert by_rank(names, ".result") == {0: "1-0.result", 1: "1-1.result"}
    assert by_rank(names, ".failure") == {2: "0-2.failure"}


def test_a_failure_is_read_whatever_the_umask(tmp_path):
    (tmp_path / "call").write_bytes(b"no pickle")
    (tmp_path / "call").chmod(0o600)
    before = os.umask(0o002)
    try:
        assert run_function._rank(tmp_path) == 1
    finally:
        os.umask(before)
    files = run_function.files_in(tmp_path)
    with pytest.raises(CollectiveError, match="who: rank 0 failed\nTraceback"):
        run_function.results(files, 1, 2, "who")


def test_what_no_rank_returned_is_said():
    files = {"0-0.result": b""}
    with pytest.raises(
        CollectiveError, match="code 3, without the results of rank 1\nx"
    ):
        run_function.results(files, 3, 2, "who", "x\n")
    with pytest.raises(CollectiveError, match=r"ended with exit code 0\nHINT"):
        run_function.results({}, 0, None, "who")


@pytest.mark.parametrize("kind", [CollectiveError, UsageError, PeerLost])
def test_errors_are_pickled(kind):
    error = kind("what", hint="do", everywhere=False)
    error.rank = 3
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == "what\nHINT: do"
    assert (copy.rank, copy.everywhere) == (3, False)
