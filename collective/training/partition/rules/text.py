"""Text: each string by itself, look-ups in tables, and words of which rows have many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf

from collective.training.partition.graph import Node, Value, sizes_in
from collective.training.partition.layouts import (
    ROWS,
    WHOLE,
    Layout,
    Shape,
    Sharded,
)
from collective.training.partition.plans import Plan, Rows, rule, summed, whole
from collective.training.partition.rules.elementwise import each_element
from collective.training.partition.shares import sliced
from collective.training.partition.sizes import AnySize, product
from collective.training.partition.values import elementwise, shape_rule

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

_EACH = [
    "AsString",
    "DecodeBase64",
    "EncodeBase64",
    "RegexFullMatch",
    "RegexReplace",
    "StaticRegexFullMatch",
    "StaticRegexReplace",
    "StringJoin",
    "StringLength",
    "StringLower",
    "StringStrip",
    "StringToHashBucket",
    "StringToHashBucketFast",
    "StringToHashBucketStrong",
    "StringToNumber",
    "StringUpper",
    "Substr",
    "UnicodeScript",
    "UnicodeTranscode",
]

elementwise(*_EACH)
rule(*_EACH)(each_element)


@shape_rule("LookupTableFindV2")
def _found(node: Node) -> Shape:
    _, keys, default = (value.shape for value in node.inputs)
    return None if keys is None or default is None else (*keys, *default)


@rule("LookupTableFindV2")
def look_up(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Look each key up in a table, which every rank has."""
    keys = summed(layouts)[1]
    if not isinstance(keys, Sharded) or node.outputs[0].shape is None:
        return whole(node)
    return Plan([WHOLE, keys, WHOLE], [keys])


@shape_rule("RaggedTensorToTensor")
def _padded(node: Node) -> Shape:
    out, of_rows = node.outputs[0].static_shape(), node.inputs[3]
    kinds, given = node.attr("row_partition_types"), sizes_in(node.inputs[0])
    first = given[0] if isinstance(given, tuple) else given
    if out is None or isinstance(out[0], int) or first is None:
        return out
    if first != -1:  # the program says how many rows there are: others are cut off
        return (first, *out[1:])
    if kinds[0] == b"ROW_SPLITS" and of_rows.shape:
        return (of_rows.shape[0] - 1, *out[1:])
    if kinds[0] == b"FIRST_DIM_SIZE":
        return (_split_rows(of_rows) or out[0], *out[1:])
    return out


def _split_rows(value: Value) -> AnySize | None:
    """Derive the number of strings from the number of rows after a split."""
    while value.node is not None and value.node.type in ("Cast", "Identity"):
        value = value.node.inputs[0]
    node = value.node
    if node is None or node.type != "StridedSlice" or value.rank != 0:
        return None
    shape, begin = node.inputs[0], node.inputs[1].const
    split = shape.node
    if split is None or split.type != "StringSplitV2" or begin is None or begin[0]:
        return None
    strings = split.inputs[0].shape
    return strings[0] if shape.index == 2 and strings else None


@shape_rule("UnicodeDecode", "UnicodeDecodeWithOffsets")
def _decoded(node: Node) -> list[Shape] | None:
    """Return the length of the splits: how many characters there are is unknown."""
    strings = node.inputs[0].shape
    if strings is None:
        return None
    return [(product(strings) + 1,), *[None] * (len(node.outputs) - 1)]


@rule("RaggedTensorToTensor", "SparseToDense")
def padded(node: Node, layouts: list[Layout], rows: Rows) -> Plan | None:
    """Give each replica its rows of what is ragged or sparse, and whole until here."""
    shape = node.outputs[0].shape
    if not shape or shape[0] != rows.rows:
        return None

    def make_whole(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        return emission.copy(node, x)

    def emit(emission: Emission, x: list[tf.Tensor]) -> list[tf.Tensor]:
        return [sliced(emission, emission.copy(node, x)[0], ROWS)]

    return Plan([WHOLE] * len(layouts), [ROWS], emit, whole=make_whole)
