"""The forward and backward pass of one replica over some rows, as sums.

The functions here are pure: values of variables and rows go in, sums and new state come
out, no variable is written. XLA can compile them, a loop can call them for each
micro-batch, and they run on any replica under any strategy.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from collective.errors import UsageError
from collective.training import keras_compat
from collective.training.input.leaves import count_rows, first_leaf
from collective.training.prepared import PreparedModel
from collective.training.step import layer_state
from collective.training.step.draws import Draws
from collective.training.step.inputs import Weights
from collective.training.step.losses import LossSums, loss_sums
from collective.training.step.plan import StepPlan
from collective.training.step.rows import Rows, or_none
from collective.training.variants.coupled import look_ups
from collective.training.variants.coupled import replica as coupled_replica
from collective.training.variants.coupled.whole import Predicted, WholeBatch, gather
from collective.training.variants.memory.recompute import recompute_blocks


class Sums(NamedTuple):
    """Sums over rows; they can be added over micro-batches and over replicas.

    Attributes:
        gradients: One list for each denominator of the loss (first the divided part, if
            there is one). Each has one dense tensor for each connected variable.
        weights: Scalars, the denominators of the undivided losses.
        losses: Scalars: the divided part as Keras shows it, then the total of each
            undivided loss.
        outputs: Scalars ``total, weight`` for each output's own loss; weight is 0 for a
            divided one.
        metrics: The metrics' variables, counted from zero.
        state: What these rows contribute to the new values of what the model assigns
            (``collective.training.step.layer_state``).
        overwrites: ``[pieces, *shape]`` for each trainable variable that is overwritten
            by its gradient; zero but in the place of these rows.
    """

    gradients: list[list[tf.Tensor]]
    weights: list[tf.Tensor]
    losses: list[tf.Tensor]
    outputs: list[tuple[tf.Tensor, tf.Tensor]]
    metrics: list[tf.Tensor]
    state: list[tf.Tensor]
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


class Forward:
    """Forward and backward pass of a compiled model.

    Args:
        replicas, micro_batches: The most replicas there may be, and the pieces into
            which each cuts its rows: all start from the same weights and state.
        plan: Whether loss and metrics are those of the whole global batch. If so,
            ``train`` and ``test`` run for a replica that they can ask
            (``collective.training.variants.coupled.replica``).

    Attributes:
        connected: Indices of the trainable variables that the loss depends on. This and
            the next five are known once ``train`` has been traced.
        look_ups: Gradients of single look-ups, by the index of the variable: tensors of
            the graph that ``train`` was traced in.
        combined: Indices of those whose gradient has rows of look-ups, each of which may
            come several times: they are added up.
        counted: Look-ups of a row of the batch, by the index of the variable; known
            where ``train`` runs eagerly.
        overwritten: Indices of the trainable variables whose gradient is their new
            value (scales of float8 layers); none of them is in ``connected``.
        changing: Indices of the non-trainable variables that the model assigns.
        assigned: Indices of the trainable variables that the model assigns.
        has_divided: Whether the divided part of the loss has a gradient.
        dropped: Paths of the variables that ``test``, once traced, leaves as they are
            though the model assigns them.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        seed: int | None,
        recompute: bool = False,
        replicas: int = 1,
        micro_batches: int = 1,
        plan: StepPlan | None = None,
        draws_by_piece: bool = False,
    ):
        self.plan = plan or StepPlan()
        self.prepared = prepared
        self.model = prepared.model
        self.placement = prepared.placement
        self.draws = Draws(prepared, seed, draws_by_piece)
        self.recompute = recompute
        self.pieces = replicas, micro_batches
        self.connected: list[int] = []
        self.combined: list[int] = []
        self.look_ups: dict[int, look_ups.LookUps] = {}
        self.counted: dict[int, int] = {}
        self.overwritten: list[int] = []
        self.changing: list[int] = []
        self.assigned: list[int] = []
        self.has_divided = True
        self.dropped: list[str] = []
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
        metric_state: list[tf.Tensor] | None = None,
    ) -> Sums:
        """Sums and gradients over the rows of a micro-batch, at least one.

        Args:
            weights: Values of the model's variables.
            global_rows: Rows in the global batch.
            loss_scale: The loss is multiplied by it before differentiation.
            position: ``(step, replica, micro-batch, first row)``, int64; the last is the
                place of the first of these rows in the global batch.
            metric_state: Values of the metrics' variables, from which metrics of the whole
                global batch continue; all others count from zero.

        Raises:
            UsageError: The model assigns a variable that is not its own.
        """
        trainable, state = weights
        key = self.draws.key(position)
        state = self.draws.seeded(state, key)
        if self.placement is not None:
            trainable = self.placement.colocate(trainable, self.prepared.trainable)
        with (
            self.draws.tracing(self._place(rows, global_rows, position[3]), key),
            tf.GradientTape(persistent=True) as tape,
            self._recomputed(tape),
        ):
            tape.watch(trainable)
            scope = self._scope(Weights(trainable, state), key, tape)
            seen, loss = self._call(
                scope, rows, global_rows, training=True, metric_state=metric_state
            )
            scaled = [total * tf.cast(loss_scale, total.dtype) for total in loss.totals]
        gradients = self._gradients(tape, scaled, trainable, scope.assigned)
        self._count_look_ups(gradients, rows)
        if self.plan.gather_look_ups or self.plan.as_rows:
            chosen = None if self.plan.gather_look_ups else self.plan.as_rows
            self.look_ups = look_ups.take(gradients, coupled_replica.required(), chosen)
        del tape
        self._check_assigned(scope, trainable)
        new_state = scope.values(self.prepared.state)
        self.changing = [
            i
            for i, (old, new) in enumerate(zip(state, new_state, strict=True))
            if new is not old and not self._is_seed(i)
        ]
        self.assigned = sorted(scope.assigned)
        share = _share(rows, global_rows)
        changed = [(state[i], new_state[i]) for i in self.changing]
        changed += [(trainable[i], scope.assigned[i][-1]) for i in self.assigned]
        overwrites = self._overwrites(gradients, position)
        return Sums(
            self._dense(gradients, trainable),
            loss.weights,
            loss.losses,
            loss.outputs,
            self._metrics(scope, rows, global_rows, seen),
            [layer_state.contribution(old, new, share) for old, new in changed],
            overwrites,
        )

    def test(
        self,
        weights: Weights,
        rows: Rows,
        global_rows: tf.Tensor,
        first_row: tf.Tensor,
        metric_state: list[tf.Tensor] | None = None,
    ) -> Sums:
        """Sums over rows in inference mode, without gradients; otherwise as `train`."""
        key = self.draws.key(tf.zeros([1], tf.int64))
        scope = self._scope(weights, key)
        with self.draws.tracing(self._place(rows, global_rows, first_row), key):
            seen, loss = self._call(
                scope, rows, global_rows, training=False, metric_state=metric_state
            )
        self._check_assigned(scope, weights.trainable)
        variables = [*self.prepared.trainable, *self.prepared.state]
        before, after = [*weights.trainable, *weights.state], scope.values(variables)
        self.dropped = [
            variable.path
            for variable, old, new in zip(variables, before, after, strict=True)
            if new is not old and not keras_compat.is_seed_state(variable)
        ]
        metrics = self._metrics(scope, rows, global_rows, seen)
        return Sums([], loss.weights, loss.losses, loss.outputs, metrics, [], [])

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
        # collective under MultiWorkerMirroredStrategy, and a replica without rows does
        # not run this code.
        metrics = keras_compat.metric_variables(self.model)
        return keras_compat.ForwardScope(
            list(zip(self.prepared.trainable, weights.trainable, strict=True)),
            [
                *zip(self.prepared.state, weights.state, strict=True),
                *((v, tf.zeros(v.shape, v.dtype)) for v in metrics),
            ],
            self.draws.untracked(key),
            tape,
        )

    def _call(
        self,
        scope: keras_compat.ForwardScope,
        rows: Rows,
        global_rows: tf.Tensor,
        training: bool,
        metric_state: list[tf.Tensor] | None,
    ) -> tuple[Predicted | WholeBatch, LossSums]:
        """What metrics see, and the loss, inside the scope."""
        model, (x, y, sample_weight) = self.model, rows
        placement: Any = contextlib.nullcontext()
        if self.placement is not None:
            placement = self.placement.layer_calls(model)
        with scope, keras_compat.scalar_means(_share(rows, global_rows)):
            with placement:
                y_pred = keras_compat.call(model, x, training)
            own = Predicted(x, or_none(y), y_pred, or_none(sample_weight))
            added = model.losses
            if not self.plan.gather_loss:
                loss = loss_sums(
                    model, *own, added, _count(rows), global_rows, training
                )
        if not (self.plan.gather_loss or self.plan.gather_metrics):
            return own, loss
        whole = WholeBatch(
            model,
            gather(model, own),
            coupled_replica.required(),
            self._metric_variables,
            metric_state if self.plan.gather_metrics else None,
        )
        if self.plan.gather_loss:
            loss = whole.loss(scope, self.prepared, added, training)
        return whole if self.plan.gather_metrics else own, loss

    def _gradients(
        self,
        tape: tf.GradientTape,
        totals: list[tf.Tensor],
        trainable: list[tf.Tensor],
        assigned: dict[int, list[tf.Tensor]],
    ) -> list[list[Any]]:
        """The gradients of each total; None where it does not depend on a variable.

        That of a variable which the model assigns is the sum of those of its values.
        """
        more = [(i, value) for i, values in assigned.items() for value in values]
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

    def _count_look_ups(self, gradients: list[list[Any]], rows: Rows) -> None:
        """Notes how many look-ups a row of the batch has, where that is a number."""
        if not tf.executing_eagerly():
            return
        for place, of_one in enumerate(zip(*gradients, strict=True)):
            for gradient in of_one:
                if isinstance(gradient, tf.IndexedSlices):
                    number = -(-int(gradient.indices.shape[0]) // int(_count(rows)))
                    self.counted[place] = max(number, self.counted.get(place, 0))

    def _overwrites(
        self, gradients: list[list[Any]], position: tf.Tensor
    ) -> list[tf.Tensor]:
        """Takes the gradients that are new values out of the lists."""
        variables = self.prepared.trainable
        self.overwritten = [
            i
            for i, variable in enumerate(variables)
            if keras_compat.is_overwritten(variable)
            and any(g[i] is not None for g in gradients)
        ]
        replicas, micro_batches = self.pieces
        place = tf.cast(position[1] * micro_batches + position[2], tf.int32)
        found = []
        for i in self.overwritten:
            terms = [g[i] for g in gradients if g[i] is not None]
            value = tf.reduce_max(tf.stack(terms), axis=0)
            shape = [replicas * micro_batches, *value.shape]
            found.append(tf.scatter_nd(place[None, None], value[None], shape))
            for terms in gradients:
                terms[i] = None
        return found

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

    def _dense(
        self, gradients: list[list[Any]], trainable: list[tf.Tensor]
    ) -> list[list[tf.Tensor]]:
        """Dense gradients of connected variables; finds out which these are."""
        self.has_divided = any(g is not None for g in gradients[0])
        if not self.has_divided:
            gradients = gradients[1:]
        self.connected = [
            i for i in range(len(trainable)) if any(g[i] is not None for g in gradients)
        ]
        self.combined = [
            i
            for i in self.connected
            if any(isinstance(g[i], tf.IndexedSlices) for g in gradients)
        ]
        return [[_dense(g[i], trainable[i]) for i in self.connected] for g in gradients]

    def _metrics(
        self,
        scope: keras_compat.ForwardScope,
        rows: Rows,
        global_rows: tf.Tensor,
        seen: Predicted | WholeBatch,
    ) -> list[tf.Tensor]:
        """The metrics' variables, from what model and loss have made of them."""
        counted = scope.values(self._metric_variables)
        if isinstance(seen, WholeBatch):
            return seen.metrics(counted)
        with keras_compat.scalar_means(_share(rows, global_rows)):
            sums = keras_compat.metric_sums(self.model, counted, *seen)
        context = coupled_replica.current()
        return sums if context is None else [context.own(value) for value in sums]

    def _recomputed(
        self, tape: tf.GradientTape
    ) -> contextlib.AbstractContextManager[None]:
        if not self.recompute:
            return contextlib.nullcontext()
        return recompute_blocks(self.model, tape, self._keeps_activations)

    def _keeps_activations(self, layer: Any) -> bool:
        """Whether a layer communicates, or its gradient is wanted by single look-ups.

        A block that is computed twice would send twice, and adds look-ups up.
        """
        if coupled_replica.current() is None:
            return False
        return any(
            isinstance(one, keras.layers.BatchNormalization | keras.layers.Embedding)
            for one in getattr(layer, "_flatten_layers", list)()
        )

    def _is_seed(self, index: int) -> bool:
        return keras_compat.is_seed_state(self.prepared.state[index])


def _dense(gradient: Any, like: tf.Tensor) -> tf.Tensor:
    """A gradient as a dense tensor: repeated rows of IndexedSlices are summed.

    TensorFlow forgets the shape of some (a Dense layer on sequences), so it is set.
    """
    if gradient is None:
        return tf.zeros_like(like)
    dense = tf.convert_to_tensor(gradient)
    dense.set_shape(like.shape)
    return dense


def _count(rows: Rows) -> tf.Tensor:
    return tf.cast(count_rows(first_leaf(rows.x)), tf.int32)


def _share(rows: Rows, global_rows: tf.Tensor) -> tf.Tensor:
    """The rows' share of the global batch: float64, to be cast."""
    return tf.cast(_count(rows), tf.float64) / tf.cast(global_rows, tf.float64)
