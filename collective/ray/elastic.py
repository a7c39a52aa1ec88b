"""Jobs that survive a lost actor (``min_workers``): they ask Ray for a new one.

Each rank has an actor that holds its resources (``Holders``), on any node that Ray chooses.
Each node with such actors has one more, without resources, that runs the agent. The launcher
on the first of these nodes, the head, reads once a second how many ranks each node may have,
and then works as with ``--min-np`` and ``--max-np``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collective.errors import CollectiveError, UsageError
from collective.launch.agents import function
from collective.ray.holders import Holders, lost_errors, report
from collective.ray.placement import actor as ask
from collective.ray.worker import Found
from collective.run_function import launcher_words

_POLL_SECONDS = 1.0
_END_SECONDS = 20.0  # until all nodes know that the job has ended


@dataclass(frozen=True)
class Limits:
    """The number of ranks of a job: at least, at the start, and at most."""

    least: int
    start: int
    most: int
    resets: int | None = None  # changes of the ranks after which the job ends

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.start <= self.most:
            raise UsageError(
                f"min_workers={self.least}, num_workers={self.start}, "
                f"max_workers={self.most}: each at least 1, and in ascending order",
                hint="min_workers=2, num_workers=4, max_workers=4",
            )


@dataclass
class Agent:
    """The actor that runs a node's agent, and the call that ends with the job there."""

    actor: Any
    number: int  # number of the node; 0 is the head
    gpus: Sequence[str]  # GPUs that its ranks see
    outcome: Any
    result: function.NodeResult | None = None
    ended: float = 0  # time of the end, if there is a result

    def slots(self, found: Sequence[Found]) -> int:
        """Return how many ranks it may have: they get the first GPUs of its list.

        A GPU that is not held ends the list.
        """
        held = set(_gpus(found))
        if not held:
            return len(found)
        first = len(list(itertools.takewhile(held.__contains__, self.gpus)))
        return min(len(found), first // len(found[0].gpus))


class ElasticJob:
    """One call on ranks that may be lost and replaced.

    Args:
        holders: The actors of the ranks.
        limits: The numbers of ranks.
        call: Function and arguments, pickled.
        seconds: Limit for placing the first ranks, and for each agent to reach the head.
        options: Further options of the launcher.
        elastic_seconds: Limit for placing enough actors after the loss of the head.
    """

    def __init__(
        self,
        holders: Holders,
        limits: Limits,
        call: bytes,
        seconds: int,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        elastic_seconds: int = 600,
    ):
        self.holders, self.limits = holders, limits
        self.call, self.seconds = call, seconds
        self.elastic_seconds = elastic_seconds
        self.options = options
        # The agents hold no CPU; for that Ray sets OMP_NUM_THREADS to 1.
        threads = str(max(1, int(holders.each.get("CPU", 1))))
        self.variables = {"OMP_NUM_THREADS": threads, **(variables or {})}
        self.agents: dict[str, Agent] = {}  # by node

    def run(self) -> list[Any]:
        """Run the job to its end; begin it again if its head was lost.

        Returns:
            The results, by rank, of the ranks at the end of the job.

        Raises:
            CollectiveError: A rank failed, or ``limits`` allow no more changes.
            UsageError: Ray does not have the resources in time.
        """
        import ray

        who, size, seconds = self.holders.who, self.limits.start, self.seconds
        for begun in itertools.count(1):
            self.holders.wait_for(size, seconds)
            try:
                nodes = self._run_once(size)
                return function.results(nodes, None, who)
            except lost_errors() as error:
                self._wait_for_agents()  # each ends after it has lost the head
                if begun > (self.limits.resets or begun):
                    raise CollectiveError(
                        f"{who}: the actor that leads the job was lost {begun} times: {error}",
                        hint="a higher reset_limit allows more losses",
                    ) from None
            finally:
                for agent in self.agents.values():
                    ray.kill(agent.actor)
                self.agents.clear()
            report(
                f"{who}: the actor that leads the job was lost: begun again, from the "
                "checkpoint if there is one"
            )
            time.sleep(_POLL_SECONDS)
            size, seconds = self.limits.least, self.elastic_seconds
        raise AssertionError("itertools.count() does not end")

    def _run_once(self, size: int) -> list[function.NodeResult]:
        """Return the result of each node; raise Ray's error if the head failed."""
        import ray

        node = next(iter(self.holders.by_node()))
        head = self._agent_actor(node)
        options = launcher_words(
            {
                "--num-proc": size,
                "--min-np": self.limits.least,
                "--max-np": self.limits.most,
                "--reset-limit": self.limits.resets,
            }
        )
        job = function.FunctionJob(
            self.call,
            self.seconds,
            head=ray.get(head.found.remote()).head,
            options=[*options, *self.options],
            elastic=True,
        )
        first = self.agents[node] = self._start(job, head, node, 0)
        numbers = itertools.count(1)
        while first.result is None:
            nodes = self.holders.by_node()
            for node in nodes:
                if node not in self.agents:
                    actor = self._agent_actor(node)
                    self.agents[node] = self._start(job, actor, node, next(numbers))
            slots = {
                agent.number: agent.slots(nodes.get(node, ()))
                for node, agent in self.agents.items()
            }
            first.actor.set_slots.remote(job.name, slots)
            running = {a.outcome: n for n, a in self.agents.items() if not a.result}
            calls = [*self.holders.calls, *running]
            lost = False
            for call in ray.wait(calls, timeout=_POLL_SECONDS)[0]:
                ended = self._agent_ended if call in running else self.holders.ended
                lost |= ended(call)
            if lost:
                time.sleep(_POLL_SECONDS)
            self._forget_agents()
        return self._results(first.result)

    def _agent_ended(self, call: Any) -> bool:
        """Handle the end of an agent; return whether its actor was lost.

        Raises:
            Exception: One of ``lost_errors``, if the agent was the head's.
        """
        import ray

        node = next(n for n, agent in self.agents.items() if agent.outcome == call)
        agent = self.agents[node]
        try:
            agent.result, agent.ended = ray.get(call), time.monotonic()
            return False
        except lost_errors():
            del self.agents[node]
            if not agent.number:
                raise
            return True

    def _forget_agents(self) -> None:
        """Make room for another agent after one has ended before the job."""
        import ray

        now = time.monotonic()
        for node, agent in list(self.agents.items()):
            if agent.number and agent.result and now > agent.ended + _END_SECONDS:
                ray.kill(self.agents.pop(node).actor)

    def _results(self, head: function.NodeResult) -> list[function.NodeResult]:
        """Return the results of the head, and of the nodes that ended as it did.

        Raises:
            CollectiveError: The job has succeeded, but the results of a node were lost.
        """
        found = [head]
        for call in self._wait_for_agents():
            if self._agent_ended(call) and head.code == 0:
                raise CollectiveError(
                    f"{self.holders.who}: the job has ended, but an actor was lost before "
                    "the results of its node had arrived",
                    hint="call it again, with collective.fit(..., checkpoint=...) to resume",
                )
        others = [agent.result for agent in self.agents.values() if agent.number]
        return found + [node for node in others if node and node.code == head.code]

    def _wait_for_agents(self) -> list[Any]:
        """Wait a while; return the calls of agents that have ended, without the head's."""
        import ray

        calls = [agent.outcome for agent in self.agents.values() if agent.number]
        if not calls:
            return []
        return ray.wait(calls, num_returns=len(calls), timeout=_END_SECONDS)[0]

    def _agent_actor(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return ask({}, NodeAffinitySchedulingStrategy(node, soft=False))

    def _start(
        self, job: function.FunctionJob, actor: Any, node: str, number: int
    ) -> Agent:
        gpus = _gpus(self.holders.by_node().get(node, ()))
        run = actor.run.options(concurrency_group="agent")
        outcome = run.remote(job, number, gpus, self.variables)
        return Agent(actor, number, gpus, outcome)


def run_elastic(
    limits: Limits,
    each: Mapping[str, float],
    call: bytes,
    seconds: int,
    who: str,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Ask Ray for the actors, and run one ``ElasticJob``."""
    holders = Holders(each, limits.most, who)
    try:
        return ElasticJob(holders, limits, call, seconds, options, variables).run()
    finally:
        holders.close()


def _gpus(found: Sequence[Found]) -> list[str]:
    return sorted(gpu for each in found for gpu in each.gpus)
