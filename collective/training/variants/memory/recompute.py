"""Gradient checkpointing: activations are computed a second time instead of kept.

A model is cut into blocks of layers. In the forward pass, a block returns its outputs and
keeps nothing else. When their gradients arrive, it is computed again from its inputs,
now with all that its own gradient needs. Memory then grows with the number of blocks
instead of layers, at the cost of about one more forward pass.

A block is traced once, into a TensorFlow function that is called twice. So no layer's
Python code runs twice, both calls draw the same random numbers from the same state, and
the new state (BatchNorm's moving statistics, counters) comes from the first call only.

Source: T. Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.keras_compat import Node
from collective.training.traced import nodes_of

# Operations that draw other numbers in a second call.
_DRAWS = ("Random", "Truncated", "Parameterized", "Multinomial")
# How many bounds on the size of a block are tried, from the largest tensor to all.
_BOUNDS = 16


@contextlib.contextmanager
def recompute_blocks(
    model: keras.Model,
    tape: keras_compat.Tape,
    apart: Callable[[keras.Layer], bool] = lambda layer: False,
) -> Iterator[None]:
    """Inside, calls of the model keep only the tensors between blocks.

    Of a Sequential or functional model, a block is a run of its layers (see ``cuts``); of
    another one, each of its layers. Models in it are cut, too.

    Args:
        model: Built; called in a ``tf.function``. Outside a ``keras.StatelessScope``, a
            block reads the variables of its layers before it, and writes them after it.
        tape: Records the calls; ``keras_compat.every_tape`` where it is not known.
        apart: Whether a layer is in no block: it keeps its activations.

    Raises:
        UsageError: No layer of the model can be recomputed, or one draws other random
            numbers in a second call.
    """
    blocks = _Blocks(model, tape, apart)
    with keras_compat.replace_layer_calls(model, blocks.graph, blocks.layer):
        yield
    if not blocks.count:
        raise UsageError(
            f"model {model.name!r} calls no layer that could be recomputed",
            hint="drop --recompute; --accumulate 4 saves memory, too",
        )


def recomputed(step: Callable[[Any], Any], model: keras.Model) -> Callable[[Any], Any]:
    """A ``train_step`` of the model's own with recomputed activations.

    Called eagerly, it keeps them.
    """

    @functools.wraps(step)
    def run(data: Any) -> Any:
        if tf.executing_eagerly():
            return step(data)
        with recompute_blocks(model, keras_compat.every_tape):
            return step(data)

    return run


class _Blocks:
    """Calls the layers of a model block by block."""

    def __init__(
        self,
        model: keras.Model,
        tape: keras_compat.Tape,
        apart: Callable[[keras.Layer], bool],
    ):
        self.model = model
        self.tape = tape
        self.apart = apart
        self.count = 0
        self._inside = False

    def layer(self, layer: keras.Layer, call: Callable[[], Any]) -> Any:
        """Calls a layer, as a block."""
        if self._inside or self.apart(layer):
            return call()
        return self._block(call, layer.name, [layer])

    def graph(
        self, nodes: Sequence[Node], results: set[int], values: dict[int, Any]
    ) -> None:
        """Computes the nodes of a functional model in order, in blocks.

        Args:
            results: Tensors that are wanted at the end.
            values: Of the tensors known so far; those needed later are added.
        """
        if self._inside:
            for node in nodes:
                node.compute(values)
            return
        for block in _cut(nodes, results, self._alone):
            if self._alone(block[0]):
                block[0].compute(values)  # a model has blocks of its own
                continue
            later = results.union(*(n.inputs for n in nodes if n not in block))
            kept = [t for node in block for t in node.outputs if t in later]

            def call(block: list[Node] = block, kept: list[int] = kept) -> Any:
                inner = dict(values)
                for node in block:
                    node.compute(inner)
                return [inner[t] for t in kept]

            name = " to ".join(dict.fromkeys((block[0].name, block[-1].name)))
            layers = [node.operation for node in block]
            values.update(zip(kept, self._block(call, name, layers), strict=True))

    def _alone(self, node: Node) -> bool:
        return node.is_model or self.apart(node.operation)

    def _block(self, call: Callable[[], Any], name: str, layers: Sequence[Any]) -> Any:
        """Traces a call, runs it in a block; returns its outputs, exports its effects."""
        if not keras_compat.in_stateless_scope():
            with keras_compat.written_afterwards(layers):
                return self._block(call, name, layers)
        scopes: list[Any] = []
        traced_results: list[Any] = []

        def traced() -> list[tf.Tensor]:
            with keras_compat.InnerScope() as scope:
                outputs = call()
            scopes.append(scope)
            traced_results.append([outputs, scope.effects(outputs)])
            return [t for t in _leaves(traced_results[0]) if tf.is_tensor(t)]

        self.count += 1
        self._inside = True
        try:
            with self.tape.stop_recording():
                function = tf.function(traced, autograph=False)
                function = function.get_concrete_function()
        finally:
            self._inside = False
        _refuse_draws(function, name)
        _refuse_outside(function, name)
        (scope,), (results,) = scopes, traced_results
        tensors = iter(_called_twice(function, self.tape))
        flat = [next(tensors) if tf.is_tensor(t) else t for t in _leaves(results)]
        outputs, effects = tf.nest.pack_sequence_as(
            results, flat, expand_composites=True
        )
        scope.export(self.model, outputs, effects)
        return outputs


def _leaves(tree: Any) -> list[Any]:
    return tf.nest.flatten(tree, expand_composites=True)


def _called_twice(function: Any, tape: keras_compat.Tape) -> list[tf.Tensor]:
    """Calls a traced function now, and again for its gradient.

    Args:
        function: Concrete, without arguments: it has captured all its inputs.
        tape: Records that the outputs depend on the captured tensors.
    """

    def call(captured: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        function.set_external_captures(captured)
        return list(function())

    @tf.custom_gradient
    def block(*captured: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        with tape.stop_recording():
            outputs = call(captured)

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            # Not before the later blocks are done: else all are in memory at a time.
            with tf.control_dependencies(upstream):
                again = [tf.identity(t) for t in captured]
            with tf.GradientTape() as inner:
                inner.watch([t for t in again if t.dtype.is_floating])
                outputs = call(again)
            floats = [i for i, t in enumerate(outputs) if t.dtype.is_floating]
            gradients = inner.gradient(
                [outputs[i] for i in floats],
                again,
                output_gradients=[upstream[i] for i in floats],
            )
            dense = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
            # Earlier blocks wait in turn until the memory of this one is free.
            with tf.control_dependencies([g for g in dense if g is not None]):
                return [g if g is None else tf.identity(g) for g in dense]

        return outputs, gradient

    return list(block(*(tf.identity(t) for t in function.captured_inputs)))


def _refuse_draws(function: Any, name: str) -> None:
    operations = (node.op for node in nodes_of(function.graph))
    draws = next((op for op in operations if op.startswith(_DRAWS)), None)
    if draws:
        raise UsageError(
            f"{name} cannot be recomputed: it draws other random numbers in a second "
            f"call (TensorFlow's {draws})",
            hint="use keras.random with a keras.random.SeedGenerator; or drop "
            "--recompute",
        )


def _refuse_outside(function: Any, name: str) -> None:
    """Refuses a block whose gradient, or seed, would be lost: it is of no layer of it."""
    for variable in function.graph.variables:
        if variable.trainable or keras_compat.SEED_STATE in variable.name:
            raise UsageError(
                f"{name} cannot be recomputed: it uses the variable {variable.name!r}, "
                "which is of none of its layers",
                hint="make it by self.add_weight(...) of the layer; or drop --recompute",
            )


def _cut(
    nodes: Sequence[Node], results: set[int], alone: Callable[[Node], bool]
) -> Iterator[list[Node]]:
    """The blocks of a graph, in order; nodes that are ``alone`` are blocks themselves."""
    last_use = {t: i for i, node in enumerate(nodes) for t in node.inputs}
    last_use |= dict.fromkeys(results, len(nodes))
    sizes = [sum(node.outputs.values()) for node in nodes]
    live: dict[int, int] = {}
    kept = []
    for i, node in enumerate(nodes):
        live |= node.outputs
        live = {t: size for t, size in live.items() if last_use.get(t, -1) > i}
        kept.append(sum(live.values()))
    start = 0
    for is_alone, run in itertools.groupby(nodes, alone):
        group = list(run)
        stop = start + len(group)
        ends: Sequence[int] = range(1, len(group) + 1)
        if not is_alone:
            ends = cuts(sizes[start:stop], kept[start:stop])
        for begin, end in itertools.pairwise([0, *ends]):
            yield group[begin:end]
        start = stop


def cuts(sizes: Sequence[float], kept: Sequence[float]) -> list[int]:
    """Cuts a sequence of operations into blocks, so that least memory is needed.

    Between two blocks, everything that a later block needs is kept until the backward
    pass. Within a block, everything is recomputed, so while it is differentiated all its
    tensors are in memory. The best cuts minimise the bytes kept plus the largest block:
    few bytes cross a cut (one tensor between the blocks of a residual network), and blocks
    are about equally large.

    Args:
        sizes: Bytes of each operation's outputs.
        kept: Bytes to keep if a block ends after this operation; the last is not used.

    Returns:
        Where each block ends, exclusively.
    """
    if not sizes:
        return []
    largest, whole = max(max(sizes), 1.0), max(sum(sizes), 1.0)
    best: tuple[float, list[int]] = (math.inf, [])
    for number in range(_BOUNDS):
        bound = largest * (whole / largest) ** (number / (_BOUNDS - 1))
        between, ends = _within(sizes, kept, bound * (1 + 1e-9))
        blocks = itertools.pairwise([0, *ends])
        total = between + max(sum(sizes[start:end]) for start, end in blocks)
        if total < best[0]:
            best = total, ends
    return best[1]


def _within(
    sizes: Sequence[float], kept: Sequence[float], bound: float
) -> tuple[float, list[int]]:
    """The fewest bytes kept with no block larger than the bound, and where blocks end."""
    # For each number of operations: the fewest bytes kept before it, and where the
    # last block before it begins.
    least: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(sizes) + 1):
        inside, found = 0.0, (math.inf, end)
        for start in range(end - 1, -1, -1):
            inside += sizes[start]
            if inside > bound:
                break
            cost = least[start][0] + (kept[start - 1] if start else 0.0)
            found = min(found, (cost, start))
        least.append(found)
    ends, end = [], len(sizes)
    while end:
        ends.append(end)
        end = least[end][1]
    return least[-1][0], ends[::-1]
