"""Makes the operations of one node, for one replica."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition import atomics
from collective.training.partition.compiled import copied
from collective.training.partition.graph import Node, Value
from collective.training.partition.turns import Turns

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_SMALL = 1 << 14  # elements


class Made:
    """The operations that were made of each node, and what others have to wait for.

    Args:
        turns: The turns of the replicas of the graph.
    """

    def __init__(self, turns: Turns):
        self._turns = turns
        self._by_node: dict[Node, list[list[tf.Operation]]] = {}

    def note(self, node: Node, ops: list[list[tf.Operation]]) -> None:
        """Note what was made of a node: for each replica, or for all."""
        self._by_node[node] = ops
        if not node.plan.is_single and node.plan.joint is None:
            self._turns.made(ops)
            self._turns.nodes.add(node)

    def of(self, node: Node) -> list[tf.Operation]:
        """Return all that was made of a node."""
        return [op for ops in self._by_node.get(node, ()) for op in ops]

    def is_made(self, node: Node) -> bool:
        """Return whether a node has been made."""
        return node in self._by_node

    def meet(self, node: Node) -> None:
        """End the turns of the replicas if the node waits for what all of them do."""
        if any(
            n in self._turns.nodes and not self._is_own(node, n) for n in node.control
        ):
            self._turns.end()

    def before(self, node: Node, replica: int | None = None) -> list[tf.Operation]:
        """Return what a node waits for besides its inputs.

        Args:
            replica: For which it is made. If None, it is made for all together.
        """
        waits: list[tf.Operation] = []
        for n in node.control:
            ops = self._by_node.get(n, [])
            if replica is None or not self._is_own(node, n):
                waits += self.of(n)
            elif ops and not node.plan.is_single:
                waits += ops[replica]
        return waits

    def _is_own(self, node: Node, other: Node) -> bool:
        """Return whether each replica of a node waits for its own of another node alone.

        Where both do nothing but compute, waiting changes no result: gradients do it to
        save memory. Then what is whole need not wait for a replica.
        """
        if other.plan.is_single or other.plan.joint is not None:
            return False
        if node.plan.joint is not None or (node.is_stateful and other.is_stateful):
            return False
        return not node.plan.is_single or not (node.is_stateful or other.is_stateful)


def emitted(
    emission: Emission, node: Node, inputs: list[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Make a node as its plan says; return its outputs, and what makes them.

    Args:
        inputs: The tensor of each input that this replica has, or None for an unused one.
    """
    plan = node.plan
    if plan.emit is None:
        if plan.is_single and atomics.parts_ranks(node, emission.exchange):
            op = atomics.on_host(node, inputs)
        else:
            op = copied(node, inputs)
        return list(op.outputs), [op]
    made = plan.emit(emission, inputs)
    if isinstance(made, tf.Operation):
        return all_outputs(node, made.outputs), [made]
    return all_outputs(node, made), [tensor.op for tensor in made]


def all_outputs(node: Node, made: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the outputs of a node, which its rule must all have made."""
    if len(made) != len(node.outputs):
        raise ValueError(
            f"the rule of {node} made {len(made)} outputs, not {len(node.outputs)}"
        )
    return list(made)


def is_small(value: Value) -> bool:
    """Return whether it costs no time to send it; gradients leave together, at the end."""
    if value.variable is not None or not value.is_static or value.shape is None:
        return False
    return math.prod(s for s in value.shape if isinstance(s, int)) <= _SMALL
