"""The parts inside TensorFlow that read a traced graph and write another one."""

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
# Attributes that describe the place of an operation, and are wrong in any other place.
_OF_PLACE = {"_output_shapes", "_class", "_XlaCompile", "_lower_using_switch_merge"}


#: The folder of TensorFlow's own code, and this file.
CODE = (os.path.join(os.path.dirname(tf.__file__), ""), __file__)


@contextlib.contextmanager
def before_reads(action: Callable[[tf.Variable], None]) -> Iterator[None]:
    """Call an action before each read of a variable inside."""
    kind = resource_variable_ops.BaseResourceVariable
    stock = kind._read_variable_op

    def noting(self: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        action(self)
        return stock(self, *args, **kwargs)

    with replacing(kind, "_read_variable_op", noting):
        yield


def function_graph_of(name: str) -> tf.Graph:
    """Return an empty graph of a function, to be filled inside of its ``as_default``."""
    return tf.__internal__.FuncGraph(new_name(name))


def complete(
    graph: tf.Graph,
    arguments: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    effects: Sequence[tf.Operation],
) -> None:
    """Set a function graph's arguments, its outputs, and its further effects."""
    graph.inputs = [*arguments, *(inner for _, inner in graph.captures)]
    graph.outputs = graph.structured_outputs = list(outputs)
    graph.control_outputs = list(effects)


def new_name(begin: str) -> str:
    """Return a name that no function of this process has yet."""
    return f"{begin}_{ops.uid()}"


def called_function(op: tf.Operation) -> tf.Graph | None:
    """Return the graph of the function that an operation calls, or None if it calls none."""
    if op.type in _CALLS:
        return function_graph(op, op.get_attr("f").name)
    if op.graph._get_function(op.type) is not None:  # called by its own name
        return function_graph(op, op.type)
    return None


def is_compiled(op: tf.Operation) -> bool:
    """Return whether XLA compiles the function that an operation calls."""
    attributes = op.node_def.attr
    return "_XlaMustCompile" in attributes and attributes["_XlaMustCompile"].b


def function_graph(op: tf.Operation, name: str) -> tf.Graph:
    """Return the graph of a function that an operation refers to."""
    shapes = [t.shape for t in op.inputs]
    if op.type in ("If", "StatelessIf", "Case", "StatelessCase"):
        shapes = shapes[1:]
    return control_flow_util_v2.get_func_graph(op, shapes, name)


def copy_operation(
    op: tf.Operation,
    inputs: Sequence[tf.Tensor],
    attributes: Mapping[str, attr_value_pb2.AttrValue] | None = None,
) -> tf.Operation:
    """Copy an operation into the graph that is being traced, with other inputs.

    Args:
        attributes: The attributes that the copy does not have in common.
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


def wait_for(op: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Have an operation wait for others, which may have been made after it."""
    op._add_control_inputs(list(others))


def set_text_attribute(op: tf.Operation, name: str, text: str) -> None:
    """Give an operation an attribute of ours, whose name begins with an underscore."""
    op._set_attr(name, attr_value_pb2.AttrValue(s=text.encode()))


def text_attribute(op: tf.Operation, name: str) -> str | None:
    """Return an attribute of ours, or None if the operation lacks it."""
    try:
        return str(op.get_attr(name).decode())
    except ValueError:
        return None


def one_open_shape() -> attr_value_pb2.AttrValue:
    """Return an attribute of an operation: a list of one shape that is not known at all."""
    shapes = [tf.TensorShape(None).as_proto()]
    return attr_value_pb2.AttrValue(
        list=attr_value_pb2.AttrValue.ListValue(shape=shapes)
    )


def run_operation(op: tf.Operation, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run an operation on these inputs now, and return its outputs."""
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
    """Return the shapes that TensorFlow infers for an operation's outputs, or None.

    Args:
        shapes, constants: The shapes and values of its inputs, as far as they are known.
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
    """Give a handle the shape and dtype of another handle's variable."""
    handle_data_util.copy_handle_data(source, target)


def stand_in(shape: Sequence[int], dtype: str, trainable: bool = False) -> tf.Variable:
    """Return a variable without a value, to trace code that reads and writes it."""
    return resource_variable_ops.UninitializedVariable(
        trainable=False, shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype)
    )


def shape_of_variable(handle: tf.Tensor) -> tuple[int, ...] | None:
    """Return the shape of a handle's variable, or None if it is unknown."""
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    shape = tf.TensorShape(data.shape_and_type[0].shape)
    return tuple(shape.as_list()) if shape.is_fully_defined() else None


def make_while(
    inputs: Sequence[tf.Tensor],
    condition: tf.Graph,
    body: tf.Graph,
    *,
    stateful: bool,
    parallel_iterations: int,
) -> list[tf.Tensor]:
    """Make a loop over two ``FuncGraph``, and return its outputs."""
    make = gen_functional_ops._while if stateful else gen_functional_ops.stateless_while
    outputs = make(
        inputs,
        control_flow_util_v2.create_new_tf_function(condition),
        control_flow_util_v2.create_new_tf_function(body),
        output_shapes=_common_shapes([body.inputs, body.outputs]),
        parallel_iterations=parallel_iterations,
    )
    control_flow_util_v2.maybe_set_lowering_attr(outputs[0].op)
    for given, made in zip(inputs, outputs, strict=True):
        if made.dtype == tf.resource:  # what is known of its variable
            handle_data_util.copy_handle_data(given, made)
    return list(outputs)


def _common_shapes(tensors: Sequence[Sequence[tf.Tensor]]) -> list[tf.TensorShape]:
    """Return the shapes that several lists of tensors have in common."""
    return [
        functools.reduce(
            tf.TensorShape.most_specific_compatible_shape, [t.shape for t in of_one]
        )
        for of_one in zip(*tensors, strict=True)
    ]


def make_branches(
    index: tf.Tensor,
    inputs: Sequence[tf.Tensor],
    branches: Sequence[tf.Graph],
    *,
    stateful: bool,
) -> tuple[list[tf.Tensor], tf.Operation]:
    """Call one of several ``FuncGraph`` by its number; return outputs and operation."""
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
    """Return the handles of variables that an operation writes, itself or in branches."""
    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(op)
    return list(writes)


def shape_of(tensor: tf.Tensor) -> tuple[int | None, ...]:
    """Return the shape of a tensor as a tuple.

    ``tensor.shape`` makes a new object each time, which takes longer than everything else
    that a step does to look at a batch.
    """
    if isinstance(tensor, ops.EagerTensor):
        return tensor._shape_tuple()
    return tuple(tensor.shape)
