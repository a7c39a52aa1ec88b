"""What a rule says of one node, and where rules are declared.

A rule takes a node and the layouts of its inputs, and makes a ``Plan`` or gives none.
``docs/how-to/add-a-rule.md`` has the steps to write one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import tensorflow as tf

from collective.training.partition.graph import Node
from collective.training.partition.layouts import (
    OWNED,
    WHOLE,
    Layout,
    Partial,
    Sharded,
    SomeRows,
    is_whole,
)
from collective.training.partition.sizes import (
    AnySize,
    Size,
    Symbol,
    symbolic,
)

if TYPE_CHECKING:
    from collective.training.partition.emission import Emission

Made: TypeAlias = Sequence[tf.Tensor] | tf.Operation
# Takes the emission and the inputs of one replica.
Emit: TypeAlias = "Callable[[Emission, list[tf.Tensor]], Made]"


@dataclass(frozen=True)
class Plan:
    """What a rule wants of one node.

    Args:
        inputs: The layout in which each input is taken, or None for an unused one.
        outputs: The layouts of the outputs.
        emit: Makes the outputs of one replica from its inputs; by default the same
            operation is made on them.
        is_fallback: Whether no rule applied.
        is_of_rank_zero: Whether all take what rank 0 makes, since ranks may make other
            results of the same inputs; see ``stateful``.
        whole: Makes all outputs whole from whole inputs without asking another replica,
            where the plan gives them sharded.
        share: Makes a replica's part of a whole output for less than a slice of it
            costs, or None if it cannot.
        joint: Makes the outputs of all replicas of this process at once, from lists
            with a tensor for each replica, or one for all.
        finish: Of a variance whose moments were summed: the mean and the variance, one
            for each device.
    """

    inputs: Sequence[Layout | None]
    outputs: Sequence[Layout]
    emit: Emit | None = None
    is_fallback: bool = False
    is_of_rank_zero: bool = False
    whole: Emit | None = None
    share: Callable[[Emission, Sharded], tf.Tensor | None] | None = None
    joint: (
        Callable[
            [Emission, list[list[tf.Tensor]]],
            tuple[list[list[tf.Tensor]], tf.Operation],
        ]
        | None
    ) = None
    finish: (
        Callable[[Sequence[tf.Tensor]], tuple[list[tf.Tensor], list[tf.Tensor]]] | None
    ) = None

    @property
    def is_single(self) -> bool:
        """Return whether nothing in it differs between the replicas of a process."""
        return all(is_single(lay) for lay in (*self.inputs, *self.outputs) if lay)


def is_single(layout: Layout) -> bool:
    """Return whether all replicas of a process have one tensor."""
    return layout == OWNED or is_whole(layout)


@dataclass(frozen=True)
class Rows:
    """The rows of the global batch, as far as rules need to know."""

    rows: AnySize  # a number if the batch has a static length, otherwise a symbol
    expected: int | None = None  # how many there mostly are, to weigh bytes by
    # Whether the elements of lists are made whole, because something reads a list that
    # has no rule.
    whole_lists: bool = False
    # Whether gradients of variables are summed as such, and not what is computed of them.
    whole_gradients: bool = False
    # Whether these are rows of a batch, and not the places of a model axis: see ``places``.
    of_batch: bool = True
    # In a pass over a model axis: the rows of the batch, of which each rank has all.
    batch: AnySize = 0
    # The rows, if they are not the rows of the batch; see ``offers``.
    some: SomeRows | None = None

    @property
    def lasting(self) -> set[Symbol]:
        """Return the symbols that stand for one number in all of a step."""
        sizes = (self.rows, self.batch)
        return {s for size in sizes if isinstance(size, Size) for s in size.symbols}

    @classmethod
    def unknown(cls, expected: int | None = None) -> Rows:
        """Return the rows of batches of any length."""
        return cls(symbolic(Symbol("rows")), expected)

    @classmethod
    def places(cls, count: int) -> Rows:
        """Return the places of a model axis of so many ranks, of which each has one."""
        return cls(count, count, of_batch=False)


Rule = Callable[[Node, list[Layout], Rows], Plan | None]


class NeedsWholeLists(Exception):
    """Something reads a list of shares as a whole: see ``Rows.whole_lists``."""


#: By type of operation.
RULES: dict[str, Rule] = {}
#: For operations with an ``Owned`` input. Without a rule, such inputs are taken whole.
OWNED_RULES: dict[str, Rule] = {}
#: For operations on the handle of a variable that is cut along an axis. Without a rule,
#: they are an error: no replica has the whole variable.
HANDLE_RULES: dict[str, Rule] = {}
#: Asked before ``RULES`` where an operand has rows that were cut out of others: for what
#: puts them back. These rules see which rows they are.
SOME_RULES: dict[str, Rule] = {}
#: Asked before ``RULES`` in a pass over a model axis: channels, units, words of a vocabulary
#: are what weights are cut along. Each replica has some of them, which rows need not.
AXIS_RULES: dict[str, Rule] = {}


def rule(*types: str, table: dict[str, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Declare the rule of some types of operations."""

    def add(function: Rule) -> Rule:
        for name in types:
            table[name] = function
        return function

    return add


def whole(node: Node) -> Plan:
    """Return the plan that runs a node whole on every replica."""
    return Plan([WHOLE] * len(node.inputs), [WHOLE] * len(node.outputs))


def summed(layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts, once partial values have been made whole."""
    return [WHOLE if isinstance(lay, Partial) else lay for lay in layouts]
