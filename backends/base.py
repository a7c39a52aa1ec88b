"""The interface between the training step and the code that sums its gradients.

A backend knows processes, devices and sums; it knows no model and no data set. The step
uses this class only and does not know which backend it has.
``collective.backends.capabilities`` has what only some backends can do, one class each.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from collective import deadline, recorder, streams
from collective.backends.options import Options
from collective.environment import Environment, detect_rank
from collective.errors import CollectiveError, UsageError
from collective.running_time import Deadline

if TYPE_CHECKING:
    import tensorflow as tf


def script_command(unedited: str = "") -> str:
    """Return ``python script.py``, for hints, with the path of the script that runs.

    An unedited script needs ``python -m collective.distribute``: without, each process
    would train by itself.

    Args:
        unedited: Options to put in front of an unedited script.
    """
    script = script_path()
    if "collective.distribute" not in sys.orig_argv:
        return f"python {script}"
    return " ".join(filter(None, ("python -m collective.distribute", unedited, script)))


def script_path() -> str:
    """Return the path of the script that runs, as typed in this folder, for hints.

    Without a script, as in a notebook or with ``python -m``, it is called script.py. A
    program of this package has a file of its name in a checkout's root.
    """
    path = sys.argv[0] if sys.argv else ""
    folder, name = os.path.split(path)
    if not name.endswith(".py") or name == "__main__.py":
        return "script.py"
    if folder == os.path.dirname(streams.__file__):
        return name
    inside = os.path.relpath(path)
    if os.path.isabs(path) and not inside.startswith(os.pardir):
        path = inside
    return shlex.quote(path)


def end_process(exit_code: int) -> NoReturn:
    """End this process at once, from any thread; the launcher then ends the others."""
    streams.flush()
    os._exit(exit_code)


def wait_until(ended: Callable[[], bool], seconds: float) -> bool:
    """Poll until it has ended; return whether it has ended in time."""
    deadline = Deadline(seconds)
    while not (done := ended()) and not deadline.passed():
        time.sleep(0.01)
    return done


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used here.

    Attributes:
        usable: True when it can.
        reason: Why it can or cannot, in a few words.
        hint: The line to type to make it usable; empty when it is.
    """

    usable: bool
    reason: str
    hint: str = ""


class Backend(ABC):
    """One way to sum gradients over the replicas of a job.

    A *process* is what a launcher starts; a *replica* computes gradients. Process
    backends have one replica in each of ``size`` processes; in-process backends
    have one process with several replicas.

    A subclass implements ``availability`` and ``_all_reduce``; with several processes
    also ``_broadcast_bytes`` and ``_barrier``. The public methods call those; in code that
    only rank 0 runs (``only_rank_zero``) they raise CollectiveError.

    Attributes:
        name: The word that the user types after ``--backend``.
        summary: One line for ``--list-backends``.
        takes: Names of the options that this class adds to its bases' options.
        launcher: The program that starts its ranks; empty for one process.
        extra_ranks: Ranks that hold no replica.
        one_replica: Whether there is never more than one replica.
        own_copies: Whether each replica has its own copy of a variable, which the
            user's code may write in a step.
        sends_as_made: Whether a collective in a graph waits for nothing but what it sends,
            and not for all operations with effects that were made before it.
        synchronous: Whether all replicas share each batch. If not, each worker trains
            on batches of its own, and a step sees one replica
            (``capabilities.Serving``).
        options: The options that the user chose.
        environment: The place that the launcher gave this process.
        called: The rank that the launcher gave this process. No other process of the
            job ever has it.
        rank, size: This process and the number of processes.
        local_rank, local_size: The same within this host.
        processes: Number of processes that the launcher started; ``size`` of them run
            the training's code.
        replicas: Number of replicas in the job.
        local_replicas: The replicas of this process, in order.
        chosen_because: Why this backend was chosen, for the summary.

    These have neutral values here, and a capability sets them:

    Attributes:
        elastic: Whether the job continues when ranks die, leave or join (``Elastic``).
        joins: Whether this process waits to join a job that already runs
            (``Elastic``); until then it is alone.
        overlaps: Whether ``all_reduce`` sums the first gradients while the last are
            computed (``SumsInBuckets``).
        rounds_to: The dtype in which large gradients travel, if it is not their own.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    takes: ClassVar[frozenset[str]] = frozenset({"threads"})
    launcher: ClassVar[str] = ""
    extra_ranks: ClassVar[int] = 0
    one_replica: ClassVar[bool] = False
    own_copies: ClassVar[bool] = True
    sends_as_made: ClassVar[bool] = False
    synchronous: ClassVar[bool] = True

    elastic: bool = False
    joins: bool = False
    overlaps: bool = False
    rounds_to: str | None = None

    _rank_zero_code = ""  # the code that rank 0 runs alone now, if any
    _of_all: Backend | None = None  # of a group of ranks: the backend that made it

    def __init__(self, options: Options, environment: Environment | None = None):
        self.options = options
        self.environment = environment = environment or detect_rank()
        self.called = environment.rank
        self._take_place(environment.current)
        self._among: dict[Any, Backend] = {}  # by their groups
        self.processes = self.size
        self.chosen_because = "asked for"

    def _take_place(self, place: Environment) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.replicas = place.size
        self.local_replicas = range(place.rank, place.rank + 1)

    def among(self, groups: Sequence[Sequence[int]]) -> Backend:
        """Return this backend among the ranks of one of several groups; outside ``run``.

        Every rank calls it, with the same groups in the same order. The returned backend
        has the collectives, ``rank`` and ``size`` of this rank's group alone. Both backends
        can be used, in turn; for the same groups it is the same one. If two groups overlap,
        the caller makes sure that their ranks call the collectives of both groups in the
        same order.

        Args:
            groups: The ranks of each group; each rank is in exactly one group.

        Raises:
            UsageError: A rank is in no group or in several, or the backend cannot form
                groups.
        """
        groups = [sorted(group) for group in groups]
        ranks = sorted(rank for group in groups for rank in group)
        if ranks != list(range(self.size)):
            raise UsageError(
                f"groups {[list(group) for group in groups]} of {self.size} ranks",
                hint="each rank must be in one group",
            )
        key = tuple(map(tuple, groups))
        if key not in self._among:
            self._among[key] = self._grouped(groups)
        return self._among[key]

    def _grouped(self, groups: Sequence[Sequence[int]]) -> Backend:
        number = next(i for i, group in enumerate(groups) if self.rank in group)
        found = copy.copy(self)
        found._of_all, found._among = self, {}
        found.rank, found.size = groups[number].index(self.rank), len(groups[number])
        found.replicas, found.local_replicas = (
            found.size,
            range(found.rank, found.rank + 1),
        )
        found._form_groups(groups, number)
        return found

    @property
    def of_all(self) -> Backend:
        """Return the backend of all ranks: this one, unless it is ``among`` some."""
        return self._of_all or self

    def _form_groups(self, groups: Sequence[Sequence[int]], number: int) -> None:
        """Have this copy of a backend exchange within group ``number`` alone."""
        if self.size == 1 == len(groups):
            return  # one process, alone before and after
        raise UsageError(
            f"backend {self.name!r} has no groups of ranks",
            hint="backend native, mpi, tf-multiworker or horovod",
        )

    @classmethod
    @abstractmethod
    def availability(cls, environment: Environment) -> Availability:
        """Say whether this backend works here. Never raises, starts nothing."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which model and optimizer must be built."""
        return contextlib.nullcontext()

    def run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call ``step(*args)`` for every local replica; return the first result.

        This is used inside a ``tf.function``.
        """
        return step(*args)

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        explain: Callable[[Exception], Exception] = lambda error: error,
    ) -> Any:
        """Call a ``tf.function`` that uses ``run``.

        Args:
            function: Returns a vector, or a vector and other values.
            args: Tensors.
            explain: Maps an error to the one that is raised.

        Returns:
            The function's result. If the backend is not synchronous, an object whose
            method ``numpy`` waits for the vector.
        """
        try:
            return function(*args)
        except Exception as error:
            raise explain(error) from None

    def explained(self) -> contextlib.AbstractContextManager[Any]:
        """Make errors of the backend's own library say what has happened."""
        return contextlib.nullcontext()

    def replica(self) -> int | tf.Tensor:
        """Return this replica's number in the job, inside ``run``: an int or tensor."""
        return self.local_replicas[0]

    def replica_count(self) -> int | tf.Tensor:
        """Return the number of replicas, inside ``run``: an int or tensor."""
        return self.replicas

    @property
    def most_replicas(self) -> int:
        """Return the largest number of replicas: the length of vectors over replicas."""
        return self.replicas

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], rounded: Sequence[int] = ()
    ) -> list[tf.Tensor]:
        """Return the sum of each tensor over all replicas, inside ``run``.

        Args:
            tensors: Dense tensors of equal shapes and dtypes on every replica.
            rounded: Indices of the gradients: only these may travel in fewer bits, if a
                backend has such an option. All other tensors are counts, or are divided
                by counts, and are summed exactly.

        Returns:
            The sums, in order, the same bits on every replica.
        """
        self.require_all_ranks()
        return self._all_reduce(list(tensors))

    @abstractmethod
    def _all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sum as ``all_reduce`` does; every rank takes part."""

    def assign(
        self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]
    ) -> None:
        """Write values, the same on each replica, to variables, inside ``run``."""
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def broadcast(self, variables: Sequence[tf.Variable]) -> None:
        """Give every process rank 0's values of the variables, outside ``run``."""
        if self.size == 1:
            return
        for variable in variables:
            variable.assign(self.broadcast_array(np.asarray(variable)))

    def broadcast_array(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Return the root's array on every process, outside ``run``."""
        self.require_all_ranks()
        array = np.array(array, order="C")
        with (
            recorder.span(recorder.BROADCAST, "by the backend", array.nbytes),
            deadline.waiting("in a broadcast"),
        ):
            if array.size:
                self._broadcast_bytes(array.reshape(-1).view(np.uint8), root)
        return array

    def _broadcast_bytes(self, data: np.ndarray, root: int) -> None:
        """Overwrite a uint8 vector by the root's; do nothing in one process."""

    def barrier(self) -> None:
        """Wait until every process has called it."""
        self.require_all_ranks()
        with (
            recorder.span(recorder.BARRIER, "by the backend"),
            deadline.waiting("in a barrier"),
        ):
            self._barrier()

    def _barrier(self) -> None:
        """Wait as ``barrier`` does; do nothing in one process."""

    def close(self) -> None:
        """End all that the backend started. The process may continue without it."""

    def abort(self, exit_code: int) -> None:
        """End this process at once, and the whole job: no other rank waits for it.

        By default the launcher ends every other rank.
        """
        end_process(exit_code)

    def fails_alike(self, mark: int, seconds: float) -> bool:
        """Return whether every rank calls this with the same mark, within some seconds.

        A rank that has failed calls it: other ranks may be in other collectives, which
        this does not disturb. After False the job can only be ended.

        Args:
            mark: Describes the failure; below 2**53.
        """
        return False

    def ended_by_another(self, error: BaseException) -> int | None:
        """Return the exit code of the rank that ended the job, if the error says so."""
        return None

    def require_all_ranks(self) -> None:
        """Raise CollectiveError in code that only rank 0 runs."""
        if self._of_all is not None:
            self._of_all.require_all_ranks()
        if self._rank_zero_code:
            raise CollectiveError(
                f"a collective was called from {self._rank_zero_code}, "
                "which runs on rank 0 only; the other ranks would wait for ever",
                hint="call it on every rank, outside callbacks",
                everywhere=False,
            )

    @contextlib.contextmanager
    def only_rank_zero(self, what: str) -> Iterator[None]:
        """Make collectives raise at once inside ``what``, which only rank 0 runs."""
        self._rank_zero_code = what if self.size > 1 else ""
        try:
            yield
        finally:
            self._rank_zero_code = ""

    @contextlib.contextmanager
    def with_all_ranks(self) -> Iterator[None]:
        """Let collectives run inside ``only_rank_zero``: the other ranks take part."""
        what, self._rank_zero_code = self._rank_zero_code, ""
        try:
            yield
        finally:
            self._rank_zero_code = what


class OneProcessBackend(Backend):
    """A backend whose replicas are all in one process, the only one that is started."""

    def __init__(self, options: Options, environment: Environment | None = None):
        super().__init__(options, environment)
        if self.size > 1:
            raise UsageError(
                f"backend {self.name!r} is one process, but {self.size} were started: "
                "each would train a model of its own",
                hint=f"another backend, or one process: {self.typed(self.size)}",
            )

    @classmethod
    def availability(cls, environment: Environment) -> Availability:
        """Return whether it is usable: if no launcher started several processes."""
        if environment.size > 1:
            started = f"{environment.size} processes were started"
            return Availability(False, started, cls.typed(environment.size))
        return Availability(True, cls._found())

    @classmethod
    def typed(cls, replicas: int) -> str:
        """Return what to type for one process with so many replicas."""
        takes = {name for kind in cls.__mro__ for name in vars(kind).get("takes", ())}
        devices = f" --devices {replicas}" if "devices" in takes else ""
        return script_command(f"--backend {cls.name}{devices}")

    @classmethod
    def _found(cls) -> str:
        """Return in a few words why it can be used."""
        return "always"
