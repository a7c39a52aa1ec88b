"""Requests of a Spark task to the agent of its node, without Spark."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from collective.launch.agents import function
from collective.spark import stage

HOSTS = ["a", "b", "a"]


class Context:
    """Stands for Spark's ``BarrierTaskContext``, for one of three tasks on two hosts."""

    def __init__(self, task: int):
        self.task = task

    def getTaskInfos(self):
        return [SimpleNamespace(address=f"{host}:4000") for host in HOSTS]

    def resources(self):
        return {"gpu": SimpleNamespace(addresses=[str(self.task)])}

    def partitionId(self):
        return self.task

    def allGather(self, text: str):
        if text.startswith("["):
            _, gpus = json.loads(text)
            assert gpus == [str(self.task)]
            return [json.dumps([7000 + task, [str(task)]]) for task in range(3)]
        return [text] * 3


@pytest.mark.parametrize(
    "task, node, gpus", [(0, 0, ["0", "2"]), (1, 1, ["1"]), (2, None, [])]
)
def test_the_first_task_of_each_node_runs_its_agent(task, node, gpus, monkeypatch):
    calls = []

    def run_node(*given):
        calls.append(given)
        return function.NodeResult(0)

    monkeypatch.setattr(function, "run_node", run_node)
    job = function.FunctionJob(b"call", 5, options=["--verbose"], python="python3")
    request = stage.Request(3, job, {"X": "1"})
    results = list(stage.run_task(Context(task), request))
    if node is None:
        assert not calls and not results
        return
    [(given, number, held, variables)] = calls
    assert (number, held, variables) == (node, gpus, {"X": "1"})
    assert (given.head, given.slots) == ("a:7000", [2, 1])
    kept = (given.name, given.secret, given.options, given.python)
    assert kept == (job.name, job.secret, ["--verbose"], "python3")
    assert len(given.name) == 32 and len(given.secret) == 64
