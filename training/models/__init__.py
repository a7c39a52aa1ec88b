"""Models by name, and the user's own by ``module:function``.

All built-in models end in logits, without a softmax, in the variables' precision:
their loss is ``keras.losses.SparseCategoricalCrossentropy(from_logits=True)``.
"""

from __future__ import annotations

from collections.abc import Callable

import keras

from collective.errors import UsageError
from collective.training.arguments.lookup import call, lookup
from collective.training.models.cnn import cnn
from collective.training.models.mlp import mlp
from collective.training.models.resnet50 import resnet50
from collective.training.models.transformer import transformer

Shape = tuple[int, ...]

MODELS: dict[str, Callable[[Shape, int], keras.Model]] = {
    "mlp": mlp,
    "cnn": cnn,
    "resnet50": resnet50,
    "transformer": transformer,
}


def build(what: str, *, input_shape: Shape, classes: int | None) -> keras.Model:
    """Builds a model.

    Args:
        what: A name in ``MODELS``, or ``module:function``: called with those of
            ``input_shape`` and ``classes`` that it takes; returns a keras.Model,
            compiled or not.
        input_shape: Shape of one row of x, without the batch dimension.
        classes: Number of classes; None where the data has no classes, which only
            the user's own models can do with.

    Returns:
        The model; a built-in one gives logits ``[n, classes]``.

    Raises:
        UsageError: If there is no such model, or it does not fit the data.
    """
    if ":" in what:
        model = call(lookup(what), input_shape=input_shape, classes=classes)
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"{what} returned a {type(model).__name__}, not a keras.Model",
                hint=f"end {what.partition(':')[2]} with: return model",
            )
        return model
    if what not in MODELS:
        raise UsageError(
            f"there is no model {what!r}",
            hint=f"--model {' | '.join(MODELS)} | module:function",
        )
    if classes is None:
        raise UsageError(
            f"the model {what} sorts into classes, and the data has none",
            hint="use integer labels from 0 up, or your own --model module:function",
        )
    return MODELS[what](tuple(input_shape), classes)
