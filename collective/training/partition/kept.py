"""What one rank holds in memory while it computes a step, told from the graph.

The nodes are walked through in the order in which they are emitted. A tensor is held from
the node that makes it to the last one that reads it; what a node makes in place of its
input, or hands on, is held once. Weights, their slots and the batch are not counted: they
are there before the step.

This is an estimate. TensorFlow runs what is ready on several threads, kernels take memory
of their own while they run, and what is held inside of loops and branches is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from collective.training.partition.graph import Node, Value
from collective.training.partition.layouts import WHOLE, Layout, Partial, is_whole
from collective.training.partition.partition import Partition
from collective.training.partition.plans import is_single
from collective.training.partition.schedule import Queue
from collective.training.partition.sizes import about, product

# Their output is their first input.
_HAND_ON = frozenset(
    [
        "Reshape",
        "Identity",
        "StopGradient",
        "PreventGradient",
        "Squeeze",
        "ExpandDims",
        "Snapshot",
    ]
)
# They write their output over an input that nothing else reads.
_IN_PLACE = frozenset(
    [
        "Relu",
        "Relu6",
        "Elu",
        "Selu",
        "Tanh",
        "Sigmoid",
        "Softplus",
        "Exp",
        "Log",
        "Sqrt",
        "Rsqrt",
        "Square",
        "Neg",
        "Add",
        "AddV2",
        "Sub",
        "Mul",
        "RealDiv",
        "BiasAdd",
        "ReluGrad",
        "Relu6Grad",
        "TanhGrad",
        "SigmoidGrad",
        "SqrtGrad",
        "RsqrtGrad",
        "Maximum",
        "Minimum",
        "SquaredDifference",
    ]
)


@dataclasses.dataclass
class _Held:
    """One tensor in memory.

    Attributes:
        size: Bytes; of a piece where each has its own.
        begin, end: The places of the first and the last node that hold it.
        of_pieces: Whether each piece has one.
        is_sum: Whether it is added up over the pieces.
    """

    size: int
    begin: int
    end: int
    of_pieces: bool = False
    is_sum: bool = False


class Kept:
    """What a rank holds during a step.

    Args:
        partition: Of the step.
        rows: Of the batch.
        own: Of them, those of the rank.
    """

    def __init__(self, partition: Partition, rows: int, own: int):
        self._graph, self._rows, self._own = partition.graph, rows, own
        self._segments, self._arrival = _walk(partition)
        nodes = [node for segment in self._segments for node in segment]
        self._place = {node: place for place, node in enumerate(nodes)}

    def size(self, value: Value, layout: Layout, pieces: int = 1) -> int:
        """Return the bytes of a value of a rank in a layout, or of a piece of its rows."""
        if value.is_handle or value.shape is None or value.const is not None:
            return 0
        count = about(product(value.shape), self._rows)
        if not (is_whole(layout) or isinstance(layout, Partial)):
            count = -(-count * self._own // (self._rows * pieces))
        return count * value.dtype.size

    def for_backward(self) -> list[tuple[Value, int]]:
        """Return what the forward pass makes and a gradient reads, the largest first."""
        found = {}
        for node in self._place:
            if not _is_gradient(node):
                continue
            for value in node.inputs:
                made = value.node
                if made is None or _is_gradient(made) or not _has_memory(made):
                    continue
                value = _root(value)
                if value.node is not None and _has_memory(value.node):
                    found[value] = self.size(value, value.layout)
        return sorted(found.items(), key=lambda pair: -pair[1])

    def peak(self, pieces: int = 1) -> int:
        """Return how many bytes are held at most, with so many micro-batches."""
        held = list(self._held(pieces))
        most, begin = 0, 0
        for segment in self._segments:
            last = begin + len(segment) - 1
            now = [h for h in held if h.begin <= last and h.end >= begin]
            changes = [0] * (len(segment) + 1)
            for h in now:
                changes[max(h.begin, begin) - begin] += h.size
                if h.end < last:
                    changes[h.end + 1 - begin] -= h.size
            total = within = 0
            for change in changes[:-1]:
                total += change
                within = max(within, total)
            # The other pieces wait, or have been there, with what crosses its ends.
            of_pieces = [h for h in now if h.of_pieces and not h.is_sum]
            before = sum(h.size for h in of_pieces if h.begin < begin)
            after = sum(h.size for h in of_pieces if h.end > last)
            sums = sum(h.size for h in now if h.is_sum and h.end >= last)
            others = (pieces - 1) * max(before, after) + (sums if pieces > 1 else 0)
            most, begin = max(most, within + others), last + 1
        return most

    def _held(self, pieces: int) -> Iterator[_Held]:
        """Yield every tensor that is held for a while."""
        held: dict[Value, _Held] = {}
        for node, place in self._place.items():
            for value, layout in zip(node.inputs, node.plan.inputs, strict=True):
                root = held.get(_root(value))
                arrival = self._arrival.get(value)
                if root is None or layout is None:
                    continue
                root.end = max(root.end, place if arrival is None else arrival)
            for value in node.outputs if _has_memory(node) else ():
                size = self.size(value, value.layout, pieces)
                own = not is_single(value.layout)
                made = _Held(size, place, place, own, isinstance(value.layout, Partial))
                held[value] = made
                if value in self._arrival:
                    made.end = max(place, self._arrival[value])
        self._overwrite(held)
        yield from {id(one): one for one in held.values()}.values()
        for value, place in self._arrival.items():  # what comes back of the exchange
            users = [self._place[n] for n in value.users if n in self._place]
            end = max([u for u in users if u > place], default=place)
            yield _Held(self.size(value, WHOLE), place + 1, end)

    def _overwrite(self, held: dict[Value, _Held]) -> None:
        """Have outputs take the place of inputs that nothing reads after them."""
        for node, place in self._place.items():
            made = held.get(node.outputs[0]) if node.type in _IN_PLACE else None
            for value in node.inputs if made is not None else ():
                given = held.get(_root(value))
                if given is None or made is None or given.end != place:
                    continue
                alike = (given.size, given.of_pieces, given.is_sum)
                if alike == (made.size, made.of_pieces, made.is_sum):
                    given.end = made.end
                    held[node.outputs[0]] = given
                    break


def _is_gradient(node: Node) -> bool:
    """Return whether a node is of the backward pass, by the name that TensorFlow gives."""
    return "gradient_tape/" in node.op.name


def _has_memory(node: Node) -> bool:
    """Return whether a node makes a tensor of its own: a weight that is read is its variable."""
    return node.type not in _HAND_ON and node.type not in ("ReadVariableOp", "Const")


def _root(value: Value) -> Value:
    """Return the value whose memory a value is."""
    while value.node is not None and value.node.type in _HAND_ON:
        value = value.node.inputs[0]
    return value


def _waits(value: Value, layout: Layout | None, arrived: dict[Value, int]) -> bool:
    """Return whether a node that takes a value in a layout needs an exchange before."""
    if layout is None or layout == value.layout or is_whole(value.layout):
        return False
    is_made_whole = value.node is not None and value.node.plan.whole is not None
    return value not in arrived and not is_made_whole


def _walk(partition: Partition) -> tuple[Sequence[list[Node]], dict[Value, int]]:
    """Return the nodes between exchanges, and behind which place each value is exchanged.

    The emission goes through the graph like this; see there.
    """
    graph, count = partition.graph, 0
    queue, segments, arrived = Queue(graph), [[]], {}  # type: ignore[var-annotated]
    done: set[Node] = set()
    while True:
        pending: set[Value] = set()
        for node in queue:
            taken = zip(node.inputs, node.plan.inputs, strict=True)
            missing = {v for v, layout in taken if _waits(v, layout, arrived)}
            if missing:
                pending |= missing
                queue.waits(node)
                continue
            segments[-1].append(node)
            done.add(node)
            count += 1
            queue.done(node)
            if node.plan.joint is not None and not node.plan.is_single:
                segments.append([])
        pending |= {
            v for v in graph.outputs if v.node in done and _waits(v, WHOLE, arrived)
        }
        for node in queue.writes:
            taken = zip(node.inputs, node.plan.inputs, strict=True)
            pending |= {v for v, layout in taken if _waits(v, layout, arrived)}
        if pending:
            arrived |= dict.fromkeys(pending, count - 1)
            queue.resume()
            segments.append([])
        elif not queue.release_writes():
            return [s for s in segments if s], arrived
