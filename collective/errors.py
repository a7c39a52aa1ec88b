"""Errors a user can act on: what happened, where, and a HINT with what to type.

An error that every rank raises alike (a bad option, a missing file) is printed once, by
rank 0; an error of a single rank is printed by that rank. The exit code is 2 for wrong
use and 1 for a run that failed.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable
from typing import Any

from collective.installation import with_addresses


def printable(text: str) -> str:
    r"""Return a text that cannot control a terminal: its names may come from anywhere.

    Control characters but newline and tab, and those that change the direction of
    writing, are escaped as in a Python literal: ``\x1b``.
    """
    return "".join(
        letter
        if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cf", "Cs")
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, for use in a message."""
    return str(error).strip().split("\n")[0]


class CollectiveError(Exception):
    """A failure with a remedy.

    Args:
        message: What happened, in one sentence, naming rank, step or file.
        hint: What to type or change; printed after ``HINT:``.
        exit_code: Exit code of the process; by default the class'.
        everywhere: True when every rank raises the same error, so that only rank 0
            needs to print it.

    Attributes:
        rank: The rank that raised it, if that rank has changed since the launch.
    """

    exit_code = 1
    rank: int | None = None

    def __init__(
        self,
        message: str,
        *,
        hint: str,
        exit_code: int | None = None,
        everywhere: bool = True,
    ):
        self.message = printable(message)
        self.hint = with_addresses(printable(hint))
        super().__init__(self.message)
        self.everywhere = everywhere
        if exit_code is not None:
            self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.message}\nHINT: {self.hint}"

    def __reduce__(self) -> Any:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[CollectiveError], args: Any, state: Any) -> CollectiveError:
    """Return an error that was pickled, without the arguments that its class needs."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(CollectiveError, ValueError):
    """The user asked for something impossible: exit code 2, nothing was started.

    A ``ValueError``, as Keras raises for the same: scripts that catch it continue.
    """

    exit_code = 2


class ProcessExit(SystemExit):
    """The job does not need this process any more, which ends with an exit code.

    This is a subclass of ``SystemExit`` because the launcher also reads the exit code
    of a user's own script that calls ``collective.fit`` and knows of no job. Python
    ends it with this code and without a traceback, ``finally`` blocks run, and an
    ``except Exception`` around ``fit`` does not keep a rank alive that has left its
    job.
    """

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


class LeaveJob(ProcessExit):
    """This rank has left an elastic job, which continues without it."""

    def __init__(self) -> None:
        super().__init__(0)


class NextGeneration(ProcessExit):
    """Every rank ends, and the launcher starts the job's next generation."""


class JoinRejected(ProcessExit):
    """This process cannot join the job; the error is printed, the job continues."""


class EndedByAnotherRank(ProcessExit):
    """Another rank has ended the job and printed why."""


def exit_code(program: Callable[[], int]) -> int:
    """Run a program, print its ``CollectiveError`` if any; return its exit code."""
    try:
        return program()
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
