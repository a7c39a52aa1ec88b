"""What is taken from inside TensorFlow to read a traced graph and to write another one."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import auto_control_deps_utils, ops
from tensorflow.python.ops import (
    control_flow_util_v2,
    control_flow_v2_func_graphs,
    gen_functional_ops,
    handle_data_util,
    resource_variable_ops,
)
from tensorflow.python.util import _pywrap_determinism

from collective.replacements import replacing

# Whether operations are deterministic; no public function says so, or ends it.
determinism = _pywrap_determinism
# Graphs of the functions of loops and branches.
LoopCondition = control_flow_v2_func_graphs.WhileCondFuncGraph
LoopBody = control_flow_v2_func_graphs.WhileBodyFuncGraph
Branch = control_flow_v2_func_graphs.CondBranchFuncGraph

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
# Attributes that describe where an operation stood, and are wrong anywhere else.
_OF_PLACE = {"_output_shapes", "_class", "_XlaCompile", "_lower_using_switch_merge"}


#: The folder of TensorFlow's own code, and this file.
CODE = (os.path.join(os.path.dirname(tf.__file__), ""), __file__)


@contextlib.contextmanager
def before_reads(action: Callable[[tf.Variable], None]) -> Iterator[None]:
    """Inside, call an action before a variable is read."""
    kind = resource_variable_ops.BaseResourceVariable
    stock = kind._read_variable_op

    def noting(self: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return stock(self, *args, **kwargs)

    with replacing(kind, "_read_variable_op", noting):
        yield


def function_graph_of(name: str) -> Any:
    """Returns an empty graph of a function, to be made inside of ``as_default``."""
    return tf.__internal__.FuncGraph(new_name(name))


def complete(
    graph: Any,
    arguments: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    effects: Sequence[tf.Operation],
) -> None:
    """Says what a function's graph is called with, returns and does besides."""
    graph.inputs = [*arguments, *(inner for _, inner in graph.captures)]
    graph.outputs = graph.structured_outputs = list(outputs)
    graph.control_outputs = list(effects)


def new_name(begin: str) -> str:
    """A name that no function of this process has."""
    return f"{begin}_{ops.uid()}"


def called_function(op: tf.Operation) -> Any | None:
    """Returns the graph of the function that an operation calls, or None if it calls none."""
    if op.type in _CALLS:
        return function_graph(op, op.get_attr("f").name)
    if op.graph._get_function(op.type) is not None:  # called by its own name
        return function_graph(op, op.type)
    return None


def function_graph(op: tf.Operation, name: str) -> Any:
    """The graph of a function that an operation refers to."""
    shapes = [t.shape for t in op.inputs]
    if op.type in ("If", "StatelessIf", "Case", "StatelessCase"):
        shapes = shapes[1:]
    return control_flow_util_v2.get_func_graph(op, shapes, name)


def copy_operation(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, attr_value_pb2.AttrValue] | None = None,
) -> tf.Operation:
    """Copies an operation into the graph that is being traced, with other inputs.

    Args:
        attributes: Those that are others.
    """
    graph = tf.compat.v1.get_default_graph()
    values = {}
    for name, value in op.node_def.attr.items():
        if name not in _OF_PLACE:
            values[name] = value
        for function in [value.func.name, *(f.name for f in value.list.func)]:
            known = op.graph._get_function(function) if function else None
            if known is not None:
                graph._add_function_recursive(known)
    values.update(attributes or {})
    dtypes = [t.dtype for t in op.outputs]
    with graph.device(op.device) if op.device else contextlib.nullcontext():
        return graph._create_op_internal(
            op.type, list(inputs), dtypes, attrs=values, op_def=op.op_def
        )


def set_text_attribute(op: tf.Operation, name: str, text: str) -> None:
    """Gives an operation an attribute of ours, whose name begins with an underscore."""
    op._set_attr(name, attr_value_pb2.AttrValue(s=text.encode()))


def text_attribute(op: tf.Operation, name: str) -> str | None:
    """Returns an attribute of ours, or None if the operation has none of this name."""
    try:
        return str(op.get_attr(name).decode())
    except ValueError:
        return None


def one_open_shape() -> attr_value_pb2.AttrValue:
    """A list of one shape of which nothing is known, as an attribute of an operation."""
    shapes = [tf.TensorShape(None).as_proto()]
    return attr_value_pb2.AttrValue(
        list=attr_value_pb2.AttrValue.ListValue(shape=shapes)
    )


def run_operation(op: tf.Operation, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What an operation makes of these inputs, computed now."""
    attributes: list[Any] = []
    for attribute in op.op_def.attr:
        value = op.get_attr(attribute.name)
        if attribute.type == "type":
            value = value.as_datatype_enum
        elif attribute.type == "list(type)":
            value = [v.as_datatype_enum for v in value]
        attributes += [attribute.name, value]
    with tf.init_scope(), tf.device("CPU"):
        tensors = [
            tf.constant(value, t.dtype)
            for value, t in zip(inputs, op.inputs, strict=True)
        ]
        results = execute.execute(
            op.type.encode(),
            len(op.outputs),
            tensors,
            tuple(attributes),
            context.context(),
        )
    return [result.numpy() for result in results]


def inferred_shapes(
    op: tf.Operation,
    shapes: Sequence[Sequence[int | None] | None],
    constants: Sequence[np.ndarray | None],
) -> list[list[int | None] | None] | None:
    """Returns the shapes that TensorFlow infers for an operation's outputs, or None.

    Args:
        shapes, constants: Of its inputs, as far as they are known.
    """
    with tf.Graph().as_default():
        inputs = [
            tf.compat.v1.placeholder(t.dtype, shape)
            if constant is None
            else tf.constant(constant, t.dtype)
            for t, shape, constant in zip(op.inputs, shapes, constants, strict=True)
        ]
        try:
            made = copy_operation(op, inputs)
        except ValueError:
            return None
        found = [t.shape for t in made.outputs]
    return [None if shape.rank is None else shape.as_list() for shape in found]


def copy_handle_data(source: tf.Tensor, target: tf.Tensor) -> None:
    """Gives a handle the shape and dtype of what another one stands for."""
    handle_data_util.copy_handle_data(source, target)


def stand_in(shape: Sequence[int], dtype: str) -> tf.Variable:
    """A variable without a value, to trace what reads and writes it."""
    return resource_variable_ops.UninitializedVariable(
        trainable=False, shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype)
    )


def shape_of_variable(handle: tf.Tensor) -> tuple[int, ...] | None:
    """Returns the shape of the variable behind a handle, or None if it is unknown."""
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    shape = tf.TensorShape(data.shape_and_type[0].shape)
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def make_while(
    inputs: Sequence[tf.Tensor],
    condition: Any,
    body: Any,
    *,
    stateful: bool,
    parallel_iterations: int,
) -> list[tf.Tensor]:
    """A loop over two ``FuncGraph``."""
    make = gen_functional_ops._while if stateful else gen_functional_ops.stateless_while
    outputs = make(
        inputs,
        control_flow_util_v2.create_new_tf_function(condition),
        control_flow_util_v2.create_new_tf_function(body),
        output_shapes=_common_shapes([body.inputs, body.outputs]),
        parallel_iterations=parallel_iterations,
    )
    control_flow_util_v2.maybe_set_lowering_attr(outputs[0].op)
    return list(outputs)


def _common_shapes(tensors: Sequence[Sequence[tf.Tensor]]) -> list[tf.TensorShape]:
    """The shapes that all of several lists of tensors have."""
    return [
        functools.reduce(
            tf.TensorShape.most_specific_compatible_shape, [t.shape for t in of_one]
        )
        for of_one in zip(*tensors, strict=True)
    ]


def make_branches(
    index: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    branches: Sequence[Any],
    *,
    stateful: bool,
) -> tuple[list[tf.Tensor], tf.Operation]:
    """The call of one of several ``FuncGraph``, by number; its outputs and operation."""
    make = gen_functional_ops.case if stateful else gen_functional_ops.stateless_case
    made = make(
        index,
        inputs,
        [t.dtype for t in branches[0].outputs],
        [control_flow_util_v2.create_new_tf_function(graph) for graph in branches],
        output_shapes=_common_shapes([graph.outputs for graph in branches]),
    )
    op = made if isinstance(made, tf.Operation) else made[0].op
    control_flow_util_v2.maybe_set_lowering_attr(op)
    return ([] if isinstance(made, tf.Operation) else list(made)), op


def written_handles(op: tf.Operation) -> list[tf.Tensor]:
    """The handles of the variables that an operation writes, itself or in its branches."""
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return list(writes)


def shape_of(tensor: tf.Tensor) -> tuple[int | None, ...]:
    """Return the shape of a tensor as a tuple.

    ``tensor.shape`` makes an object each time, which takes longer than all else that a
    step does to look at a batch.
    """
    if isinstance(tensor, ops.EagerTensor):
        return tensor._shape_tuple()
    return tuple(tensor.shape)
