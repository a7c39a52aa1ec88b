"""Models without any code of the user's: their configuration is all there is to know.

To trace the step of a ResNet-50 takes seconds, and only serves to see the user's code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import keras

from collective.training import keras_compat

# Kinds of layers and losses that run what the user has written.
_WRAPPERS = {"Lambda", "LossFunctionWrapper", "MeanMetricWrapper", "function"}
_VALUES = "__tensor__", "__numpy__", "__complex__"


def configuration(model: keras.Model) -> str | None:
    """The model as text; None where it has, or may have, code that is not Keras' own.

    Names of layers are replaced by their places: Keras counts them up in a process.
    """
    if type(model) not in keras_compat.PLAIN_MODELS or not model.compiled:
        return None
    layers = keras_compat.layers_of(model)
    if not all(map(_calls_keras_own, layers)):
        return None
    try:
        config = keras.saving.serialize_keras_object(model)
        text = json.dumps(config, sort_keys=True)
    except Exception:
        return None
    if not all(map(_is_keras_own, _objects(config))):
        return None
    for place, part in enumerate([*layers, model.optimizer]):
        if part is not None:
            text = text.replace(json.dumps(part.name), f'"{place}"')
    return text


def _calls_keras_own(layer: keras.Layer) -> bool:
    """Whether nothing was put in the place of a method."""
    of_class = type(layer).call.__module__.startswith("keras.")
    return of_class and not {"call", "compute_loss", "train_step"} & set(vars(layer))


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """All serialized objects within a configuration."""
    if isinstance(config, dict):
        if "class_name" in config:
            yield config
        config = list(config.values())
    if isinstance(config, list | tuple):
        for part in config:
            yield from _objects(part)


def _is_keras_own(config: dict[str, Any]) -> bool:
    name = config["class_name"]
    if name in _VALUES:
        return True
    module = str(config.get("module") or "")
    own = module == "keras" or module.startswith("keras.") or name == "__keras_tensor__"
    return (
        own and name not in _WRAPPERS and ">" not in str(config.get("registered_name"))
    )
