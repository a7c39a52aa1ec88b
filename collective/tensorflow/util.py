"""``horovod.tensorflow.util``: variables as keys of a dictionary."""

from __future__ import annotations

from typing import Any


def vars_to_refs(vars: Any) -> Any:
    """Return a hashable reference to a variable; for a list, a tuple of references."""
    if isinstance(vars, list):
        return tuple(vars_to_refs(variable) for variable in vars)
    return vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Undo ``vars_to_refs``."""
    if isinstance(refs, tuple):
        return [refs_to_vars(ref) for ref in refs]
    return refs.deref()
