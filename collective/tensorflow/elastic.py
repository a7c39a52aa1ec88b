"""State that is saved, restored and the same on every rank, and functions of it.

``run`` restarts a function from the last committed state if workers were lost and the
launcher may continue without them (``collectiverun --min-np``). It restarts the
function from the present state if workers have joined (``--max-np``) or leave because
of SIGTERM: all ranks get to know it in the same ``commit``. If the launcher restarts
the job on other hosts (``collective.elastic.generations``), the next generation starts
from the present state, too. The same happens if all ranks ask for it together, by
``HorovodInternalError`` or ``HostsUpdatedInterrupt``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective import session
from collective.common.exceptions import HorovodInternalError as HorovodInternalError
from collective.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from collective.elastic import generations
from collective.elastic.preemption import LEAVES, RESTARTS, WAITING, Preemption
from collective.environment.base import MIN_NP
from collective.errors import CollectiveError, LeaveJob, NextGeneration
from collective.library import PeerLost
from collective.net import private_files
from collective.operations.allgather import allgather
from collective.tensorflow import basics
from collective.tensorflow.functions import (
    broadcast_object,
    broadcast_variables,
    tf_variable,
)

_preemption = Preemption()
_FILE = "state"


class State:
    """The state of a training function.

    Subclasses define how it is saved, restored and made the same on every rank.

    Args:
        bcast_object, get_rank, **kwargs: Horovod's; not used.
    """

    # Attributes with the values saved last, for the next generation of the job.
    _kept: tuple[str, ...] = ()

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any):
        self._reset_callbacks: list[Callable[[], None]] = []
        self._hosts_updated = False

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions that are called after the ranks have changed."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Run the reset callbacks after the ranks have changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: Any, update_res: Any) -> None:
        """Say that hosts have changed: the next ``commit`` interrupts every rank.

        Args:
            timestamp, update_res: Horovod's; not used.
        """
        self._hosts_updated = True

    def commit(self) -> None:
        """Save the state in memory, and check whether hosts have changed."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether ranks leave, or wait to join; all ranks call it.

        A rank that got SIGTERM ends here, with exit code 0. All ranks end here if the
        job's next generation is about to begin.

        Raises:
            HostsUpdatedInterrupt: On all other ranks, if there is a change.
        """
        if MIN_NP not in os.environ:
            return
        own = _preemption.flags() | (WAITING if self._hosts_updated else 0)
        self._hosts_updated = False
        flags = allgather(np.array([own]), name="host updates")
        if (flags & RESTARTS).any():
            self._end_generation()
        flags &= LEAVES | WAITING
        if flags[basics.rank()] & LEAVES:
            session.leave()
            raise LeaveJob
        if flags.any():
            raise HostsUpdatedInterrupt(skip_sync=not (flags & WAITING).any())

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the values that were saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do nothing. Subclasses may act here before the state is synchronized."""

    def _end_generation(self) -> None:
        """End for the next generation, with the state kept on each host."""
        self.save()
        kept = bool(self._kept) and basics.local_rank() == 0
        if kept:
            state = {name: getattr(self, name) for name in self._kept}
            try:
                folder = generations.make_state_folder()
                private_files.write(folder / _FILE, pickle.dumps(state))
            except OSError:
                kept = False
        if allgather(np.array([kept]), name="kept").any():
            generations.report_handed_over()
            raise NextGeneration(generations.EXIT_CODE)

    def _resume_generation(self) -> None:
        """Take the state that a host kept for this generation; all ranks call it."""
        if not generations.number():
            return
        folder = generations.kept_state() if basics.local_rank() == 0 else None
        state = None
        if folder is not None and (folder / _FILE).is_file():
            state = pickle.loads(private_files.read(folder / _FILE))
        found = allgather(np.array([state is not None]), name="kept")
        if found.any():
            root = int(found.argmax())
            vars(self).update(broadcast_object(state, root, name="kept state"))
            self.restore()
        if basics.local_rank() == 0:
            generations.remove_state()


class ObjectState(State):
    """Python objects, as attributes.

    Args:
        bcast_object, get_rank: Horovod's; not used.
        **kwargs: The attributes and their values.
    """

    _kept: tuple[str, ...] = ("_saved",)

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **kwargs: Any):
        super().__init__()
        self._saved = kwargs
        ObjectState.restore(self)

    def save(self) -> None:
        """Save the attributes; the objects that they refer to are not copied."""
        self._saved = {name: getattr(self, name) for name in self._saved}

    def restore(self) -> None:
        """Restore the saved attributes."""
        for name, value in self._saved.items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Give every rank the attributes that rank 0 has saved."""
        if self._saved:
            self._saved = broadcast_object(self._saved, name="elastic state")
            ObjectState.restore(self)


class TensorFlowState(ObjectState):
    """Variables of TensorFlow, and Python objects.

    Args:
        variables: The variables of the state; required in eager mode.
        session: Not used.
        **kwargs: Attributes and their values.

    Raises:
        ValueError: Without variables.
    """

    _kept = ("_saved", "_values")

    def __init__(
        self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any
    ):
        if not tf.executing_eagerly():
            raise NotImplementedError(
                "TensorFlowState in a graph of TensorFlow 1\nHINT: use it in eager mode"
            )
        self.variables = [tf_variable(v) for v in variables or ()]
        if not self.variables:
            raise ValueError(
                "TensorFlowState has no variables to track\n"
                "HINT: TensorFlowState(variables=[...])"
            )
        super().__init__(**kwargs)
        self._keep()

    def save(self) -> None:
        """Save variables and attributes."""
        self._keep()
        super().save()

    def restore(self) -> None:
        """Restore the saved variables and attributes."""
        for variable, value in zip(self._tracked(), self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every rank rank 0's variables, and the attributes that it has saved."""
        broadcast_variables(self._shared(), 0)
        self._keep()
        super().sync()

    def _tracked(self) -> list[Any]:
        return self.variables

    def _shared(self) -> list[Any]:
        return self.variables

    def _keep(self) -> None:
        self._values = [np.array(variable.numpy()) for variable in self._tracked()]


class TensorFlowKerasState(TensorFlowState):
    """A Keras model with its optimizer, and Python objects.

    Args:
        model: A built model.
        optimizer: By default the one that the model was compiled with.
        backend: Not used.
        **kwargs: Attributes and their values.

    Raises:
        ValueError: If the model is not built.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: Any = None,
        backend: Any = None,
        **kwargs: Any,
    ):
        if not model.built:
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)`."
            )
        self.model = model
        self.optimizer = optimizer or model.optimizer
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(self._tracked(), **kwargs)

    def _tracked(self) -> list[Any]:
        return [tf_variable(v) for v in [*self.model.variables, *self._of_optimizer()]]

    def _shared(self) -> list[Any]:
        # The seeds of random layers are left out: they are each rank's own.
        return [*self.model.weights, *self._of_optimizer()]

    def _of_optimizer(self) -> list[Any]:
        return [] if self.optimizer is None else list(self.optimizer.variables)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a state run from the same state on every rank.

    Args:
        func: Its first argument is the state. It may raise ``HorovodInternalError`` or
            ``HostsUpdatedInterrupt``, on every rank: then it starts again. It also does
            so when workers were lost and at least ``--min-np`` of them are left.

    Raises:
        CollectiveError: By the result, if a worker was lost and the job ends.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        if session.is_joining():
            basics.enter()
        generations.wait_for_previous()
        if not basics.entered():  # otherwise the other ranks are past it
            state._resume_generation()
        with _preemption if MIN_NP in os.environ else contextlib.nullcontext():
            return attempts(state, *args, **kwargs)

    def attempts(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = resets = False
        while True:
            try:
                if resets:
                    # A process may join that did not wait yet when the ranks agreed.
                    skip_sync = not _reconfigure() and skip_sync
                    # Its callbacks may call collectives, as a new rank does between
                    # init() and here: Horovod's way to build an optimizer is a step.
                    state.on_reset()
                    resets = False
                if not skip_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except (PeerLost, tf.errors.AbortedError) as error:
                if MIN_NP not in os.environ or not session.lost():
                    # The core's own line, out of TensorFlow's many, up to its HINT.
                    why = str(error).partition("\nHINT:")[0].rpartition("\n")[2]
                    raise _lost(why) from error
                state.restore()
                skip_sync = False
            resets = True

    return wrapper


def _reconfigure() -> bool:
    """Form a job of the ranks that are left and new ones; return if any are new."""
    if MIN_NP not in os.environ:
        basics.shutdown()
        basics.init()
        return False
    joined = basics.regroup()
    if basics.size() < int(os.environ[MIN_NP]):
        raise _lost(f"of the workers {basics.size()} are left")
    return joined


def _lost(why: str) -> CollectiveError:
    return CollectiveError(
        f"rank {basics.rank()}: a worker was lost: {why}",
        hint="start the job again from the last checkpoint; "
        "collectiverun --min-np N continues while N are left",
        everywhere=False,
    )
