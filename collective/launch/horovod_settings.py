"""horovodrun's options that become variables of the ranks, and its YAML file of them.

One table serves both. A variable that the native core reads under a name of its own is set
under both names.
"""

from __future__ import annotations

import argparse
import math
import os
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from collective.environment import Environment
from collective.environment.base import SETS_HOROVOD_RANK
from collective.errors import UsageError
from collective.launch.output import print_message

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_NEVER = "1000000000"
_MOST_CHARACTERS = 1 << 16  # of a YAML file, which takes a second


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _megabytes(value: Any) -> str:
    return str(int(value) * 1024 * 1024)


def _opposite(value: Any) -> str:
    return _text(not value)


# The prefix of an option's key, by section; for others it is the section's name.
_PREFIXES = {"params": "", "library_options": "", "logging": "log_"}


@dataclass(frozen=True)
class Setting:
    """An option and its variable."""

    section: str  # section of the YAML file
    key: str
    variable: str  # name that the ranks read
    kind: Callable[[str], Any]  # type of the value; bool for a switch
    text: Callable[[Any], str] = _text  # turns the value into the variable's text

    @property
    def dest(self) -> str:
        """Return the name of its attribute among the options."""
        if self.key == "enabled":
            return self.section
        return _PREFIXES.get(self.section, f"{self.section}_") + self.key

    @property
    def option(self) -> str:
        """Return the option as typed on the command line."""
        return f"--{self.dest.replace('_', '-')}"


SETTINGS = (
    Setting("params", "fusion_threshold_mb",
            "HOROVOD_FUSION_THRESHOLD", int, _megabytes),
    Setting("params", "cycle_time_ms", "HOROVOD_CYCLE_TIME", float),
    Setting("params", "cache_capacity", "HOROVOD_CACHE_CAPACITY", int),
    Setting("params", "hierarchical_allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", bool),
    Setting("params", "hierarchical_allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", bool),
    Setting("params", "torus_allreduce", "HOROVOD_TORUS_ALLREDUCE", bool),
    Setting("autotune", "enabled", "HOROVOD_AUTOTUNE", bool),
    Setting("autotune", "log_file", "HOROVOD_AUTOTUNE_LOG", str),
    Setting("autotune", "warmup_samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int),
    Setting("autotune", "steps_per_sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int),
    Setting("autotune", "bayes_opt_max_samples",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int),
    Setting("autotune", "gaussian_process_noise",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float),
    Setting("timeline", "filename", "HOROVOD_TIMELINE", str),
    Setting("timeline", "mark_cycles", "HOROVOD_TIMELINE_MARK_CYCLES", bool),
    Setting("stall_check", "enabled", "HOROVOD_STALL_CHECK_DISABLE", bool, _opposite),
    Setting("stall_check", "warning_time_seconds",
            "HOROVOD_STALL_CHECK_TIME_SECONDS", int),
    Setting("stall_check", "shutdown_time_seconds",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", int),
    Setting("library_options", "mpi_threads_disable",
            "HOROVOD_MPI_THREADS_DISABLE", bool),
    Setting("library_options", "num_nccl_streams", "HOROVOD_NUM_NCCL_STREAMS", int),
    Setting("library_options", "thread_affinity", "HOROVOD_THREAD_AFFINITY", int),
    Setting("library_options", "gloo_timeout_seconds",
            "HOROVOD_GLOO_TIMEOUT_SECONDS", int),
    Setting("logging", "level", "HOROVOD_LOG_LEVEL", str),
    Setting("logging", "with_timestamp", "HOROVOD_LOG_HIDE_TIME", bool, _opposite),
)  # fmt: skip
_BY_KEY = {(setting.section, setting.key): setting for setting in SETTINGS}


def place(environment: Environment) -> dict[str, str]:
    """Return variables with a rank's numbers in the job, as ``horovodrun --gloo`` sets them.

    The last entry says that the launcher set the numbers, so that a rank which mpirun
    started is not taken for a rank of horovodrun.
    """
    known = {
        "RANK": environment.rank,
        "SIZE": environment.size,
        "LOCAL_RANK": environment.local_rank,
        "LOCAL_SIZE": environment.local_size,
        "CROSS_RANK": environment.cross_rank,
        "CROSS_SIZE": environment.cross_size,
    }
    numbers = {f"HOROVOD_{name}": str(number) for name, number in known.items()}
    return {**numbers, SETS_HOROVOD_RANK: "1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all settings to a parser, under horovodrun's names."""
    add = parser.add_argument_group("variables of the ranks, as horovodrun's").add_argument  # fmt: skip
    for setting in SETTINGS:
        if setting.dest == "log_with_timestamp":
            for option in ("--log-with-timestamp", "--no-log-hide-timestamp"):
                add(option, dest=setting.dest, action="store_const", const=True,
                    help=argparse.SUPPRESS)  # fmt: skip
            for option in ("--log-without-timestamp", "--log-hide-timestamp"):
                add(option, dest=setting.dest, action="store_const", const=False,
                    help=argparse.SUPPRESS)  # fmt: skip
        elif setting.kind is bool:
            switch = argparse.BooleanOptionalAction
            add(setting.option, action=switch, help=argparse.SUPPRESS)
        else:
            choices = LOG_LEVELS if setting.dest == "log_level" else None
            add(setting.option, type=setting.kind, choices=choices,
                metavar="X", help=f"sets {setting.variable}")  # fmt: skip


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables of the ranks that the typed options stand for.

    Raises:
        UsageError: For a negative number.
    """
    found: dict[str, str] = {}
    for setting in SETTINGS:
        value = getattr(options, setting.dest)
        if value is None:
            continue
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise UsageError(
                f"{setting.option} {value}: negative, or no number",
                hint=f"{setting.option} 1",
            )
        found[setting.variable] = setting.text(value)
    warning = options.stall_check_warning_time_seconds
    if options.stall_check is False:
        found["COLLECTIVE_STALL_SECONDS"] = _NEVER
    elif warning:
        found["COLLECTIVE_STALL_SECONDS"] = str(warning)
    if options.stall_check_shutdown_time_seconds:
        found["COLLECTIVE_TIMEOUT"] = str(options.stall_check_shutdown_time_seconds)
    if options.start_timeout is not None:
        found["COLLECTIVE_START_TIMEOUT"] = str(options.start_timeout)
        found["HOROVOD_START_TIMEOUT"] = str(options.start_timeout)
    if options.nics:
        found["COLLECTIVE_INTERFACES"] = ",".join(options.nics)
        found["NCCL_SOCKET_IFNAME"] = ",".join(options.nics)
        found["HOROVOD_GLOO_IFACE"] = options.nics[0]
    return found


def read_config(file: str, options: argparse.Namespace) -> None:
    """Fill in options that were not typed from horovodrun's YAML file.

    Raises:
        UsageError: If it cannot be read, or a value is not of its setting's type.
            A setting that horovodrun does not know gives a warning.
    """
    import yaml  # takes time, so not at every start of the launcher

    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise ValueError(f"it has over {_MOST_CHARACTERS} characters")
        config = yaml.safe_load(text) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {file}: {error}", hint="--config-file FILE.yaml"
        ) from None
    except Exception as error:  # of any kind: `!!int ""` is an IndexError
        raise UsageError(
            f"{file} is not YAML: {' '.join(str(error).split())}",
            hint="params:\n  fusion_threshold_mb: 32",
        ) from None
    expected = "sections " + ", ".join(dict.fromkeys(s.section for s in SETTINGS))
    if not isinstance(config, dict):
        raise UsageError(f"{file} has no sections", hint=expected)
    controller = config.pop("controller", None)
    if controller is not None:
        if controller not in ("mpi", "gloo"):
            raise UsageError(
                f"{file}: unknown controller: {reprlib.repr(controller)}",
                hint="controller: mpi, or controller: gloo",
            )
        if not options.use_mpi and not options.use_gloo:
            options.use_mpi = controller == "mpi"
            options.use_gloo = controller == "gloo"
    for section, entries in config.items():
        if not isinstance(entries, dict):
            raise UsageError(f"{file}: {section!r} is not a section", hint=expected)
        for key, value in entries.items():
            setting = _BY_KEY.get((section, key))
            if setting is None:
                keys = ", ".join(s.key for s in SETTINGS if s.section == section)
                print_message(
                    f"{file}: {section}: {key} is ignored; known are {keys or expected}"
                )
            elif getattr(options, setting.dest) is None and value is not None:
                setattr(options, setting.dest, _typed(setting, value, file))


def _typed(setting: Setting, value: Any, file: str) -> Any:
    kind: Any = setting.kind
    # isinstance takes YAML's true for an int, and an int is valid for a float.
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise UsageError(
            f"{file}: {setting.section}: {setting.key}: {reprlib.repr(value)} is not "
            f"of type {kind.__name__}",
            hint=f"a value as {setting.option} takes it",
        )
    if isinstance(value, str) and not _fits_variable(value):
        raise UsageError(
            f"{file}: {setting.section}: {setting.key}: {reprlib.repr(value)} has "
            "characters that no variable of a process may have",
            hint="printable characters",
        )
    return value


def _fits_variable(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
