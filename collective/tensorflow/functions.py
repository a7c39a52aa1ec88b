"""``horovod.tensorflow.functions``: objects and variables, the same on every rank.

The bytes of objects go through the collectives on NumPy arrays, so neither a graph nor
a session is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import tensorflow as tf

import collective
from collective import tensorflow_ops
from collective.tensorflow.process_sets import ProcessSet, global_process_set, group_of
from collective.tensorflow.reductions import movable, restored


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank the root's object.

    Args:
        obj: The object; its value on other ranks does not matter.
        root_rank: The root, counted in the whole job.
        session: Not used.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part.

    Returns:
        The object itself on the root, a copy elsewhere.

    Raises:
        CollectiveError: If a rank died or made another call.
    """
    group = group_of(process_set)
    root = collective.rank() == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8) if root else None
    length = np.array([0 if data is None else data.size])
    what = f"{name or 'object'} from {root_rank}"
    length = collective.broadcast(length, root_rank, None, f"length of {what}", group)
    if data is None:
        data = np.empty(int(length[0]), np.uint8)
    data = collective.broadcast(data, root_rank, None, what, group)
    return obj if root else cloudpickle.loads(data.tobytes())


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that calls ``broadcast_object``."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in their order.

    Args:
        obj: This rank's object.
        session: Not used.
        name: Shown in errors; must be the same on every rank.
        process_set: The ranks that take part.

    Raises:
        CollectiveError: If a rank died or made another call.
    """
    group, name = group_of(process_set), name or "objects"
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = collective.allgather(
        np.array([data.size]), None, f"lengths of {name}", group
    )
    everyone = collective.allgather(data, None, name, group)
    pieces = np.split(everyone, np.cumsum(lengths)[:-1])
    # Ranks that have joined contribute no object.
    return [cloudpickle.loads(piece.tobytes()) for piece in pieces if piece.size]


def tf_variable(variable: Any) -> tf.Variable:
    """Return the TensorFlow variable of a Keras variable; any other unchanged."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def tensor_of(value: Any) -> tf.Tensor:
    """Return a tensor, variable or array as a tensor."""
    return tf.convert_to_tensor(tf_variable(value))


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Give every rank the root's values of variables, all in one call.

    Args:
        variables: Variables of TensorFlow or Keras, of equal shapes and dtypes on every
            rank.
        root_rank: The root, counted in the whole job.
        process_set: The ranks that take part.
        inplace: Not used: both ways need the same memory here.

    Returns:
        The operation to run in a graph of TensorFlow 1, else None.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if they do not agree.
    """
    group = [tf_variable(variable) for variable in variables]
    assigned = _assign(group, root_rank, None, process_set)
    if tf.executing_eagerly():
        return None
    return tf.group(*assigned)


@tf.autograph.experimental.do_not_convert
def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Call ``broadcast_variables``, and return the values."""
    group = [tf_variable(variable) for variable in variables]
    assigned = _assign(group, root_rank, name, process_set)
    with tf.control_dependencies(assigned if not tf.executing_eagerly() else None):
        return [variable.read_value() for variable in group]


def _assign(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    sent = [movable(tf.convert_to_tensor(variable)) for variable in variables]
    received = tensorflow_ops.broadcast(sent, root_rank, name, group_of(process_set))
    return [
        variable.assign(restored(value, variable.dtype.base_dtype))
        for variable, value in zip(variables, received, strict=True)
    ]


def broadcast_global_variables(root_rank: int) -> tf.Operation | None:
    """Give every rank the root's variables, in a graph of TensorFlow 1.

    Raises:
        RuntimeError: In eager mode, which has no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution.\n"
            "HINT: hvd.broadcast_variables(model.variables, root_rank=0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all variables when a session of TensorFlow 1 begins.

    Args:
        root_rank: The rank whose values all ranks get.
        device: The device of the operation; any by default.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self.bcast_op)
