"""A model as named parts of text, equal on ranks that made the same model.

Values of variables are left out: every rank begins with rank 0's. So are numbers in
names that Keras counts up (``dense_1``), which depend on what else a process has made.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from collective.training import keras_compat
from collective.training.verification.code_digest import config_of, describe, short

# What does not change the model: seeds decide first values only, which are rank 0's.
_IGNORED = ("seed", "build_config", "compile_config", "module", "registered_name")
_PLAIN = (bool, int, float, str, bytes, type(None))
# What fit, evaluate and predict set on a model, with callbacks on rank 0 only.
_SET_BY_KERAS = (
    *("stop_training", "stop_evaluating", "stop_predicting"),
    *("train_function", "test_function", "predict_function", "history"),
)


@functools.cache
def _no_settings() -> frozenset[str]:
    """Attributes that every layer has, or that do not change the model.

    Not when this file is imported: the first layer that is made fixes Keras' dtype
    policy, and ``keras.config.set_floatx`` of the user's script would come too late.
    """
    return frozenset(
        (*vars(keras.layers.Layer(name="base")), *_IGNORED, *_SET_BY_KERAS)
    )


def describe_model(model: keras.Model) -> dict[str, str]:
    """Parts of a compiled and built model, by name."""
    names = _Names(model)
    parts = {"class of the model": describe(type(model))}
    for number, layer in enumerate(model._flatten_layers(include_self=False)):
        name = f"layer {number} ({names.of(layer.name)})"
        for key, text in _layer(layer, names).items():
            parts[f"{name}: {key}"] = short(text)
    config = config_of(model)
    if config is not None:
        parts["connections of the layers"] = short(describe(names.replace(config)))
    parts |= {
        f"{key} of the model": short(text)
        for key, text in _attributes(model, names).items()
    }
    for number, variable in enumerate(model.variables):
        path = "/".join(names.of(part) for part in variable.path.split("/"))
        parts[f"variable {number}"] = short(
            f"{path} {variable.dtype}{tuple(variable.shape)}"
            f"{' trainable' if variable.trainable else ''}"
        )
    for method in ("train_step", "test_step", "compute_loss", "compute_metrics"):
        if keras_compat.overrides(model, method):
            parts[method] = short(describe(getattr(type(model), method)))
    return parts | describe_compiled(model)


def describe_compiled(model: keras.Model) -> dict[str, str]:
    """Loss, metrics and optimizer."""
    parts = {
        name: short(describe(value))
        for name, value in keras_compat.compiled_arguments(model).items()
    }
    optimizer = model.optimizer
    parts["class of the optimizer"] = short(describe(type(optimizer)))
    ignored = ["name", *_IGNORED]
    core = keras_compat.core_optimizer(optimizer)
    if isinstance(getattr(core, "_learning_rate", None), keras.Variable):
        ignored.append("learning_rate")  # a variable: every rank has rank 0's
    config = _without(config_of(optimizer) or {}, ignored)
    parts |= {f"optimizer: {key}": short(describe(v)) for key, v in config.items()}
    return parts


def _layer(layer: keras.layers.Layer, names: _Names) -> dict[str, str]:
    """Settings of a layer."""
    settings = {"class": describe(type(layer)), "trainable": str(layer.trainable)}
    config = config_of(layer)
    for key, value in (config or {}).items():
        if key not in ("name", "layers", "trainable", *_IGNORED):
            settings[key] = describe(names.replace(_without(value, _IGNORED)))
    return settings | _attributes(layer, names)


def _attributes(layer: keras.layers.Layer, names: _Names) -> dict[str, str]:
    """Simple attributes, functions, and the order of layers in a user's own class."""
    if type(layer).__module__.startswith("keras."):
        return {}
    found, inner = {}, []
    for key, value in vars(layer).items():
        if key.startswith("_") or key in _no_settings():
            continue
        if isinstance(value, keras.layers.Layer):
            inner.append(f"{key}={type(value).__name__}")
        elif isinstance(value, _PLAIN) or (
            callable(value) and hasattr(value, "__code__")
        ):
            found[key] = describe(value)
    if inner:
        found["order of its layers"] = ", ".join(inner)
    return found


def _without(value: Any, ignored: Sequence[str]) -> Any:
    """A config without some keys, at any depth."""
    if isinstance(value, Mapping):
        return {k: _without(v, ignored) for k, v in value.items() if k not in ignored}
    if isinstance(value, list | tuple):
        return [_without(v, ignored) for v in value]
    return value


class _Names:
    """Names of layers, numbered in the order of this model's layers."""

    def __init__(self, model: keras.Model):
        self._new: dict[str, str] = {}
        counts: dict[str, int] = {}
        for layer in model._flatten_layers():
            base = re.sub(r"_\d+$", "", layer.name)
            counts[base] = counts.get(base, 0) + 1
            self._new.setdefault(layer.name, f"{base}#{counts[base]}")

    def of(self, name: str) -> str:
        """The name in this model; of what is no layer, without its number."""
        return self._new.get(name) or re.sub(r"_\d+$", "", name)

    def replace(self, value: Any) -> Any:
        """A config with the names of layers replaced."""
        if isinstance(value, str):
            return self._new.get(value, value)
        if isinstance(value, Mapping):
            return {
                k: self.of(str(v)) if k == "name" else self.replace(v)
                for k, v in value.items()
                if k not in _IGNORED
            }
        if isinstance(value, list | tuple):
            return [self.replace(v) for v in value]
        return value
