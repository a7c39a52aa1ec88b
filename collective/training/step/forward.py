"""The forward and backward pass of one replica over some rows, as sums.

The functions here are pure: values of variables and rows go in, sums and new state come
out, no variable is written. XLA can compile them, a loop can call them for each
micro-batch, and they run on any replica under any strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.prepared import PreparedModel
from collective.training.step import layer_state
from collective.training.step.draws import Draws
from collective.training.step.found import Found, LookUps
from collective.training.step.inputs import Weights
from collective.training.step.losses import LossSums, loss_sums
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows, or_none


class Predicted(NamedTuple):
    """Rows with the model's predictions: what losses and metrics see."""

    x: Any
    y: Any
    y_pred: Any
    sample_weight: Any


class Sums(NamedTuple):
    """Sums over rows; they can be added over micro-batches and over replicas."""

    # One list for each denominator of the loss (first the divided part, if there is
    # one). Each has one dense tensor for each connected variable.
    gradients: list[list[tf.Tensor]]
    weights: list[tf.Tensor]  # scalars, the denominators of the undivided losses
    # Scalars: the divided part as Keras shows it, then the total of each undivided
    # loss.
    losses: list[tf.Tensor]
    # Scalars ``total, weight`` for each output's own loss; weight is 0 for a divided
    # one.
    outputs: list[tuple[tf.Tensor, tf.Tensor]]
    metrics: list[tf.Tensor]  # the metrics' variables, counted from zero
    # What these rows contribute to the new values of what the model assigns
    # (``collective.training.step.layer_state``).
    state: list[tf.Tensor]
    # ``[pieces, *shape]`` for each trainable variable that is overwritten by its
    # gradient; zero but in the place of these rows.
    overwrites: list[tf.Tensor]


def global_loss(sums: Sums) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The loss, and that of each output, from sums over all replicas."""
    divided, *totals = sums.losses
    loss = divided + sum(
        tf.math.divide_no_nan(t, w) for t, w in zip(totals, sums.weights, strict=True)
    )
    outputs = [
        tf.where(w == 0, t, tf.math.divide_no_nan(t, w)) for t, w in sums.outputs
    ]
    return loss, outputs


#: A context around a model's calls on a tape, in which activations are not kept.
Recompute = Callable[
    [keras.Model, tf.GradientTape], contextlib.AbstractContextManager[None]
]


class Forward:
    """Forward and backward pass of a compiled model.

    Args:
        draws: How it draws random numbers.
        pieces: The most replicas there may be, and the micro-batches into which each
            cuts its rows: all start from the same weights and state.
        recompute: Has activations computed again instead of kept.
        plan: Says which values of ``add_loss`` are sums over rows.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        draws: Draws,
        pieces: tuple[int, int] = (1, 1),
        recompute: Recompute | None = None,
        plan: StepPlan | None = None,
    ):
        self.plan = plan or StepPlan()
        self.prepared = prepared
        self.model = prepared.model
        self.draws = draws
        self.pieces = pieces
        self._recompute = recompute
        self._metric_variables = [
            v for m in keras_compat.metrics(self.model) for v in m.variables
        ]

    def train(
        self,
        weights: Weights,
        rows: Rows,
        global_rows: tf.Tensor,
        loss_scale: tf.Tensor,
        position: tf.Tensor,
    ) -> tuple[Sums, Found]:
        """Sums and gradients over the rows of a micro-batch, at least one.

        Args:
            weights: Values of the model's variables.
            global_rows: Rows in the global batch.
            loss_scale: The loss is multiplied by it before differentiation.
            position: ``(step, replica, micro-batch, first row)``, int64; the last is the
                place of the first of these rows in the global batch.

        Returns:
            The sums, and what tracing them has found.

        Raises:
            UsageError: The model assigns a variable that is not its own.
        """
        variables = self.prepared.trainable
        key = self.draws.key(position)
        trainable = self.prepared.beside(variables, weights.trainable)
        state = self.draws.seeded(weights.state, key)
        with (
            self.draws.tracing(
                self._place(rows, global_rows, position[3]), key
            ) as drawn,
            tf.GradientTape(persistent=True) as tape,
            self._recomputed(tape),
        ):
            tape.watch(trainable)
            scope = self._scope(Weights(trainable, state), key, tape)
            seen, loss = self._call(scope, rows, global_rows, training=True)
            scaled = [total * tf.cast(loss_scale, total.dtype) for total in loss.totals]
        gradients = self._gradients(tape, scaled, trainable, scope)
        counted = _counted(gradients, rows)
        look_ups = self._take_look_ups(gradients)
        del tape
        self._check_assigned(scope, trainable)
        new_state = scope.values(self.prepared.state)
        changing = self._changed(self.prepared.state, state, new_state)
        assigned = sorted(scope.assigned)
        share = _share(rows, global_rows)
        changed = [(state[i], new_state[i]) for i in changing]
        changed += [(trainable[i], scope.assigned[i][-1]) for i in assigned]
        overwritten, overwrites = self._overwrites(gradients, position)
        has_divided = any(g is not None for g in gradients[0])
        if not has_divided:
            gradients = gradients[1:]
        connected = _where(gradients, lambda gradient: gradient is not None)
        sums = Sums(
            [[_dense(g[i], trainable[i]) for i in connected] for g in gradients],
            loss.weights,
            loss.losses,
            loss.outputs,
            self._metrics(scope, rows, global_rows, seen),
            [layer_state.contribution(old, new, share) for old, new in changed],
            overwrites,
        )
        return sums, Found(
            connected=connected,
            combined=_where(gradients, lambda g: isinstance(g, tf.IndexedSlices)),
            counted=counted,
            look_ups=look_ups,
            overwritten=overwritten,
            changing=changing,
            assigned=tuple(assigned),
            has_divided=has_divided,
            seeds=drawn.seeds,
            draws=tuple(drawn.others),
        )

    def test(
        self, weights: Weights, rows: Rows, global_rows: tf.Tensor, first_row: tf.Tensor
    ) -> tuple[Sums, Found]:
        """Sums over rows in inference mode, without gradients; otherwise as `train`."""
        key = self.draws.key(tf.zeros([1], tf.int64))
        scope = self._scope(weights, key)
        place = self._place(rows, global_rows, first_row)
        with self.draws.tracing(place, key) as drawn:
            seen, loss = self._call(scope, rows, global_rows, training=False)
        self._check_assigned(scope, weights.trainable)
        variables = [*self.prepared.trainable, *self.prepared.state]
        before, after = [*weights.trainable, *weights.state], scope.values(variables)
        dropped = [variables[i].path for i in self._changed(variables, before, after)]
        metrics = self._metrics(scope, rows, global_rows, seen)
        sums = Sums([], loss.weights, loss.losses, loss.outputs, metrics, [], [])
        others = tuple(drawn.others)
        return sums, Found(dropped=tuple(dropped), seeds=drawn.seeds, draws=others)

    def _place(
        self, rows: Rows, global_rows: tf.Tensor, first_row: tf.Tensor
    ) -> keras_compat.Place | None:
        """Which rows of the global batch these are; None where they are all of it."""
        if self.pieces == (1, 1):
            return None
        return keras_compat.Place(first_row, _count(rows), global_rows)

    def _scope(
        self, weights: Weights, key: tf.Tensor, tape: tf.GradientTape | None = None
    ) -> keras_compat.ForwardScope:
        """The scope of one forward pass, from values of the model's variables."""
        # Losses of several outputs have trackers. Reading a tracker's variable is a
        # collective under a strategy, and a replica without rows does not run this code.
        metrics = keras_compat.metric_variables(self.model)
        return keras_compat.ForwardScope(
            list(zip(self.prepared.trainable, weights.trainable, strict=True)),
            list(zip(self.prepared.state, weights.state, strict=True)),
            [(v, tf.zeros(v.shape, v.dtype)) for v in metrics],
            self.draws.untracked(key),
            tape,
        )

    def _call(
        self,
        scope: keras_compat.ForwardScope,
        rows: Rows,
        global_rows: tf.Tensor,
        training: bool,
    ) -> tuple[Any, LossSums]:
        """What metrics see, and the loss."""
        with scope, self._of_replica(rows, global_rows):
            own = self._predict(rows, training)
            added = self._added(rows, global_rows)
            return own, self._loss(own, added, global_rows, training)

    def _predict(self, rows: Rows, training: bool) -> Predicted:
        """Calls the model, inside the scope."""
        x, y, sample_weight = rows
        with self.prepared.layer_calls():
            y_pred = keras_compat.call(self.model, x, training)
        return Predicted(x, or_none(y), y_pred, or_none(sample_weight))

    def _added(self, rows: Rows, global_rows: tf.Tensor) -> list[tf.Tensor]:
        """Values of ``add_loss`` and regularizers, each as a mean over these rows."""
        share, sums = _share(rows, global_rows), self.plan.added_sums
        return [
            tf.math.divide_no_nan(value, tf.cast(share, value.dtype))
            if place in sums
            else value
            for place, value in enumerate(self.model.losses)
        ]

    def _loss(
        self,
        own: Predicted,
        added: list[tf.Tensor],
        global_rows: tf.Tensor,
        training: bool,
    ) -> LossSums:
        """The loss of these rows, inside the scope."""
        count = _count(own)
        return loss_sums(self.model, *own, added, count, global_rows, training)

    def _gradients(
        self,
        tape: tf.GradientTape,
        totals: list[tf.Tensor],
        trainable: list[tf.Tensor],
        scope: keras_compat.ForwardScope,
    ) -> list[list[Any]]:
        """The gradients of each total; None where it does not depend on a variable.

        That of a variable which the model assigns, or reads as a variable, is the sum of
        those of its values.
        """
        assigned = scope.assigned.items()
        more = [(i, value) for i, values in assigned for value in values]
        more += keras_compat.read_as_variables(tape, self.prepared.trainable)
        sources = [*trainable, *(value for _, value in more)]
        found = []
        for total in totals:
            terms = tape.gradient(total, sources, unconnected_gradients="none")
            gradients = terms[: len(trainable)]
            for (i, _), term in zip(more, terms[len(trainable) :], strict=True):
                both = [t for t in (gradients[i], term) if t is not None]
                if len(both) == 2:
                    both = [tf.add(*map(tf.convert_to_tensor, both))]
                gradients[i] = both[0] if both else None
            found.append(gradients)
        return found

    def _take_look_ups(self, gradients: list[list[Any]]) -> dict[int, LookUps]:
        """Takes out of the lists what the optimizer sees look-up by look-up."""
        return {}

    def _overwrites(
        self, gradients: list[list[Any]], position: tf.Tensor
    ) -> tuple[tuple[int, ...], list[tf.Tensor]]:
        """Takes the gradients that are new values out of the lists.

        Returns:
            Their variables, and ``Sums.overwrites``.
        """
        overwritten = tuple(
            i
            for i in _where(gradients, lambda gradient: gradient is not None)
            if keras_compat.is_overwritten(self.prepared.trainable[i])
        )
        replicas, micro_batches = self.pieces
        place = tf.cast(position[1] * micro_batches + position[2], tf.int32)
        found = []
        for i in overwritten:
            terms = [g[i] for g in gradients if g[i] is not None]
            value = tf.reduce_max(tf.stack(terms), axis=0)
            shape = [replicas * micro_batches, *value.shape]
            found.append(tf.scatter_nd(place[None, None], value[None], shape))
            for terms in gradients:
                terms[i] = None
        return overwritten, found

    def _check_assigned(
        self, scope: keras_compat.ForwardScope, trainable: list[tf.Tensor]
    ) -> None:
        """Refuses assignments that would be lost."""
        if scope.unknown:
            raise UsageError(
                f"the forward pass assigns variable {scope.unknown[0].path!r}, which "
                f"model {self.model.name!r} does not have",
                hint="make it by self.add_weight(..., trainable=False) of a layer; a "
                "metric must be an attribute of the model or a layer",
            )
        values = scope.values(self.prepared.trainable)
        for i, (old, new) in enumerate(zip(trainable, values, strict=True)):
            if new is not old and i not in scope.assigned:
                raise UsageError(
                    f"a layer assigns {self.prepared.trainable[i].path!r} in its "
                    "forward pass, and would do it again when it is recomputed",
                    hint="drop --recompute",
                )

    def _metrics(
        self,
        scope: keras_compat.ForwardScope,
        rows: Rows,
        global_rows: tf.Tensor,
        seen: Any,
    ) -> list[tf.Tensor]:
        """The metrics' variables, from what model and loss have made of them."""
        counted = scope.values(self._metric_variables)
        with self._of_replica(rows, global_rows):
            return keras_compat.metric_sums(self.model, counted, *seen)

    @contextlib.contextmanager
    def _of_replica(self, rows: Rows, global_rows: tf.Tensor) -> Iterator[None]:
        """Inside, added losses are this replica's alone, and means over its rows.

        A scalar that a metric gets counts by the share of these rows.
        """
        means = keras_compat.scalar_means(_share(rows, global_rows))
        own, whole = keras_compat.own_losses(self.model), keras_compat.whole_losses()
        with means, own, whole:
            yield

    def _recomputed(
        self, tape: tf.GradientTape
    ) -> contextlib.AbstractContextManager[None]:
        if self._recompute is None:
            return contextlib.nullcontext()
        return self._recompute(self.model, tape)

    def _changed(
        self, variables: Sequence[keras.Variable], old: list[Any], new: list[Any]
    ) -> tuple[int, ...]:
        """Indices of the variables that the pass has assigned; not of random states."""
        return tuple(
            i
            for i, variable in enumerate(variables)
            if new[i] is not old[i] and not keras_compat.is_seed_state(variable)
        )


def _where(gradients: list[list[Any]], holds: Callable[[Any], bool]) -> tuple[int, ...]:
    """Indices of the variables where it holds for the gradient of some total."""
    of_variables = enumerate(zip(*gradients, strict=True))
    return tuple(i for i, terms in of_variables if any(map(holds, terms)))


def _counted(gradients: list[list[Any]], rows: Rows) -> dict[int, int]:
    """How many look-ups a row of the batch has, where that is a number."""
    counted: dict[int, int] = {}
    if tf.executing_eagerly():
        for i, terms in enumerate(zip(*gradients, strict=True)):
            for gradient in terms:
                if isinstance(gradient, tf.IndexedSlices):
                    number = -(-int(gradient.indices.shape[0]) // int(_count(rows)))
                    counted[i] = max(number, counted.get(i, 0))
    return counted


def _dense(gradient: Any, like: tf.Tensor) -> tf.Tensor:
    """A gradient as a dense tensor: repeated rows of IndexedSlices are summed.

    TensorFlow forgets the shape of some (a Dense layer on sequences), so it is set.
    """
    if gradient is None:
        return tf.zeros_like(like)
    dense = tf.convert_to_tensor(gradient)
    dense.set_shape(like.shape)
    return dense


def _count(rows: Rows | Predicted) -> tf.Tensor:
    return tf.cast(count_rows(first_leaf(rows.x)), tf.int32)


def _share(rows: Rows, global_rows: tf.Tensor) -> tf.Tensor:
    """The rows' share of the global batch: float64, to be cast."""
    return tf.cast(_count(rows), tf.float64) / tf.cast(global_rows, tf.float64)
