"""Errors in the words of the caller: arguments for ``fit``, options for ``train.py``.

Messages and hints are written with the options of ``train.py``. A caller of
``collective.fit`` has typed none of them, so the options become arguments there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from collective.errors import CollectiveError

_ARGUMENTS = {
    "--accumulate": "accumulate={}",
    "--check-every": "check_every={}",
    "--checkpoint-dir": "checkpoint=Checkpoint(folder)",
    "--checkpoint-every": "Checkpoint(folder, every={})",
    "--data": "data set",
    "--epochs": "epochs={}",
    "--global-batch-size": "batch_size={}",
    "--global-clipnorm": "global_clipnorm={} of the optimizer",
    "--jit-compile": "jit_compile=True",
    "--learning-rate": "the optimizer's learning_rate",
    "--ledger": "ledger={}",
    "--precision": "keras.config.set_dtype_policy({})",
    "--resume": "Checkpoint(folder, resume=True)",
    "--shard-optimizer": "shard_optimizer=True",
    "--steps": "steps={}",
    "--timeline": "timeline={}",
    "--virtual-replicas": "virtual_replicas={}",
}
_OPTION = re.compile(
    f"({'|'.join(sorted(_ARGUMENTS, key=len, reverse=True))})"
    r"(?![a-z-])(?: (\d[\w.]*|[A-Z]+\b|float32|mixed_bfloat16))?"
)
_of_a_command: list[bool] = []


def in_arguments(text: str) -> str:
    """Return a message with arguments of ``fit`` in place of options of ``train.py``."""

    def argument(found: re.Match[str]) -> str:
        template, value = _ARGUMENTS[found[1]], found[2]
        if value is None:
            return template.removesuffix("={}").format("")
        return template.format(value)

    return _OPTION.sub(argument, text)


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """Leave the options in errors, because a command line is running."""
    _of_a_command.append(True)
    try:
        yield
    finally:
        _of_a_command.pop()


@contextlib.contextmanager
def arguments_named() -> Iterator[None]:
    """Name arguments in errors, unless a command line is running."""
    try:
        yield
    except CollectiveError as error:
        if not _of_a_command:
            error.message = in_arguments(error.message)
            error.hint = in_arguments(error.hint)
        raise
