"""The seed generators that a forward pass draws from, as in Keras' own step.

In Keras, each draw reads the state of a ``keras.random.SeedGenerator`` and counts it up.
A traced pass is pure and runs many times for one step of one process (replicas,
micro-batches, recomputed blocks), so here the states are constants of the pass, and
tracing finds how often each generator was asked. The step then counts them up, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.random.seed_generator import SeedGenerator
from tensorflow.python.ops import control_flow_v2_func_graphs as func_graphs

from collective.replacements import replacing
from collective.training.keras_compat.model import tf_variable
from collective.training.keras_compat.randomness import (
    SEED_STATE,
    global_seed_state,
    is_seed_state,
)

_CONDITIONAL = (
    func_graphs.CondBranchFuncGraph,
    func_graphs.WhileBodyFuncGraph,
    func_graphs.WhileCondFuncGraph,
)


class SeedUse:
    """Which generators a pass has asked, found by tracing it."""

    def __init__(self) -> None:
        # For each state, in the order of the first request: the state, and whether each
        # request was ``ordered``.
        self.asked: dict[int, tuple[keras.Variable, list[bool]]] = {}
        self.others: list[str] = []  # what cannot be counted, a few words each

    def next(self, generator: SeedGenerator, ordered: bool) -> tf.Tensor:
        """What ``SeedGenerator.next`` returns at this request."""
        state = generator.state
        _, requests = self.asked.setdefault(id(state), (state, []))
        seed = advanced(state.value * 1, requests)
        requests.append(ordered)
        if not tf.executing_eagerly() and _is_conditional():
            self.others.append("draws within a condition or a loop")
        return seed

    def advance(self, assign: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
        """Counts the generators up, in the graph, after all passes of a step."""
        states = [state for state, _ in self.asked.values()]
        new = [
            advanced(tf.convert_to_tensor(state), requests)
            for state, requests in self.asked.values()
        ]
        if states:
            assign([tf_variable(state) for state in states], new)


def advanced(state: tf.Tensor, requests: Sequence[bool]) -> tf.Tensor:
    """A generator's state after requests, each ``ordered`` or not, as Keras counts."""
    count = 0
    for ordered in requests:
        if ordered:
            count += 1
            continue
        state = (_added(state, count) + 1) * 5387 % 933199
        count = 0
    return _added(state, count)


@contextlib.contextmanager
def counted_seeds(use: SeedUse) -> Iterator[None]:
    """Inside, the requests of seed generators are counted, and no state is written."""

    def following(self: SeedGenerator, ordered: bool = True) -> tf.Tensor:
        return use.next(self, ordered)

    with replacing(SeedGenerator, "next", following):
        yield


def has_seeds(model: keras.Model) -> bool:
    """Whether a seed generator may be asked when the model is called."""
    return global_seed_state() is not None or any(map(is_seed_state, model.variables))


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """The states of the seed generators that a call of the model may count up."""
    shared = global_seed_state()
    own = [variable for variable in model.variables if is_seed_state(variable)]
    return own if shared is None else [*own, shared]


def reseed(variables: Sequence[tf.Variable], seed: int) -> None:
    """Gives the states of seed generators values that follow from a seed and their order."""
    key = tf.constant([seed % 2**31, 0], tf.int32)
    states = [variable for variable in variables if SEED_STATE in variable.name]
    for number, variable in enumerate(states):
        state = tf.random.experimental.stateless_fold_in(key, number)
        variable.assign(tf.cast(state, variable.dtype))


def _added(state: tf.Tensor, count: int) -> tf.Tensor:
    return state + tf.constant([0, count], state.dtype) if count else state


def _is_conditional() -> bool:
    """Whether the current graph is a branch or a loop's body, at any depth."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if isinstance(graph, _CONDITIONAL):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
