"""What ``keras.distribution`` asks its backend, and the distribution of a script.

Keras' TensorFlow backend lists the devices of one process, and looks at no distribution:
a script's ``DataParallel`` has no effect.
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
    """A module in the place of that which ``keras.distribution`` asks for devices.

    Args:
        functions: What it has beside, or in place of, those of Keras.

    Returns:
        Where Keras refers to its own: module and name; and the new one.
    """
    stock = distribution_lib.distribution_lib
    module = ModuleType(stock.__name__)
    module.__dict__.update(vars(stock), **functions)
    return distribution_lib, "distribution_lib", module


def distribution_class() -> type[Any]:
    """What ``DataParallel`` and ``ModelParallel`` derive from."""
    return distribution_lib.Distribution


def current_distribution() -> Any:
    """Returns the distribution that the script has set, or None."""
    return keras.distribution.distribution()


def distribution_ignored() -> bool:
    """Whether a script has set a distribution, and Keras alone would look at it."""
    # No Keras has it; ``backend_module`` has.
    known = hasattr(distribution_lib.distribution_lib, "num_processes")
    return current_distribution() is not None and not known


def layout_of(distribution: Any, path: str) -> tuple[str | None, ...] | None:
    """The axes that the ``LayoutMap`` of a ``ModelParallel`` gives a variable; or None."""
    layout = distribution._layout_map[path]
    return None if layout is None else tuple(layout.axes)


def axes_used(distribution: Any) -> set[str]:
    """The axes of the mesh that layouts of a ``ModelParallel`` name."""
    layouts = distribution._layout_map.values()
    return {axis for layout in layouts for axis in layout.axes if axis is not None}
