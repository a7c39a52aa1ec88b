"""Makes a model ready to train: builds it, and cuts the slots of its optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import keras
import tensorflow as tf

from collective.backends.base import Backend
from collective.backends.capabilities import LocalDevices
from collective.errors import UsageError, first_line
from collective.training import keras_compat
from collective.training.compression.hook import CommunicationHook
from collective.training.compression.hook_state import HookState
from collective.training.input.pipeline import Batch
from collective.training.keras_compat.traced import traced
from collective.training.model.record import note_prepared
from collective.training.model.variables import dtype_of_sums
from collective.training.partition import devices
from collective.training.preparation import compatibility
from collective.training.preparation.refusals import check_model
from collective.training.process import host_random
from collective.training.step.rows import BatchRows, packed, rows_of, zeros


class ModelMisfit(UsageError):
    """A model cannot be built for its data; ``__cause__`` is Keras' own error."""


# The errors that Keras raises if a model does not fit its data.
_MISFITS = ValueError, TypeError, KeyError, RuntimeError, AttributeError


def prepare(
    model: keras.Model,
    backend: Backend,
    spec: Batch,
    *,
    hook: CommunicationHook | None = None,
    features: Collection[str] = (),
) -> None:
    """Make a model ready to train on a backend; every rank calls it.

    Args:
        hook: Compresses gradients; its state starts from zero in each training.
        features: The training's features; those that do not work with the model's own
            are refused.

    Raises:
        UsageError: The model cannot be trained on this backend with these options.
    """
    check_model(model, backend)
    compatibility.check({*features, *features_of(model)}, backend)
    _build_all(model, backend, spec)
    state = None
    if hook is not None:
        trainable = model.trainable_variables
        state = HookState(hook, trainable, dtype_of_sums(trainable), backend)
    note_prepared(model, state)


def _build_all(model: keras.Model, backend: Backend, spec: Batch) -> None:
    """Make all variables."""
    with _or_eagerly(model, backend, spec):
        if keras_compat.model.overrides(model, "train_step"):
            _build_by_step(model, backend, spec, "train_step", optimizer=True)
        else:
            _build(model, backend, spec, optimizer=True, training=True)


def features_of(model: keras.Model) -> set[str]:
    """Return the features that a training has because of its model."""
    found = {
        "own_step": keras_compat.model.overrides(model, "train_step"),
        "loss_scale": keras_compat.optimizers.expects_overflow(model.optimizer),
    }
    return {name for name, present in found.items() if present}


@contextlib.contextmanager
def runs_eagerly(model: keras.Model) -> Iterator[None]:
    """Have TensorFlow run functions eagerly inside, if the model has ``run_eagerly=True``.

    The steps of such a model are not traced: they run operation by operation, and so does
    the Python code of the model (``steps.whole``).
    """
    before = tf.config.functions_run_eagerly()
    if not model.run_eagerly or before:
        yield
        return
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextlib.contextmanager
def _or_eagerly(
    model: keras.Model, backend: Backend, spec: Batch, method: str = "train_step"
) -> Iterator[None]:
    """Make variables by a step if a model that runs eagerly cannot be traced.

    The step has a row of zeros as its batch, and is undone.
    """
    if not model.run_eagerly or len(backend.local_replicas) > 1:
        yield
        return
    before, built = host_random.state(), is_built(model)
    try:
        yield
    except UsageError:
        draws = keras_compat.eager_draws.eager_draws()
        with runs_eagerly(model), keras_compat.undone_writes.undo_writes():
            getattr(model, method)(packed(zeros(spec)))
        keras_compat.eager_draws.set_eager_draws(draws, again=True)
    if built and not host_random.is_read():
        host_random.set_state(before)  # Keras would have drawn nothing


def is_built(model: keras.Model) -> bool:
    """Return whether a model and all layers in it are built."""
    return all(layer.built for layer in keras_compat.model.layers_of(model))


def _build(
    model: keras.Model, backend: Backend, spec: Batch, optimizer: bool, training: bool
) -> None:
    """Make the variables of the model, and those of its optimizer if they are whole."""
    # Keras does not run a model here that is built: its code draws no numbers of NumPy.
    quietly = host_random.unchanged() if is_built(model) else contextlib.nullcontext()
    with backend.scope(), quietly:
        try:
            keras_compat.model.build(model, spec[:3], optimizer, training)
        except Exception as error:
            if model.run_eagerly:
                raise _not_traceable(model, error) from error
            if not isinstance(error, _MISFITS):
                raise
            shape = tf.nest.map_structure(lambda s: tuple(s.shape[1:]), spec.x)
            first = first_line(error)
            hint = (
                "give the model the input shape and the number of outputs of the data"
            )
            if spec.y is None:
                hint += "; labels are y=, or come with x from a data set: a tuple in "
                hint += "place of x is several inputs, as in Keras"
            raise ModelMisfit(
                f"model {model.name!r} does not fit the data (a row of x has shape "
                f"{shape}): {first}",
                hint=hint + ", or choose another --data",
            ) from error


def _build_by_step(
    model: keras.Model, backend: Backend, spec: Batch, method: str, optimizer: bool
) -> None:
    """Make the variables that a step method of the model's own makes."""

    def step(rows: BatchRows) -> None:
        getattr(model, method)(packed(rows))

    # A tape reads the variables of one device, and no scope of several.
    is_local = isinstance(backend, LocalDevices)
    with devices.on_first(model, backend) if is_local else backend.scope():
        try:
            with keras_compat.tracing.only_builds(optimizer):
                traced(step).get_concrete_function(rows_of(spec))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"the {method} of model {model.name!r} cannot be traced with rows of "
                f"these data: {type(error).__name__}: {first_line(error)}",
                hint="see whether Keras runs it, with run_eagerly=False; or "
                + compatibility.FEATURES["own_step"].without,
            ) from error


def _not_traceable(model: keras.Model, error: Exception) -> UsageError:
    """Return the error for a model that should run eagerly and cannot be traced."""
    first = first_line(error)
    return UsageError(
        f"model {model.name!r} has run_eagerly=True, and it cannot be traced even once: "
        f"{type(error).__name__}: {first}"[:500],
        hint="collective traces a model to learn the shapes of its sums, and then runs "
        "it eagerly: leave .numpy() and Python's if over tensors out of its code; or "
        "train it by model.fit with hvd.DistributedOptimizer "
        "(collective.tensorflow.keras)",
    )
