"""``RayExecutor``: Horovod's interface to a job that Ray places, whose ranks stay alive."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from collective.errors import CollectiveError, UsageError
from collective.launch.agents import function
from collective.ray.elastic import Limits
from collective.ray.elastic_executor import ElasticCalls, Settings
from collective.ray.job import lost_actors_named
from collective.ray.placement import Request, Workers
from collective.ray.worker import serve
from collective.run_function import launcher_words

_END_SECONDS = 20.0


class RayExecutor:
    """Ranks that Ray places, and that make one call after another until ``shutdown``.

    >>> executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
    >>> executor.start()
    >>> losses = executor.run(train, kwargs={"epochs": 3})
    >>> executor.shutdown()

    A function that fails on a rank ends all ranks, because others may wait for that one. A
    lost actor or node does the same. Then ``shutdown`` and ``start`` begin again. With
    ``min_workers`` each call has ranks of its own, which may be lost and replaced.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ):
        """Describe the job; ``start`` asks Ray for it.

        Args:
            settings: The result of ``create_settings``.
            num_workers: Number of ranks, on any nodes with room; or give the next two.
            num_hosts: Number of nodes.
            num_workers_per_host: Number of ranks on each of these nodes.
            cpus_per_worker: CPUs that Ray holds for each rank.
            use_gpu: Whether each rank has GPUs.
            gpus_per_worker: GPUs of each rank; 1 by default.
            use_current_placement_group: Whether to take the resources from the placement
                group of the calling actor or task, as Ray Tune has one.
            min_workers: Makes each call an elastic job (``ElasticCalls``). It begins with
                so many ranks, or ``num_workers``, and continues while so many are left.
            max_workers: The job grows to so many; by default while the cluster has room.
            reset_limit: Number of changes of its ranks after which it ends.
            cooldown_range: Seconds after which a rank that failed to join is replaced, at
                first and at most.
            elastic_timeout: Seconds to wait for ``min_workers``.
            override_discovery: Must be True: only Ray chooses the nodes.

        Raises:
            UsageError: The arguments contradict each other.
        """
        self._settings = settings or Settings()
        each: dict[str, float] = {"CPU": cpus_per_worker}
        if use_gpu:
            each["GPU"] = gpus_per_worker or 1
        self._elastic: ElasticCalls | None = None
        self._actors: list[Any] = []  # by rank
        self._nodes: list[Any] = []  # references to the result of each node
        self._workers: Workers | None = None
        if min_workers is not None:
            if num_hosts is not None or not override_discovery:
                raise UsageError(
                    "RayExecutor: with min_workers only Ray chooses the nodes: "
                    "no num_hosts, and no override_discovery=False",
                    hint="min_workers=2, max_workers=4",
                )
            start = num_workers or min_workers
            most = start if max_workers is None else max_workers
            more = {
                "--elastic-timeout": elastic_timeout,
                "--blacklist-cooldown-range": cooldown_range,
            }
            self._elastic = ElasticCalls(
                Limits(min_workers, start, most, reset_limit),
                each,
                max_workers is None,
                self._settings,
                elastic_timeout,
                [*self._options(), *launcher_words(more)],
            )
            return
        if max_workers or reset_limit or cooldown_range:
            raise UsageError(
                "RayExecutor: max_workers, reset_limit and cooldown_range are for "
                "elastic jobs",
                hint="min_workers=1",
            )
        if (num_workers is None) == (num_hosts is None):
            raise UsageError(
                "RayExecutor: one of num_workers and num_hosts is needed",
                hint="RayExecutor(settings, num_workers=4)",
            )
        size = num_workers or (num_hosts or 0) * num_workers_per_host
        if size < 1:
            raise UsageError(
                f"RayExecutor: {size} workers: at least 1", hint="num_workers=2"
            )
        self._request = Request(
            size=size,
            each=each,
            seconds=self._settings.placement_group_timeout_s,
            per_node=0 if num_workers else num_workers_per_host,
            use_current_group=use_current_placement_group,
        )

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Sequence[str] | None = None,
    ) -> Settings:
        """Make the settings of a job.

        Args:
            timeout_s: Seconds within which all ranks must start.
            ssh_identity_file: Ignored: agents need no ssh.
            ssh_str: Ignored.
            placement_group_timeout_s: Seconds within which Ray must have the resources.
            nics: Network interfaces between nodes.
        """
        return Settings(timeout_s, placement_group_timeout_s, nics)

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks; return when all are ready for calls.

        Args:
            executable_cls: Class of which each rank makes one object, for ``execute``.
            executable_args: Its arguments.
            executable_kwargs: Its keyword arguments.
            extra_env_vars: Environment variables of the ranks.

        Raises:
            CollectiveError: The ranks do not start; the error has their last lines.
            UsageError: It has been started; or Ray does not have the resources.
        """
        made = (executable_cls, executable_args or (), executable_kwargs or {})
        if self._elastic is not None:
            return self._elastic.start(*made, extra_env_vars or {})
        if self._workers is not None:
            raise UsageError("RayExecutor: started already", hint="shutdown() first")
        name = secrets.token_hex(16)
        call = function.pickled(serve, (name, *made), None)
        self._workers = Workers(self._request)
        try:
            with lost_actors_named("RayExecutor.start"):
                self._start(name, call, extra_env_vars or {})
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; return the results, by rank.

        Raises:
            CollectiveError: The function failed on a rank; the error has its traceback. Or
                an actor was lost.
            UsageError: The executor was not started, or ``callbacks`` are given, which do
                not exist.
        """
        _refuse(callbacks)
        if self._elastic is not None:
            return self._elastic.call(_without_executable(fn, args, kwargs))
        return self._get(self.run_remote(fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call as ``run`` does; return Ray's references to the results at once."""
        self._refuse_if_elastic("run_remote")
        return self._call(_without_executable(fn, args, kwargs), self._started())

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call ``fn(executable)`` on every rank; see ``run``."""
        _refuse(callbacks)
        if self._elastic is not None:
            return self._elastic.call(fn)
        return self._get(self._call(fn, self._started()))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 alone; return its result."""
        self._refuse_if_elastic("execute_single")
        return self._get(self._call(fn, self._started()[:1]))[0]

    def shutdown(self) -> None:
        """End the ranks, even during a call, and give the resources back."""
        if self._elastic is not None:
            self._elastic.shutdown()
        workers, self._workers = self._workers, None
        if workers is None:
            return
        import ray

        for actor in self._actors:
            actor.end.remote()
        if self._actors:
            ray.wait(self._nodes, num_returns=len(self._nodes), timeout=_END_SECONDS)
        self._actors, self._nodes = [], []
        workers.close()

    def _start(self, name: str, call: bytes, variables: Mapping[str, str]) -> None:
        import ray

        assert self._workers is not None
        workers = self._workers
        actors = [actor for node in workers.nodes for actor in node]
        places = [index for node in workers.nodes for index in range(len(node))]
        ray.get([a.listen.remote(name, i) for a, i in zip(actors, places, strict=True)])
        options = self._options()
        job = workers.job(call, self._settings.timeout_s, name=name, options=options)
        self._nodes = workers.start(job, variables)
        ranks = [actor.accept.remote() for actor in actors]
        waiting = [*ranks, *self._nodes]
        while any(rank in waiting for rank in ranks):
            done, waiting = ray.wait(waiting)
            if done[0] in self._nodes:  # the job ended before all ranks were ready
                nodes = ray.get(self._nodes)
                function.results(nodes, self._request.size, "RayExecutor.start")
        order = ray.get(ranks)
        self._actors = [actors[order.index(rank)] for rank in range(len(actors))]

    def _options(self) -> list[str]:
        return launcher_words({"--network-interfaces": self._settings.nics})

    def _refuse_if_elastic(self, name: str) -> None:
        if self._elastic is not None:
            raise UsageError(
                f"RayExecutor: no {name} with min_workers: ranks end with their call",
                hint="run() or execute()",
            )

    def _started(self) -> list[Any]:
        if not self._actors:
            raise UsageError("RayExecutor: not started", hint="executor.start() first")
        return self._actors

    def _call(self, fn: Callable[[Any], Any], actors: Sequence[Any]) -> list[Any]:
        import ray

        call = ray.put(cloudpickle.dumps(fn))  # Ray sends it once to each node
        return [actor.execute.remote(call) for actor in actors]

    def _get(self, references: list[Any]) -> list[Any]:
        """Return the results, or raise the first failure, which may cause the others."""
        import ray

        with lost_actors_named("RayExecutor"):
            try:
                waiting = references
                while waiting:
                    done, waiting = ray.wait(waiting)
                    ray.get(done)
                return ray.get(references)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, CollectiveError):
                    raise cause from None
                raise


def _without_executable(
    fn: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> Callable[[Any], Any]:
    given, named = tuple(args or ()), dict(kwargs or {})
    return lambda executable: fn(*given, **named)


def _refuse(callbacks: Sequence[Callable[..., Any]] | None) -> None:
    if callbacks:
        raise UsageError(
            "RayExecutor: callbacks are not supported",
            hint="callbacks of collective.fit, or of Keras, run on rank 0",
        )
