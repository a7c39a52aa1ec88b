"""Does something with a module right after it has been imported, and imports nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


@contextlib.contextmanager
def after_import(name: str, action: Callable[[ModuleType], None]) -> Iterator[None]:
    """Inside, call an action with a module once it has been imported; at once if it is."""
    if name in sys.modules:
        action(sys.modules[name])
        yield
        return
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.leave()


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, once."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self._name, self._action = name, action

    def leave(self) -> None:
        """Have Python ask the other finders only."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls the action in the end."""
        if name != self._name:
            return None
        self.leave()
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        stock = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            stock(module)
            self._action(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
