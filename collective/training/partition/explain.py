"""What a partitioned function gathers or computes whole, by the line of the user's code."""

from __future__ import annotations

import os
from collections.abc import Iterator

from collective.log import log
from collective.training.partition.emission import Traffic
from collective.training.partition.graph import Graph, Node, Value
from collective.training.partition.layouts import WHOLE, Sharded
from collective.training.partition.partition import Partition
from collective.training.partition.sizes import about, product

#: Gathered bytes of a step from which a line at the start says so.
WORTH_A_LINE = 1 << 20


def report(partition: Partition, traffic: Traffic, name: str) -> None:
    """Log what a step gathers and computes whole; after its first call.

    Args:
        name: What the step is, for the lines.
    """
    wanted = os.environ.get("COLLECTIVE_EXPLAIN", "") not in ("", "0")
    for line in explained(partition, traffic):
        (log.info if wanted else log.debug)("%s: %s", name, line)
    gathered = gathered_bytes(partition, traffic)
    if gathered >= WORTH_A_LINE and not wanted:
        log.info(
            "%s gathers %.1f MB a step, for operations that need all rows "
            "(--explain, or COLLECTIVE_EXPLAIN=1, says which)",
            name,
            gathered / 1e6,
        )


def explained(partition: Partition, traffic: Traffic) -> list[str]:
    """Return a line for each thing that is gathered, and for each sum.

    Args:
        traffic: The traffic of the partition, once it was emitted.
    """
    sums = [value for values in traffic.sums for value in values]
    lines = [
        f"{len(traffic.sums)} sums of {len(sums)} tensors, {_bytes(sums, partition)} a step",
        f"{len(traffic.gathers)} gathers, {_bytes(traffic.gathers, partition)} a step",
    ]
    if traffic.joins:
        lines.append(
            f"{len(traffic.joins)} tensors joined of the pieces that ranks own, "
            f"{_bytes(traffic.joins, partition)} a step; {len(traffic.scattered)} summed "
            f"in pieces, {_bytes(traffic.scattered, partition)} a step"
        )
    for value in traffic.gathers:
        readers = sorted({node.type for node in value.users})
        when = " for a gradient" if is_of_gradient(value) else ""
        lines.append(
            f"gathered{when}: {made_by(value)}, {_bytes([value], partition)}, "
            f"for {', '.join(readers) or 'the result'}"
        )
    for value in traffic.broadcasts:
        size = _bytes([value], partition)
        lines.append(f"as rank 0 made it: {made_by(value)}, {size}")
    for node in _fallbacks(partition.graph):
        lines.append(f"computed whole on every rank: {node.type} at {place_of(node)}")
    return lines


def gathered_bytes(partition: Partition, traffic: Traffic) -> int:
    """Return about how many bytes a step gathers."""
    return sum(_size(value, partition) for value in traffic.gathers)


def is_of_gradient(value: Value) -> bool:
    """Return whether TensorFlow's tape made a value: that of the backward pass."""
    return value.node is not None and "gradient_tape/" in value.node.op.name


def place_of(node: Node) -> str:
    """Return the file and line of the user's code that made an operation."""
    for frame in reversed(list(node.op.traceback or [])):
        if not any(part in frame.filename for part in _LIBRARIES):
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return node.op.name


_LIBRARIES = (
    f"{os.sep}tensorflow{os.sep}",
    f"{os.sep}keras{os.sep}",
    f"{os.sep}collective{os.sep}",
    "importlib",
)


def made_by(value: Value) -> str:
    """Return the type of operation that makes a value, and its line of the user's code."""
    if value.node is None:
        return "an input"
    return f"{value.node.type} at {place_of(value.node)}"


def _fallbacks(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        if node.plan.is_fallback and any(
            isinstance(value.layout, Sharded) for value in node.inputs
        ):
            yield node
        if node.plan.inputs != [WHOLE] * len(node.inputs):
            for body in node.bodies:
                yield from _fallbacks(body)


def _bytes(values: list[Value], partition: Partition) -> str:
    total = sum(_size(value, partition) for value in values)
    return f"{total / 1e6:.1f} MB" if total >= 1e5 else f"{total} bytes"


def _size(value: Value, partition: Partition) -> int:
    """Return the bytes of a whole value in a batch of the expected rows; unknown sizes count 1.

    A string counts as one byte, for its length is not known.
    """
    size = about(product(value.shape or ()), partition.rows.expected)
    return size * max(value.dtype.size, 1)
