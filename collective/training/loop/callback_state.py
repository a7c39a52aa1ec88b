"""What callbacks have gathered on rank 0, given to every rank after the training.

Callbacks run on rank 0 only, and a script reads them on every rank: the losses that one
has collected, the best epoch of ``EarlyStopping``, a list that a lambda appends to. So the
attributes of callbacks that have changed there are broadcast, and with them what their
functions have changed: variables of enclosing functions, and of the script.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from collective.backends.base import Backend
from collective.log import log
from collective.training.process.object_collectives import broadcast_object

# Where a value is: the callback's place, attribute, cell or global, and its name.
Key = tuple[int, str, str]

_OWN = {"_model", "params"}  # Keras' own, set on every rank
# Objects of which every rank has its own, updated with the model.
_OF_MODEL = (
    keras.Layer,
    keras.Optimizer,
    keras.Variable,
    keras.Metric,
    keras.Loss,
    tf.Variable,
)
# What functions may change beside attributes, and up to how many bytes it is looked at.
_PLAIN = (list, dict, set, int, float, str, type(None), np.ndarray)
_MOST_BYTES = 16 << 20


class CallbackState:
    """The state of callbacks, in their order.

    Args:
        callbacks: The same kinds on every rank; elsewhere nothing is given.
    """

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback]):
        self.callbacks = callbacks
        self._before: dict[Key, Any] = {}
        # What this rank was given: the values, and which callbacks have others, too.
        self._given: dict[Key, bytes] | None = None
        self._given_in_part: set[int] = set()

    def begin(self) -> None:
        """Remember the values before the training. On rank 0."""
        self._before = {
            key: (value, digest(value)) for key, value in self._values().items()
        }

    def share(
        self,
        backend: Backend,
        model: keras.Model,
        params: Any,
        unit: Callable[[Callable[[], Any]], Any] = lambda attempt: attempt(),
    ) -> bool:
        """Give every rank the changes on rank 0 since the last call of this method.

        Every rank calls it, and learns whether it has rank 0's state now.

        Args:
            unit: Runs what all ranks do together, again where one of them has died.
        """
        kinds = [f"{type(c).__module__}.{type(c).__qualname__}" for c in self.callbacks]
        gives = False

        def exchanged() -> Any:
            nonlocal gives
            changed: dict[Key, bytes] = {}
            in_part: set[int] = set()
            gives = backend.rank == 0
            if gives:
                changed = dict(self._changed(in_part))
            return broadcast_object(backend, (kinds, changed, in_part))

        found = unit(exchanged)
        if found is None:
            return False
        first, changed, in_part = found
        if gives:
            values = self._values()
            for key in changed:  # what changes back is sent again
                self._before[key] = values[key], digest(values[key])
        if gives or first != kinds:
            return bool(first == kinds)
        for callback in self.callbacks:
            # Keras' own: a user's ``set_model`` is for the rank that runs the callbacks.
            keras.callbacks.Callback.set_model(callback, model)
            keras.callbacks.Callback.set_params(callback, dict(params))
        self._given = (self._given or {}) | changed
        self._given_in_part = in_part
        self._put(changed)
        return True

    def begin_training(self) -> None:
        """Call ``on_train_begin``; on a rank that has become rank 0, if needed.

        Callbacks that were given all of their state continue from it. Others begin, as
        to open a file, and are given it again.
        """
        given = self._given
        for place, callback in enumerate(self.callbacks):
            if given is None:
                callback.on_train_begin({})
            elif place in self._given_in_part:
                with _appending(callback):
                    callback.on_train_begin({})
                self._put({key: data for key, data in given.items() if key[0] == place})

    def _put(self, values: Mapping[Key, bytes]) -> None:
        for key, data in values.items():
            self._set(key, pickle.loads(data))

    def _changed(self, in_part: set[int]) -> Iterator[tuple[Key, bytes]]:
        for key, value in self._values().items():
            former, before = self._before.get(key, (key, None))
            try:
                data = _pickled(value)
                pickle.loads(data)
            except Exception as error:
                self._note(key, value, former, error)
                if value is not former:
                    in_part.add(key[0])
                continue
            if before is None or before != digest(value):
                yield key, data

    def _note(self, key: Key, value: Any, former: Any, error: Exception) -> None:
        """Name an attribute that another rank would read and does not get."""
        place, where, name = key
        kind = type(self.callbacks[place])
        of_keras = kind.__module__.split(".")[0] == "keras"
        if where != "attribute" or value is former or of_keras or name[0] == "_":
            return
        _warn(
            f"{kind.__name__}.{name}",
            f"{type(error).__name__}: {error}".split("\n")[0][:150],
        )

    def _values(self) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for place, callback in enumerate(self.callbacks):
            for name, value in list(vars(callback).items()):
                if name not in _OWN:
                    found[place, "attribute", name] = value
            for where, name, _, value in _around(callback):
                found[place, where, name] = value
        return found

    def _set(self, key: Key, value: Any) -> None:
        place, where, name = key
        callback = self.callbacks[place]
        if where == "attribute":
            if not _set_in_place(vars(callback).get(name), value):
                setattr(callback, name, value)
            return
        for found, of, owner, mine in _around(callback):
            if (found, of) != (where, name) or _set_in_place(mine, value):
                continue
            if isinstance(owner, types.CellType):
                owner.cell_contents = value
            else:
                owner[name.rpartition(".")[2]] = value


@contextlib.contextmanager
def _appending(callback: keras.callbacks.Callback) -> Iterator[None]:
    """Inside, a callback that writes a log begins no new file."""
    if not isinstance(callback, keras.callbacks.CSVLogger):
        yield
        return
    before, callback.append = callback.append, True
    try:
        yield
    finally:
        callback.append = before


def _around(callback: keras.callbacks.Callback) -> Iterator[tuple[str, str, Any, Any]]:
    """Return what the callback's functions may change: where, name, owner, value."""
    functions = [v for v in vars(callback).values() if isinstance(v, _FUNCTION)]
    for kind in type(callback).__mro__:
        if kind.__module__.split(".")[0] not in ("keras", "builtins"):
            functions += [v for v in vars(kind).values() if isinstance(v, _FUNCTION)]
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        name = f"{function.__module__}.{function.__qualname__}"
        for of, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                value = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if isinstance(value, _FUNCTION):
                functions.append(value)
            elif _is_plain(value):
                yield "cell", f"{name}.{of}", cell, value
        for of in names_in(function.__code__):
            value = function.__globals__.get(of, function)
            if isinstance(value, _FUNCTION):
                if value.__module__ == function.__module__:
                    functions.append(value)
            elif _is_plain(value):
                yield (
                    "global",
                    f"{function.__module__}.{of}",
                    function.__globals__,
                    value,
                )


_FUNCTION = types.FunctionType


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals that a function, and those in it, may read."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names}.union(*map(names_in, inner))


def _is_plain(value: Any) -> bool:
    if type(value) is np.ndarray:
        return value.nbytes <= _MOST_BYTES
    return type(value) in _PLAIN or type(value) is bool


def _set_in_place(mine: Any, value: Any) -> bool:
    """Change the object, which the script may know by another name; if possible."""
    if type(mine) is not type(value):
        return False
    if isinstance(mine, list):
        mine[:] = value
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(value)
    elif isinstance(mine, np.ndarray) and mine.flags.writeable:
        if (mine.shape, mine.dtype) != (value.shape, value.dtype):
            return False
        mine[...] = value
    else:
        return False
    return True


class _Pickler(pickle.Pickler):
    """Refuses parts of a model: a copy of them would be another model."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, _OF_MODEL):
            raise pickle.PicklingError(f"{type(value).__name__} is a part of a model")


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


def digest(value: Any) -> bytes | None:
    """Return a hash of the value, or None if it cannot be pickled."""
    found = hashlib.sha256()
    file = io.BytesIO()
    try:
        buffers: list[pickle.PickleBuffer] = []
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        for buffer in buffers:
            found.update(buffer.raw())
    except Exception:
        return None
    found.update(file.getvalue())
    return found.digest()


@functools.cache
def _warn(name: str, why: str) -> None:
    log.warning(
        "%s stays on rank 0, where callbacks run: it cannot be pickled (%s). Other ranks "
        "that read it have what they had before the training",
        name,
        why,
    )
