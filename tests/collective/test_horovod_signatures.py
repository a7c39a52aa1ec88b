"""Signatures equal Horovod 0.28.1's, so a call with positional arguments means the same.

The table was read from a checkout by ``python -m tests.horovod_conformance``, which also
compares this project with the checkout itself.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("horovod_signatures.txt")
# The form of defaults in the table.
SPELLED = {"<Op.Average: 1>": "Average", "NoneCompressor": "Compression.none"}


def cases():
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            module, name, *parameters = line.split()
            yield pytest.param(module, name, parameters, id=f"{module}.{name}")


@pytest.mark.parametrize("module, name, parameters", cases())
def test_signature(module, name, parameters):
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    ours = [spelled(p) for p in inspect.signature(found).parameters.values()]
    # Ours may have more arguments, after those of Horovod, and more defaults.
    first = [
        name.partition("=")[0] if "=" not in theirs else name
        for name, theirs in zip(ours, parameters, strict=False)
    ]
    assert first == parameters


def spelled(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return parameter.name
    default = parameter.default
    text = getattr(default, "__name__", None) or repr(default)
    if text.startswith("ProcessSet("):
        text = "global_process_set"
    return f"{parameter.name}={SPELLED.get(text, text)}"
