"""Elastic backends: the job continues when ranks die, leave or join."""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from collective.backends.base import Backend, CoreOptions
from collective.environment import Environment, detect
from collective.environment.base import MAX_NP, MIN_NP
from collective.errors import UsageError


@dataclass(frozen=True)
class ElasticOptions(CoreOptions):
    """How many ranks an elastic job may have.

    Attributes:
        min_np: The job continues while so many ranks live (native, mpi). None: the
            launcher's ``--min-np``; without it, a rank that dies ends the job.
        max_np: How many ranks there may ever be (native, mpi). None: the launcher's
            ``--max-np``; without it, no rank joins later.
    """

    min_np: int | None = None
    max_np: int | None = None


O = TypeVar("O", bound=ElasticOptions)  # noqa: E741


def with_launcher_options(options: O) -> O:
    """The options; where the user set none, those given to ``collectiverun``."""
    given = {
        name: int(os.environ[variable])
        for name, variable in (("min_np", MIN_NP), ("max_np", MAX_NP))
        if os.environ.get(variable) and getattr(options, name) is None
    }
    return dataclasses.replace(options, **given)


class Elastic(Backend):
    """A backend whose ranks may change, where ``Options.min_np`` is set.

    When ranks die, collectives raise errors for which ``lost`` is true, and every rank
    that is left calls ``regroup``. The same call admits ranks that wait to join, and
    follows ``leave`` on another rank.
    """

    option_type: ClassVar[type[CoreOptions]] = ElasticOptions
    options: ElasticOptions

    def __init__(self, options: ElasticOptions, environment: Environment | None = None):
        environment = environment or detect()
        super().__init__(options, environment)
        self.joins = environment.joining
        self.elastic = options.min_np is not None
        self._max_replicas = options.max_np
        self._rank_variable: Any = None

    @classmethod
    def check_options(cls, options: CoreOptions, environment: Environment) -> None:
        """Refuses more ranks than were started."""
        super().check_options(options, environment)
        assert isinstance(options, ElasticOptions)
        if (options.min_np or 1) > environment.size:
            raise UsageError(
                f"min_np={options.min_np}, and the number of ranks is "
                f"{environment.size}",
                hint=f"min_np={environment.size} or less",
            )

    @property
    def most_replicas(self) -> int:
        """The highest number of replicas that the job may have."""
        return self._max_replicas or self.replicas

    def replica(self) -> Any:
        """This replica's number; in an elastic job a variable, read in each step."""
        if not self.elastic:
            return super().replica()
        import tensorflow as tf

        if self._rank_variable is None:  # a traced function must see it change
            with tf.init_scope(), tf.device("CPU"):
                self._rank_variable = tf.Variable(
                    self.rank, trainable=False, dtype=tf.int64
                )
        return self._rank_variable.read_value()

    @abstractmethod
    def lost(self, error: BaseException) -> bool:
        """Whether the error means only that ranks died, and the rest can continue.

        If so, every rank that is left calls ``regroup``.
        """

    @abstractmethod
    def regroup(self) -> list[int]:
        """Continues with the ranks that are left, renumbered in their old order.

        Ranks that wait to join come after them, where the backend can admit them.

        Returns:
            The former number of each rank, by its new one; -1 for a rank that joined.
        """

    def enter(self) -> list[int]:
        """Joins the job that already runs, where this process ``joins`` one.

        Returns:
            As ``regroup``.
        """
        raise NotImplementedError

    @abstractmethod
    def leave(self) -> None:
        """Leaves a job whose other ranks have agreed to continue without this one."""

    def _renumber(self, place: Environment) -> None:
        """Takes a new place in the job."""
        self._max_replicas = self.most_replicas
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.replicas = place.size
        self.local_replicas = range(place.rank, place.rank + 1)
        if self._rank_variable is not None:
            self._rank_variable.assign(place.rank)
