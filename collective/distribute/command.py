"""Runs an unedited Keras script on every rank of a job.

collectiverun -np 4 --keras script.py
mpirun -np 4 python -m collective.distribute script.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from collective import recorder, requirements, streams
from collective.backends.factory import check_name
from collective.backends.quiet import quiet
from collective.command_parser import Parser
from collective.elastic.membership_file import count_exited
from collective.environment import detect, detect_rank, gpus
from collective.errors import CollectiveError, ProcessExit, UsageError
from collective.launch.options import OF_A_SCRIPT, add_options
from collective.launch.output import print_message
from collective.streams import open_streams

if TYPE_CHECKING:
    from collective.distribute.unedited import Distribution
    from collective.training.unedited.script import Script

PROGRAM = "python -m collective.distribute"
EXAMPLE = f"{PROGRAM} script.py"
_HASH_SEED = "PYTHONHASHSEED"
_OWN_ERROR_SECONDS = 5.0  # after these, a rank other than 0 prints its error, too


def parser() -> argparse.ArgumentParser:
    """Return the parser; arguments after the script belong to the script."""
    p = Parser(
        PROGRAM,
        usage="%(prog)s [options] script.py [argument ...]",
        description=__doc__,
        allow_abbrev=False,
    )
    add = p.add_argument
    add_options(p, OF_A_SCRIPT)
    add("--devices", type=int, metavar="N", help="local devices (tf-mirrored)")
    add("--threads", type=int, metavar="N", help="threads of each process")
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE",
        help="a module in place of the script")  # fmt: skip
    add("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code.

    It is the script's exit code: the argument of ``sys.exit``, or 1 after an exception;
    2 for wrong use; 130 after an interruption.
    """
    open_streams()
    try:
        place = detect_rank()
        args = parser().parse_args(argv)
        if place.size > 1 or args.resume:
            _same_hashes()
        os.environ.update(
            gpus.gpu_variables(place)
        )  # the script may take "the first GPU"
        if args.explain:
            os.environ["COLLECTIVE_EXPLAIN"] = "1"
        # Before TensorFlow is loaded, which takes seconds.
        what = _what(args)
        check_name(args.backend or "auto")
        with requirements.explain_missing(), quiet():
            from collective.training.unedited.script import Script

            script = Script(*what)
            distribution = _distribute(args)
    except CollectiveError as error:
        if not error.everywhere or not _ends_with_rank_zero(_rank()):
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return _run(script, distribution)


def _rank() -> int:
    """Return this process' rank, or 0 if the launcher's variables are wrong."""
    with contextlib.suppress(CollectiveError):
        return detect().rank
    return 0


def _same_hashes() -> None:
    """Start this process again if sets of strings would differ between ranks, or runs."""
    if _HASH_SEED not in os.environ:
        os.environ[_HASH_SEED] = "0"
        os.execv(sys.executable, sys.orig_argv)


def _what(args: argparse.Namespace) -> tuple[str, str, list[str]]:
    """Return path, module, and arguments of the script."""
    if args.module:
        _check_module(args.module[0])
        return "", args.module[0], args.module[1:]
    if not args.command or args.module is not None:
        raise UsageError("which script?", hint=EXAMPLE)
    if not os.path.isfile(args.command[0]):
        raise UsageError(
            f"cannot read the script {args.command[0]!r}",
            hint="the path of a Python file",
        )
    return args.command[0], "", args.command[1:]


def _check_module(module: str) -> None:
    """Refuse a module whose first package does not exist."""
    first = module.split(".")[0]
    path = [os.getcwd(), *sys.path]
    if first in sys.modules or first in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(first, path) is None:
        raise UsageError(f"no module named {module}", hint="its name, as in import")


def _distribute(args: argparse.Namespace) -> Distribution:
    from collective import backends
    from collective.distribute.unedited import distribute_keras

    return distribute_keras(
        args.backend or "auto",
        options=backends.Options(devices=args.devices, threads=args.threads),
        output=args.output or "rank0",
        loops=args.loops,
        resume=args.resume,
        dry_run=args.dry_run,
        **{setting.name: setting.value for setting in args.set},
    )


def _run(script: Script, distribution: Distribution) -> int:
    """Run the script; a rank that fails ends the job."""
    from collective.training.process import interrupts
    from collective.training.unedited.script import print_failure
    from collective.training.unedited.script_job import INPUT, REMOVE, SAVE

    backend = distribution.job.backend
    if backend.size > 1 and backend.rank == 0:
        print_message(
            f"{script.path} on {backend.size} processes, backend {backend.name}"
        )
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run_to_end(script, distribution)
    except SystemExit as error:
        ends_alone = isinstance(error, ProcessExit) or error.code in (None, 0)
        if backend.size == 1 or ends_alone:
            raise
        code = error.code if isinstance(error.code, int) else 1
        return _end(code, distribution, functools.partial(_print_exit, error))
    except KeyboardInterrupt as error:
        recorder.close()
        if backend.rank == 0:
            print_failure(error)
        if backend.size > 1:  # TensorFlow's threads must not outlive Python
            if backend.rank and interrupts.agreed():
                streams.flush()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                while True:  # until rank 0 has ended, and with it the job
                    signal.pause()
            backend.abort(interrupts.INTERRUPTED)
        return interrupts.INTERRUPTED
    except BaseException as error:
        return _failed(error, distribution)
    job = distribution.job
    reported = job.used - {INPUT, REMOVE, SAVE}
    if backend.size > 1 and backend.rank == 0 and not reported:
        print_message(
            f"the script called no fit, evaluate or predict of a Keras model: each of "
            f"the {backend.size} processes has run all of it"
        )
    return 0


def _run_to_end(script: Script, distribution: Distribution) -> None:
    job = distribution.job

    def end() -> None:
        for action in job.before_end:
            action()
        job.units.end_script()

    try:
        script.run()
    except SystemExit as error:
        if not isinstance(error, ProcessExit) and error.code in (None, 0):
            end()
        raise
    end()


def _failed(error: BaseException, distribution: Distribution) -> int:
    """Print an error of the script, once if all ranks have it, and end the job."""
    from collective.training.unedited.script import print_failure

    code = error.exit_code if isinstance(error, CollectiveError) else 1
    if isinstance(error, CollectiveError) and error.everywhere:
        if not _ends_with_rank_zero(distribution.job.backend.rank):
            print_failure(error)
        return code
    return _end(code, distribution, functools.partial(print_failure, error))


def _print_exit(error: SystemExit) -> None:
    """Print what Python prints for ``sys.exit("text")``."""
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr, flush=True)


def _end(code: int, distribution: Distribution, show: Callable[[], None]) -> int:
    """End the job from this rank: other ranks may be in the middle of the script.

    If they are not, they come here, too, and rank 0 ends the job in the meantime.
    """
    backend = distribution.job.backend
    recorder.close()  # a script error needs no dump
    _ends_with_rank_zero(backend.rank)
    show()
    if backend.size > 1:
        backend.abort(code)
    return code


def _ends_with_rank_zero(rank: int) -> bool:
    """Give rank 0 time to print the error: the job ends then, and this rank with it.

    In an elastic job this rank must end by itself, once another one has.

    Returns:
        Whether another rank has ended. If not, this rank alone may have the error.
    """
    if not rank:
        return False
    streams.flush()
    until, before = time.monotonic() + _OWN_ERROR_SECONDS, count_exited()
    while time.monotonic() < until:
        if count_exited() != before:
            return True
        time.sleep(0.05)
    return False
