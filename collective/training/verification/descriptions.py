"""Describes models, code and settings by texts that are equal in all processes if they are.

The text of a function has its bytecode, its constants and the simple values that it closes
over, so that code without a source file can be described, too. Addresses, file names and the
order of sets, which differ between processes, are left out.

The description of a model is several texts with names. Values of variables are left out,
because every rank begins with rank 0's. Numbers in names that Keras counts up (``dense_1``)
are left out, too, because they depend on all the layers that a process has made.
"""

from __future__ import annotations

import argparse
import dis
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.training import keras_compat
from collective.training.loop.callback_state import names_in

# Deeper values are named by their type only.
_DEPTH = 12
# Bytes of an array that is read whole.
_LARGE = 1 << 20
# Code of these packages is known by its version.
_KNOWN = ("keras", "tensorflow", "numpy", "collective", "tf_keras")
# Settings that do not change the model. Seeds decide initial values only, which are rank 0's.
_IGNORED = ("seed", "build_config", "compile_config", "module", "registered_name")
# Of these objects, only the attributes that are read count: others may differ by rank.
_HOLDERS = (argparse.Namespace, types.SimpleNamespace)
_PLAIN = (bool, int, float, str, bytes, type(None))
# Attributes that fit, evaluate and predict set on a model, with callbacks on rank 0 only.
_SET_BY_KERAS = (
    *("stop_training", "stop_evaluating", "stop_predicting"),
    *("train_function", "test_function", "predict_function", "history"),
)


def short(text: str, length: int = 100) -> str:
    """Return the text, or its hash if it is longer."""
    if len(text) <= length:
        return text
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(value: object) -> str:
    """Return a text for a setting, a function, a class, or an object with a Keras config."""
    return _Describer().of(value, _DEPTH)


class _Describer:
    """Describes values, each function and object once."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # kept alive, because ids are used again

    def of(self, value: object, depth: int) -> str:
        """Return the text for a value."""
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes
        ):
            return repr(value)
        if isinstance(value, np.generic | np.ndarray | tf.Tensor):
            return _array(value)
        if isinstance(value, types.CodeType):
            return self._code(value, depth)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if id(value) in self._seen or not depth:
            return f"<{type(value).__name__}>"
        if isinstance(value, Mapping):
            return self._items(sorted(value.items(), key=lambda i: str(i[0])), depth)
        if isinstance(value, set | frozenset):
            return "{" + ",".join(sorted(self.of(v, depth - 1) for v in value)) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(self.of(v, depth - 1) for v in value) + "]"
        self._seen[id(value)] = value
        return self._object(value, depth - 1)

    def _items(self, items: Any, depth: int) -> str:
        return "{" + ",".join(f"{k}:{self.of(v, depth - 1)}" for k, v in items) + "}"

    def _object(self, value: Any, depth: int) -> str:
        if isinstance(value, functools.partial):
            return f"partial{self.of([value.func, value.args, value.keywords], depth)}"
        if isinstance(value, types.MethodType):
            return f"method{self.of([value.__func__, value.__self__], depth)}"
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, type):
            return self._class(value, depth)
        if isinstance(value, tf.Variable | keras.Variable):
            return f"variable:{value.dtype}{tuple(value.shape)}"
        if isinstance(value, tf.DType | np.dtype):
            return str(value)
        kind = self.of(type(value), depth)
        config = config_of(value)
        if config is not None:
            config = {k: v for k, v in config.items() if k not in ("name", "seed")}
            kind += self.of(config, depth)
        attributes = getattr(value, "__dict__", {}) if _is_users(type(value)) else {}
        return kind + self._items(sorted(attributes.items()), depth)

    def _function(self, function: types.FunctionType, depth: int) -> str:
        name = f"{function.__module__}.{function.__qualname__}"
        if not _is_users(function):
            return name
        wrapped = inspect.unwrap(function)
        parts = [self._code(function.__code__, depth)]
        parts.append(self.of([function.__defaults__, function.__kwdefaults__], depth))
        names = names_in(function.__code__)
        for cell in function.__closure__ or ():
            try:
                parts.append(self._used(cell.cell_contents, names, depth - 1))
            except ValueError:  # empty: a name that is bound later
                parts.append("?")
        for used in sorted(_globals_in(function.__code__)):
            if used in function.__globals__:
                value = function.__globals__[used]
                parts.append(f"{used}={self._used(value, names, depth - 1)}")
        if wrapped is not function:
            parts.append(self.of(wrapped, depth - 1))
        return f"def({';'.join(parts)})"

    def _used(self, value: object, names: set[str], depth: int) -> str:
        """Describe a value that a function refers to.

        For a module, or an object that holds settings, only the attributes that the
        function reads are described.
        """
        holds = isinstance(value, types.ModuleType) and _is_users_module(value.__name__)
        if not holds and not isinstance(value, _HOLDERS):
            return self.of(value, depth)
        read = sorted((k, v) for k, v in vars(value).items() if k in names)
        return type(value).__name__ + self._items(read, depth) if depth else "?"

    def _code(self, code: types.CodeType, depth: int) -> str:
        content = hashlib.sha256(code.co_code).hexdigest()[:16]
        constants = [self.of(c, depth) for c in code.co_consts]
        return (
            f"{content}{constants}{code.co_names}{code.co_varnames}{code.co_freevars}"
        )

    def _class(self, kind: type, depth: int) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not _is_users(kind) or kind.__module__ == "builtins":
            return name
        parts = [self._class(base, depth) for base in kind.__bases__]
        for attribute, value in sorted(vars(kind).items()):
            value = getattr(value, "__func__", value)
            if isinstance(value, property):
                value = [value.fget, value.fset]
            if isinstance(value, types.FunctionType | list) or (
                not attribute.startswith("_") and not callable(value)
            ):
                parts.append(f"{attribute}={self.of(value, depth - 1)}")
        return f"{kind.__qualname__}({';'.join(parts)})"


def _globals_in(code: types.CodeType) -> set[str]:
    """Return the names of global variables that code reads, without those of attributes."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    read = (i for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    return {i.argval for i in read}.union(*map(_globals_in, inner))


def _is_users(value: object) -> bool:
    """Return whether a function or class does not belong to an installed library."""
    return _is_users_module(getattr(value, "__module__", None) or "")


@functools.cache
def _is_users_module(name: str) -> bool:
    if name.partition(".")[0] in _KNOWN:
        return False
    if name in ("", "__main__", "__mp_main__", "builtins"):  # the last one: by exec
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:  # made at run time, or part of the interpreter
        return name not in sys.builtin_module_names
    path = Path(file).resolve()
    folders = (sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    return not any(path.is_relative_to(Path(folder).resolve()) for folder in folders)


def _array(value: object) -> str:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, NotImplementedError):
        return f"<{type(value).__name__}>"  # of a graph
    if array.dtype == object:
        return f"array:{array.shape}"
    flat = array.reshape(-1)
    if array.nbytes > _LARGE:  # a sample, spread over the whole
        flat = flat[:: flat.size // 4096 + 1]
    digest = hashlib.sha256(np.ascontiguousarray(flat).tobytes()).hexdigest()[:16]
    return f"array:{array.dtype}{array.shape}{digest}"


def config_of(value: object) -> dict[str, Any] | None:
    """Return an object's Keras config, or None if it has none."""
    get_config = getattr(value, "get_config", None)
    if get_config is None:
        return None
    try:
        config = get_config()
    except Exception:  # the user's code, or Keras' refusal to guess
        return None
    return config if isinstance(config, dict) else None


@functools.cache
def _no_settings() -> frozenset[str]:
    """Return attributes that every layer has, or that do not change the model.

    They are not found when this file is imported: the first layer that is made fixes Keras'
    dtype policy, and ``keras.config.set_floatx`` in the user's script would come too late.
    """
    return frozenset(
        (*vars(keras.layers.Layer(name="base")), *_IGNORED, *_SET_BY_KERAS)
    )


def describe_model(model: keras.Model) -> dict[str, str]:
    """Return the texts of a compiled and built model, by name."""
    names = _Names(model)
    parts: dict[str, str] = {}
    for number, layer in enumerate(keras_compat.model.layers_of(model)[1:]):
        name = f"layer {number} ({names.of(layer.name)})"
        parts |= {f"{name}: {key}": text for key, text in _layer(layer, names).items()}
    config = config_of(model)
    if config is not None:
        parts["connections of the layers"] = describe(names.replace(config))
    for key, text in _attributes(model, names).items():
        parts[f"{key} of the model"] = text
    for number, variable in enumerate(model.variables):
        path = "/".join(names.of(part) for part in variable.path.split("/"))
        trainable = " trainable" if variable.trainable else ""
        shape = tuple(variable.shape)
        parts[f"variable {number}"] = f"{path} {variable.dtype}{shape}{trainable}"
    for method in ("train_step", "test_step", "compute_loss", "compute_metrics"):
        if keras_compat.model.overrides(model, method):
            of_class = getattr(type(model), method)
            parts[method] = describe(vars(model).get(method, of_class))
    parts |= _compiled(model)
    return {"class of the model": describe(type(model))} | {
        name: short(text) for name, text in parts.items()
    }


def _compiled(model: keras.Model) -> dict[str, str]:
    """Describe loss, metrics and optimizer."""
    arguments = keras_compat.model.compiled_arguments(model)
    parts = {name: describe(value) for name, value in arguments.items()}
    optimizer = model.optimizer
    parts["class of the optimizer"] = describe(type(optimizer))
    ignored = ["name", *_IGNORED]
    if keras_compat.optimizers.plain_rate(optimizer) is not None:
        ignored.append("learning_rate")  # a variable: every rank has rank 0's
    config = _without(config_of(optimizer) or {}, ignored)
    return parts | {f"optimizer: {key}": describe(v) for key, v in config.items()}


def _layer(layer: keras.layers.Layer, names: _Names) -> dict[str, str]:
    """Describe the settings of a layer."""
    settings = {"class": describe(type(layer)), "trainable": str(layer.trainable)}
    config = config_of(layer)
    for key, value in (config or {}).items():
        if key not in ("name", "layers", "trainable", *_IGNORED):
            settings[key] = describe(names.replace(value))
    return settings | _attributes(layer, names)


def _attributes(layer: keras.layers.Layer, names: _Names) -> dict[str, str]:
    """Describe simple attributes, functions, and the order of layers of a user's class."""
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
    """Return a config without some keys, at any depth."""
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
        for layer in keras_compat.model.layers_of(model):
            base = re.sub(r"_\d+$", "", layer.name)
            counts[base] = counts.get(base, 0) + 1
            self._new.setdefault(layer.name, f"{base}#{counts[base]}")

    def of(self, name: str) -> str:
        """Return a layer's name in this model; for another object, drop its number."""
        return self._new.get(name) or re.sub(r"_\d+$", "", name)

    def replace(self, value: Any) -> Any:
        """Return a config with the names of layers replaced."""
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
