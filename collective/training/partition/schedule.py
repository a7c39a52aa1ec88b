"""The order in which the nodes of a graph are emitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.layouts import OWNED

_WRITES = ("Assign", "ResourceScatter", "ResourceStridedSliceAssign")


def is_write(node: Node) -> bool:
    """Return whether a node writes a variable, also within a loop or branch."""
    inner = (n for body in node.bodies for n in body.nodes)
    return node.type.startswith(_WRITES) or any(map(is_write, inner))


def without_rows(graph: Graph, rows: Sequence[Value]) -> Graph:
    """Return the writes that do not depend on some inputs, and what they need."""
    behind = set(rows)
    late: set[Node] = set()
    for node in graph.nodes:
        if behind.intersection(node.inputs) or late.intersection(node.control):
            late.add(node)
            behind.update(node.outputs)
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        if node not in late and (node in needed or _is_lasting(node)):
            needed.add(node)
            needed.update(v.node for v in node.inputs if v.node is not None)
            needed.update(node.control)
    found = Graph()
    found.inputs = graph.inputs
    found.nodes = [node for node in graph.nodes if node in needed]
    return found


def _is_lasting(node: Node) -> bool:
    """Return whether a node changes a variable: it writes one, or draws from a generator."""
    return is_write(node) or node.type.startswith(("Rng", "Stateful"))


def writes_pieces(node: Node) -> bool:
    """Return whether a node writes a variable of which each rank has a piece, and nothing else.

    A job that loses a rank has lost a piece, and makes no step again. So such a write need
    not wait until the step is whole, and what is written is not kept until then.
    """
    if not node.type.startswith(_WRITES) or not node.inputs:
        return False
    return node.inputs[0].layout == OWNED


class Queue:
    """The nodes that can be made, in their order; writes of whole variables last."""

    def __init__(self, graph: Graph):
        self._nodes = {node.number: node for node in graph.nodes}
        self._left: dict[int, int] = {}
        self._behind: dict[int, list[int]] = {}
        self._ready: list[int] = []
        self._waiting: list[int] = []
        self._writes: list[int] = []
        for node in graph.nodes:
            before = {v.node.number for v in node.inputs if v.node is not None}
            before |= {n.number for n in node.control}
            self._left[node.number] = len(before)
            for number in before:
                self._behind.setdefault(number, []).append(node.number)
            if not before:
                self._add(node.number)

    def _add(self, number: int) -> None:
        node = self._nodes[number]
        if is_write(node) and not writes_pieces(node):
            self._writes.append(number)
        else:
            heapq.heappush(self._ready, number)

    def __iter__(self) -> Iterator[Node]:
        while self._ready:
            yield self._nodes[heapq.heappop(self._ready)]

    @property
    def writes(self) -> list[Node]:
        """Return the writes that can be made once nothing waits any more."""
        return [self._nodes[number] for number in self._writes]

    def waits(self, node: Node) -> None:
        """Note that the node needs an exchange."""
        self._waiting.append(node.number)

    def done(self, node: Node) -> None:
        """Note that the node is made."""
        for number in self._behind.get(node.number, ()):
            self._left[number] -= 1
            if not self._left[number]:
                self._add(number)

    def resume(self) -> None:
        """Continue with what has waited and is there now."""
        for number in self._waiting:
            heapq.heappush(self._ready, number)
        self._waiting = []

    def release_writes(self) -> bool:
        """Let writes be made; False if there are none."""
        for number in self._writes:
            heapq.heappush(self._ready, number)
        found, self._writes = bool(self._writes), []
        return found
