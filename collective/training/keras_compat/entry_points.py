"""Finds every reference to a function of Keras, so that it can be replaced.

Keras' own files import many functions by name, so a function is replaced in every module
that refers to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.callbacks import callback_list
from keras.src.utils import file_utils
from tensorflow.python.checkpoint import checkpoint_management, functional_saver

# Keras' functions and methods that write, each with its parameter for the path.
_SAVERS = (
    (keras.saving, "save_model", "filepath"),
    (keras.saving, "save_weights", "filepath"),  # not in old versions
    (keras.utils, "plot_model", "to_file"),
    (keras.utils, "save_img", "path"),
    (keras.Model, "save", "filepath"),
    (keras.Model, "save_weights", "filepath"),
    (keras.Model, "export", "filepath"),
    (keras.export.ExportArchive, "write_out", "filepath"),
)


def savers() -> list[tuple[Any, str, str]]:
    """Return the functions that write files: owner, name, and parameter for the path."""
    return [saver for saver in _SAVERS if hasattr(*saver[:2])]


def checkpoint_writer() -> type[Any]:
    """Return the class whose method ``save`` writes the files of ``tf.train.Checkpoint``."""
    return functional_saver.MultiDeviceSaver


def checkpoint_deleter() -> tuple[ModuleType, str]:
    """Return module and name of the function by which ``CheckpointManager`` deletes files."""
    return checkpoint_management, "_delete_file_if_exists"


def get_file() -> Callable[..., Any]:
    """Return Keras' function that downloads a file."""
    return file_utils.get_file


def is_of_keras(file: str) -> bool:
    """Return whether a file is one of Keras."""
    return file.startswith(os.path.join(os.path.dirname(keras.__file__), ""))


def in_callback(frame: FrameType | None) -> bool:
    """Return whether a method of a callback runs: Keras' list of callbacks called it."""
    while frame is not None:
        if frame.f_code.co_filename == callback_list.__file__:
            return True
        frame = frame.f_back
    return False


def callbacks_that_run() -> Iterator[keras.callbacks.Callback]:
    """Yield the callbacks of which a method runs now, in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller, owner = frame.f_back, frame.f_locals.get("self")
        is_called = caller is not None and (
            caller.f_code.co_filename == callback_list.__file__
        )
        if is_called and isinstance(owner, keras.callbacks.Callback):
            yield owner
        frame = caller


def places_of(function: Callable[..., Any]) -> list[tuple[ModuleType, str]]:
    """Return every module of Keras that refers to a function, each with the name it uses."""
    return [
        (module, name)
        for of, module in list(sys.modules.items())
        if of.split(".")[0] in ("keras", "tensorflow")
        and isinstance(module, ModuleType)
        for name, value in list(vars(module).items())
        if value is function
    ]


def global_seed() -> int | None:
    """Return the last argument of ``keras.utils.set_random_seed``, or None without a call."""
    return global_state.get_global_attribute("global_random_seed")
