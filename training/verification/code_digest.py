"""What code and settings are, as text that is equal wherever they are equal.

Of functions it is the bytecode, the constants and the simple values that they close over,
so it also serves for code without a source file. Addresses, file names and the order of
sets, which differ from process to process, are left out.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Deeper values are named by their type only.
_DEPTH = 12
# Bytes of an array that is read whole.
_LARGE = 1 << 20
# Code of these packages is known by its version.
_KNOWN = ("keras", "tensorflow", "numpy", "collective", "tf_keras")


def short(text: str, length: int = 100) -> str:
    """The text, or its hash where it is longer."""
    if len(text) <= length:
        return text
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:16]


def describe(value: Any) -> str:
    """A text for a setting, a function, a class, or an object with a Keras config."""
    return _Describer().of(value, _DEPTH)


class _Describer:
    """Describes values, each function and object once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # kept alive: numbers of the dead are reused

    def of(self, value: Any, depth: int) -> str:
        """The text for a value."""
        if value is None or isinstance(
            value, bool | int | float | complex | str | bytes
        ):
            return repr(value)
        if isinstance(value, np.generic | np.ndarray | tf.Tensor):
            return _array(value)
        if isinstance(value, types.CodeType):
            return self._code(value, depth)
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
        for cell in function.__closure__ or ():
            try:
                parts.append(self.of(cell.cell_contents, depth - 1))
            except ValueError:  # empty: a name that is bound later
                parts.append("?")
        for used in sorted(_names(function.__code__)):
            if used in function.__globals__:
                value = function.__globals__[used]
                if not isinstance(value, types.ModuleType):
                    parts.append(f"{used}={self.of(value, depth - 1)}")
        if wrapped is not function:
            parts.append(self.of(wrapped, depth - 1))
        return f"def({';'.join(parts)})"

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


def _is_users(value: Any) -> bool:
    """Whether a function or class is none of an installed library's."""
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


def _names(code: types.CodeType) -> set[str]:
    """The names of globals that a function, and those in it, may read."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _array(value: Any) -> str:
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


def config_of(value: Any) -> dict[str, Any] | None:
    """An object's Keras config; None where it has none."""
    get_config = getattr(value, "get_config", None)
    if get_config is None:
        return None
    try:
        config = get_config()
    except Exception:  # the user's code, or Keras' refusal to guess
        return None
    return config if isinstance(config, dict) else None
