"""Variables of TensorFlow and of Keras: broadcast from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from collective import tensorflow_ops
from collective.operations.kinds import DTYPES
from collective.tensorflow.process_sets import ProcessSet, global_process_set, group_of


def tf_variable(variable: Any) -> tf.Variable:
    """The TensorFlow variable behind a Keras one; any other as it is."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def tensor_of(value: Any) -> tf.Tensor:
    """A tensor of what is one, or a variable, or an array."""
    return tf.convert_to_tensor(tf_variable(value))


@tf.autograph.experimental.do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Gives every rank the root's values of variables, all in one call.

    Args:
        variables: Of TensorFlow or Keras, of equal shapes and dtypes on every rank.
        root_rank: The root, counted in the whole job.
        process_set: The ranks that take part.
        inplace: Nothing: both ways need the same memory here.

    Returns:
        In a graph of TensorFlow 1, the operation to run; else None.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if they do not agree.
    """
    del inplace
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
    """As ``broadcast_variables``, returning the values."""
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
    # What the core does not know as numbers moves as bytes.
    sent = [
        tensor
        if tensor.dtype.base_dtype.name in DTYPES
        else tf.bitcast(tensor, tf.uint8)
        for tensor in map(tf.convert_to_tensor, variables)
    ]
    received = tensorflow_ops.broadcast(sent, root_rank, name, group_of(process_set))
    return [
        variable.assign(
            value
            if value.dtype == variable.dtype.base_dtype
            else tf.bitcast(value, variable.dtype.base_dtype)
        )
        for variable, value in zip(variables, received, strict=True)
    ]


def broadcast_global_variables(root_rank: int) -> tf.Operation | None:
    """Gives every rank the root's variables, in a graph of TensorFlow 1.

    Raises:
        RuntimeError: In eager mode, where there is no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution.\n"
            "HINT: hvd.broadcast_variables(model.variables, root_rank=0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Does it when a session of TensorFlow 1 begins.

    Args:
        root_rank: Whose values all ranks get.
        device: Where the operation is placed; any by default.
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self.bcast_op)
