"""horovodrun's options that become variables of the ranks, and its YAML file of them.

One table for both. What the native core reads under a name of its own is set under both
names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collective.environment import Environment
from collective.environment.base import SETS_HOROVOD_RANK
from collective.errors import UsageError
from collective.launch.output import print_message

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_NEVER = "1000000000"


def _flag(value: Any) -> str:
    return "1" if value else "0"


def _megabytes(value: Any) -> str:
    return str(int(value) * 1024 * 1024)


@dataclass(frozen=True)
class Setting:
    """An option and its variable.

    Attributes:
        option: Without the dashes; a switch also has its opposite, ``--no-OPTION``.
        variable: What the ranks see.
        kind: Type of its value; ``bool`` for a switch.
        section, key: Where the YAML file has it.
        text: Turns the value into the variable's text.
    """

    option: str
    variable: str
    kind: Callable[[str], Any]
    section: str
    key: str
    text: Callable[[Any], str] = str

    @property
    def dest(self) -> str:
        """Name of its attribute among the options."""
        return self.option.replace("-", "_")


SETTINGS = (
    Setting("fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", int,
            "params", "fusion_threshold_mb", _megabytes),
    Setting("cycle-time-ms", "HOROVOD_CYCLE_TIME", float, "params", "cycle_time_ms"),
    Setting("cache-capacity", "HOROVOD_CACHE_CAPACITY", int,
            "params", "cache_capacity"),
    Setting("hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", bool,
            "params", "hierarchical_allreduce", _flag),
    Setting("hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", bool,
            "params", "hierarchical_allgather", _flag),
    Setting("torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", bool,
            "params", "torus_allreduce", _flag),
    Setting("autotune", "HOROVOD_AUTOTUNE", bool, "autotune", "enabled", _flag),
    Setting("autotune-log-file", "HOROVOD_AUTOTUNE_LOG", str, "autotune", "log_file"),
    Setting("autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int,
            "autotune", "warmup_samples"),
    Setting("autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int,
            "autotune", "steps_per_sample"),
    Setting("autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            int, "autotune", "bayes_opt_max_samples"),
    Setting("autotune-gaussian-process-noise",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float,
            "autotune", "gaussian_process_noise"),
    Setting("timeline-filename", "HOROVOD_TIMELINE", str, "timeline", "filename"),
    Setting("timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", bool,
            "timeline", "mark_cycles", _flag),
    Setting("stall-check", "HOROVOD_STALL_CHECK_DISABLE", bool,
            "stall_check", "enabled", lambda on: _flag(not on)),
    Setting("stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS",
            int, "stall_check", "warning_time_seconds"),
    Setting("stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            int, "stall_check", "shutdown_time_seconds"),
    Setting("mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", bool,
            "library_options", "mpi_threads_disable", _flag),
    Setting("num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", int,
            "library_options", "num_nccl_streams"),
    Setting("thread-affinity", "HOROVOD_THREAD_AFFINITY", int,
            "library_options", "thread_affinity"),
    Setting("gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", int,
            "library_options", "gloo_timeout_seconds"),
    Setting("log-level", "HOROVOD_LOG_LEVEL", str, "logging", "level"),
    Setting("log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", bool,
            "logging", "with_timestamp", lambda on: _flag(not on)),
)  # fmt: skip
_BY_KEY = {(setting.section, setting.key): setting for setting in SETTINGS}


def place(environment: Environment) -> dict[str, str]:
    """A rank's place in the job, as ``horovodrun --gloo`` sets it.

    The last entry says that the numbers are the launcher's, so that a rank which mpirun
    started is not taken for one of horovodrun's.
    """
    across, hosts = environment.cross_rank, environment.cross_size
    known = {
        "RANK": environment.rank,
        "SIZE": environment.size,
        "LOCAL_RANK": environment.local_rank,
        "LOCAL_SIZE": environment.local_size,
        **({"CROSS_RANK": across, "CROSS_SIZE": hosts} if across >= 0 else {}),
    }
    numbers = {f"HOROVOD_{name}": str(number) for name, number in known.items()}
    return {**numbers, SETS_HOROVOD_RANK: "1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds them all, as horovodrun spells them."""
    add = parser.add_argument_group("variables of the ranks, as horovodrun's").add_argument  # fmt: skip
    for setting in SETTINGS:
        if setting.kind is bool:
            add(f"--{setting.option}", dest=setting.dest, action="store_const",
                const=True, help=argparse.SUPPRESS)  # fmt: skip
            opposite = setting.option.replace("log-with-", "log-without-")
            if opposite == setting.option:
                opposite = f"no-{setting.option}"
            add(f"--{opposite}", dest=setting.dest, action="store_const", const=False,
                help=argparse.SUPPRESS)  # fmt: skip
        else:
            choices = LOG_LEVELS if setting.option == "log-level" else None
            add(f"--{setting.option}", type=setting.kind, choices=choices,
                metavar="X", help=f"sets {setting.variable}")  # fmt: skip
    # The old spelling of the last one.
    for option, value in (("log-hide", False), ("no-log-hide", True)):
        add(f"--{option}-timestamp", dest="log_with_timestamp", action="store_const",
            const=value, help=argparse.SUPPRESS)  # fmt: skip
    parser.set_defaults(**{setting.dest: None for setting in SETTINGS})


def variables(options: argparse.Namespace) -> dict[str, str]:
    """The environment variables of the ranks that the typed options stand for.

    Raises:
        UsageError: For a negative number.
    """
    found: dict[str, str] = {}
    for setting in SETTINGS:
        value = getattr(options, setting.dest)
        if value is None:
            continue
        if isinstance(value, (int, float)) and value < 0:
            raise UsageError(
                f"--{setting.option} {value}: negative", hint=f"--{setting.option} 1"
            )
        found[setting.variable] = setting.text(value)
    if options.stall_check is False:
        found["COLLECTIVE_STALL_SECONDS"] = _NEVER
    elif options.stall_check_warning_time_seconds:
        found["COLLECTIVE_STALL_SECONDS"] = str(
            options.stall_check_warning_time_seconds
        )
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
    """Fills in, from horovodrun's YAML file, what was not typed.

    Raises:
        UsageError: If it cannot be read, or a value is not of its setting's type.
            A setting that horovodrun does not know gives a warning.
    """
    try:
        import yaml
    except ImportError:
        raise UsageError(
            "--config-file needs PyYAML", hint="pip install pyyaml"
        ) from None
    try:
        config = yaml.safe_load(Path(file).read_text()) or {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {file}: {error}", hint="--config-file FILE.yaml"
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
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
                f"{file}: unknown controller: {controller!r}",
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
                keys = [s.key for s in SETTINGS if s.section == section]
                known = (
                    f"known are {', '.join(keys)}" if keys else f"known are {expected}"
                )
                print_message(f"{file}: {section}: {key} is ignored; {known}")
                continue
            if getattr(options, setting.dest) is None and value is not None:
                setattr(options, setting.dest, _typed(setting, value, file))


def _typed(setting: Setting, value: Any, file: str) -> Any:
    kind: Any = setting.kind
    # isinstance would take YAML's true for an int; and an int will do for a float.
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise UsageError(
            f"{file}: {setting.section}: {setting.key}: {value!r} is not of type "
            f"{kind.__name__}",
            hint=f"a value as --{setting.option} takes it",
        )
    return value
