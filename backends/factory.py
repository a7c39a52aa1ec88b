"""Makes the backend that the user names, or the one that ``auto`` chooses."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
from typing import Any

from collective import recorder, session
from collective.backends.auto import Choice, choose
from collective.backends.base import Backend, script_path
from collective.backends.options import Options
from collective.backends.registry import BACKENDS, refuse_foreign_options
from collective.environment import detect_rank
from collective.environment.base import MAX_NP, MIN_NP
from collective.errors import CollectiveError, UsageError


def check_name(name: str) -> None:
    """Raise a UsageError if no backend has this name; load none."""
    if name != "auto" and name not in BACKENDS:
        close = difflib.get_close_matches(name, ["auto", *BACKENDS], 1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"unknown backend {name!r}", hint=f"{meant}one of: {', '.join(BACKENDS)}"
        )


def check_unedited(kind: type[Backend], size: int) -> None:
    """Raise a UsageError if no unedited script can train by a backend of this kind.

    Args:
        size: The number of ranks, for the hint.
    """
    if not kind.synchronous:
        raise UsageError(
            f"an unedited script does not work with backend {kind.name!r}: not every rank "
            "runs the script, and no two workers share a batch",
            hint=f"collectiverun -np {max(size, 2)} --keras {script_path()}; or call "
            "collective.fit in the script (docs/how-to/parameter-servers.md)",
        )


def get(name: str = "auto", options: Options | None = None) -> Backend:
    """Make a backend. Call it before the first TensorFlow operation.

    Args:
        name: One of ``BACKENDS``, or ``auto``.
        options: Devices, threads, communication.

    Raises:
        UsageError: The backend is unknown or unusable here, or an option belongs to
            another backend; the error says why and what to type.
    """
    options = with_launcher_options(options or Options())
    environment = detect_rank()
    if options.min_np is not None and session.is_initialized():
        # Ranks may have left or joined since the start.
        environment = session.launch_info()
    choice = Choice(name, "asked for")
    if name == "auto":
        choice = choose(environment, options)
        name = choice.name
    check_name(name)
    refuse_foreign_options(name, options)
    kind = BACKENDS[name]
    found = kind.availability(environment.current)
    if not found.usable:
        raise UsageError(
            f"backend {name!r} cannot be used here: {found.reason}", hint=found.hint
        )
    backend = kind(options, environment)
    backend.chosen_because = choice.because
    # Ranks of an asynchronous backend do not wait for each other, so the recorder would
    # take every pause for a stall. If the core is initialized, it has started the
    # recorder.
    if backend.synchronous and not session.is_initialized():
        with contextlib.suppress(CollectiveError):  # a job without a name
            recorder.start(environment, session.job_name(environment))
    return backend


def with_launcher_options(options: Options) -> Options:
    """Return the options; ``collectiverun``'s fill all that the user did not set."""
    given: dict[str, Any] = {
        name: int(os.environ[variable])
        for name, variable in (("min_np", MIN_NP), ("max_np", MAX_NP))
        if os.environ.get(variable) and getattr(options, name) is None
    }
    return dataclasses.replace(options, **given)
