"""The functions that ``keras.distribution`` calls, and the distribution of a script.

Keras' TensorFlow backend lists the devices of one process, and ignores distributions: a
script's ``DataParallel`` does nothing there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import keras
from keras.src.distribution import distribution_lib


def backend_module(
    functions: Mapping[str, Callable[..., Any]],
) -> tuple[ModuleType, str, ModuleType]:
    """Make a module that can replace the one which ``keras.distribution`` asks for devices.

    Args:
        functions: Functions of the new module, in addition to, or in place of, Keras' own.

    Returns:
        The module of Keras that refers to its own module, the name by which it does so,
        and the new module.
    """
    stock = distribution_lib.distribution_lib
    module = ModuleType(stock.__name__)
    module.__dict__.update(vars(stock), **functions)
    return distribution_lib, "distribution_lib", module


def distribution_class() -> type[Any]:
    """Return the class from which ``DataParallel`` and ``ModelParallel`` derive."""
    return distribution_lib.Distribution


def current_distribution() -> Any:
    """Return the distribution that the script has set, or None."""
    return keras.distribution.distribution()


def distribution_ignored() -> bool:
    """Return whether a script has set a distribution that nothing looks at."""
    # Only the module from ``backend_module`` has this function.
    known = hasattr(distribution_lib.distribution_lib, "num_processes")
    return current_distribution() is not None and not known


def layout_map_of(distribution: Any) -> Any:
    """Return the ``LayoutMap`` of a ``ModelParallel``, or None of another distribution."""
    if isinstance(distribution, keras.distribution.ModelParallel):
        return distribution._layout_map
    return None
