"""The signatures of Horovod's public functions, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MODULES = {
    "tensorflow/__init__.py": "collective.tensorflow",
    "tensorflow/mpi_ops.py": "collective.tensorflow.mpi_ops",
    "tensorflow/functions.py": "collective.tensorflow.functions",
    "tensorflow/util.py": "collective.tensorflow.util",
    "tensorflow/gradient_aggregation.py": "collective.tensorflow.gradient_aggregation",
    "tensorflow/elastic.py": "collective.tensorflow.elastic",
    "tensorflow/keras/__init__.py": "collective.tensorflow.keras",
    "tensorflow/keras/callbacks.py": "collective.tensorflow.keras.callbacks",
    "tensorflow/keras/elastic.py": "collective.tensorflow.keras.elastic",
    "keras/__init__.py": "collective.keras",
    "keras/callbacks.py": "collective.keras.callbacks",
    "keras/elastic.py": "collective.keras.elastic",
    "common/elastic.py": "collective.common.elastic",
    "common/exceptions.py": "collective.common.exceptions",
    "common/process_sets.py": "collective.common.process_sets",
    "common/util.py": "collective.common.util",
    "runner/__init__.py": "collective.runner",
}
# Functions of Horovod's own extension or driver, which scripts do not call.
INTERNAL = {
    "check_installed_version",
    "get_average_backwards_compatibility_fun",
    "get_ext_suffix",
    "get_extension_full_path",
    "run_fn",
    "init",  # mpi_ops takes *args, and passes them on
}


def read(checkout: Path) -> Iterator[str]:
    """Yield a line for each function: our module, name, parameters with defaults."""
    for file, module in MODULES.items():
        tree = ast.parse((checkout / "horovod" / file).read_text())
        for name, function in _functions(tree.body):
            if name not in INTERNAL:
                yield " ".join([module, name, *_parameters(function)])


def _functions(body: list[ast.stmt]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for name, function in _functions(node.body):
                yield f"{node.name}.{name}", function
        elif isinstance(node, ast.FunctionDef) and (
            node.name == "__init__" or not node.name.startswith("_")
        ):
            yield node.name, node


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [a.arg for a in arguments.args]
    defaults = [ast.unparse(d) for d in arguments.defaults]
    bare = len(names) - len(defaults)
    found = names[:bare]
    found += [f"{n}={d}" for n, d in zip(names[bare:], defaults, strict=True)]
    return [] if arguments.vararg else found
