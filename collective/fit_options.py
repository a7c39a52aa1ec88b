"""The options of a training in addition to Keras' own: one record.

The keywords of ``collective.fit`` (a test compares them), the options of ``train.py``,
and ``--set`` of unedited scripts are made from it. It imports no TensorFlow, so that a
command line can be read without TensorFlow.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from collective.errors import UsageError

#: How each output names a training with a communication hook.
NOT_EQUAL = "not equal to one process"


def count(text: str) -> int:
    """Read an option that counts things: a whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def count_or_zero(text: str) -> int:
    """Read a whole number as ``count`` does, from 0 up."""
    return 0 if text == "0" else count(text)


def seed(text: str) -> int:
    """Read a seed: a whole number below 2**32."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number below 2**32")
    return int(text)


def _option(group: str, help: str, start: Any, **parsing: Any) -> Any:
    """Return a field that also holds how ``train.py`` reads it."""
    if start is False and not parsing:
        parsing["action"] = "store_true"
    else:
        parsing = {"default": start} | parsing
    about = {"group": group, "help": help, "parsing": parsing}
    return dataclasses.field(default=start, metadata=about)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The arguments of ``collective.fit`` in addition to Keras'."""

    accumulate: int = _option(
        "training",
        "cut each update into K micro-batches, to save memory",
        1,
        type=count,
        metavar="K",
    )
    virtual_replicas: int | None = _option(
        "training",
        "cut each update into V pieces: the same bits on 1 to V replicas\n"
        "(docs/explanation/virtual-replicas.md)",
        None,
        type=count,
        metavar="V",
    )
    steps: int | None = _option(
        "training", "updates in all, instead of epochs", None, type=count, metavar="N"
    )
    shard_optimizer: bool = _option(
        "training", "each rank keeps a part of the optimizer's state only", False
    )
    shard_weights: bool = _option(
        "training",
        "each rank keeps a part of weights, gradients and optimizer state only",
        False,
    )
    hook: str | Any = _option(  # noqa: RUF009
        "training",
        "compress gradients: powersgd:RANK. Fewer bytes; not equal to one process\n"
        "(docs/how-to/compression.md)",
        None,
        metavar="NAME",
    )
    jit_compile: bool | None = _option(
        "training",
        "accepted, without effect: XLA compiles no step that sums over ranks",
        None,
        action="store_true",
    )
    per_replica: bool | str = _option(
        "training",
        "each replica trains on its rows as a batch of their own; not the model of one\n"
        "process",
        False,
    )
    verify: bool | str = _option(
        "training",
        "make the first K steps (10) by Keras, too, and show what differs",
        False,
        nargs="?",
        const="run",
        metavar="run:K",
    )
    seed: int | None = _option(
        "numbers",
        "of weights, order and random layers (default: 0)",
        None,
        type=seed,
        default=0,
    )
    terminate_on_nan: bool = _option(
        "numbers",
        "end the training before a step whose loss or gradient is not finite",
        False,
    )
    check_every: int = _option(
        "numbers",
        "compare all replicas' weights by checksum every K steps\n"
        "(default: 100; 0: never)",
        100,
        type=count_or_zero,
        metavar="K",
    )
    timeline: str | None = _option(
        "numbers",
        "write a Chrome trace of what every rank did when",
        None,
        metavar="FILE",
    )

    @property
    def features(self) -> set[str]:
        """Return the names, in the table of compatibility, of the features that are on."""
        on = {
            "accumulate": self.accumulate > 1,
            "virtual_replicas": self.virtual_replicas is not None,
            "shard_optimizer": self.shard_optimizer,
            "shard_weights": self.shard_weights,
            "per_replica": self.per_replica,
            "hook": self.hook is not None,
        }
        return {name for name, is_on in on.items() if is_on}


#: Names of all options.
NAMES = tuple(field.name for field in dataclasses.fields(FitOptions))
#: The names of options whose value may be a word.
WORDS = tuple(f.name for f in dataclasses.fields(FitOptions) if "str" in str(f.type))


#: The options of unedited scripts: these, and the files that ``collective.fit`` writes.
SETTABLE = (*NAMES, "checkpoint", "global_batch_size", "ledger", "tensor_parallel")


def check_names(names: Iterable[str]) -> None:
    """Refuse a name that is no option of ``collective.fit`` or ``model.fit``."""
    for name in names:
        if name not in SETTABLE:
            close = difflib.get_close_matches(name, SETTABLE, 1)
            raise UsageError(
                f"collective.fit has no option {name!r}, nor has Keras",
                hint=f"did you mean {close[0]}?" if close else " | ".join(SETTABLE),
            )


@dataclass(frozen=True)
class Setting:
    """An option of ``collective.fit`` that ``--set NAME=VALUE`` sets."""

    name: str
    value: object
    text: str  # as it was typed

    @classmethod
    def of(cls, text: str) -> Setting:
        """Read one setting.

        Raises:
            UsageError: There is no such option, or the value is not a Python literal.
        """
        name, _, word = text.partition("=")
        check_names([name])
        try:
            return cls(name, ast.literal_eval(word), text)
        except (ValueError, SyntaxError):
            if name in WORDS:
                return cls(name, word, text)
            raise UsageError(
                f"--set {text}: {word!r} is not a value of Python",
                hint="--set accumulate=4",
            ) from None

    def __str__(self) -> str:
        return self.text


def add_arguments(group: str, add: Callable[..., argparse.Action]) -> None:
    """Add the options of one group to a parser."""
    for field in dataclasses.fields(FitOptions):
        about = field.metadata
        name = field.name.replace("_", "-")
        if about["group"] == group:
            add(f"--{name}", dest=field.name, help=about["help"], **about["parsing"])
