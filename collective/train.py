"""Trains a Keras model; gradients are summed by the backend you name.

python train.py
python train.py --backend tf-mirrored
mpirun -np 4 python train.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from collective import json_file, requirements
from collective.backends.quiet import quiet
from collective.command_parser import Parser
from collective.environment import detect_rank
from collective.errors import CollectiveError, ProcessExit, UsageError
from collective.fit_options import add_arguments, count
from collective.operations.kinds import ALGORITHMS, TRANSPORTS
from collective.streams import open_streams, outlive_readers

if TYPE_CHECKING:
    from collective.training import Checkpoint
    from collective.training.loop.summary import Summary


def parser() -> argparse.ArgumentParser:
    """Return the parser; each group of options has an example."""
    p = Parser("train.py", description=__doc__)
    p.help_command = "python train.py --help"

    def group(name: str, example: str) -> Callable[..., argparse.Action]:
        return p.add_argument_group(name, example).add_argument

    add = group("backend", "mpirun -np 4 python train.py --backend tf-multiworker")
    add("--backend", default="auto", help="who sums the gradients (default: auto)")
    add("--list-backends", action="store_true", help="which can be used here, and why")
    add("--devices", type=count, metavar="N",
        help="local devices (tf-mirrored, tf-central-storage)")  # fmt: skip
    add("--threads", type=count, metavar="N", help="threads of this process")
    add("--cross-device-ops", default="auto", metavar="OPS",
        help="auto | nccl | hierarchical-copy | reduction-to-one-device")  # fmt: skip
    add("--communication", default="auto", help="auto | ring | nccl (tf-multiworker)")
    add("--algorithm", default="auto", choices=ALGORITHMS, metavar="NAME",
        help=f"{' | '.join(ALGORITHMS)} (native)")  # fmt: skip
    add("--transport-dtype", choices=TRANSPORTS, metavar="DTYPE",
        help=f"{' | '.join(TRANSPORTS)}: gradients on their way (native)")  # fmt: skip
    add("--bucket-bytes", type=count, metavar="N",
        help="sum the gradients in buckets of about N bytes (default: "
        "4 MiB between hosts but with mpi, else one for all)")  # fmt: skip
    add("--parameter-servers", type=count, metavar="N",
        help="ranks that hold the variables (tf-parameter-server; default: 1)")  # fmt: skip
    add("--min-np", type=count, metavar="N",
        help="continue without ranks that die while N are left (native, mpi)")  # fmt: skip
    add("--tensor-parallel", type=count, default=1, metavar="T",
        help="ranks that share rows, and of which each has a part of the weights\n"
        "(native, mpi; docs/how-to/parallel.md)")  # fmt: skip
    add("--model-parallel", type=_model_parallel, help=argparse.SUPPRESS)

    add = group(
        "model and data", "python train.py --model resnet50 --data synthetic:64x64x3:10"
    )
    add("--model", default="cnn", metavar="NAME",
        help="mlp | cnn | resnet50 | transformer | module:function")  # fmt: skip
    add("--data", default="digits", metavar="NAME",
        help="digits | synthetic[:HxWxC[:CLASSES]] |\n"
        "file.npz | module:function")  # fmt: skip

    add = group(
        "training", "python train.py --global-batch-size 256 --accumulate 4 --epochs 20"
    )
    add("--global-batch-size", type=count, default=64, metavar="N",
        help="rows of one update, over all replicas (default: 64)")  # fmt: skip
    add("--epochs", type=count, default=12, help="passes over the data (default: 12)")
    add_arguments("training", add)

    add = group(
        "optimizer",
        "python train.py --optimizer sgd --learning-rate 0.1 --global-clipnorm 1",
    )
    add("--optimizer", default="adam", help="any of keras.optimizers (default: adam)")
    add("--learning-rate", type=float, default=2e-3, help="(default: 0.002)")
    add("--global-clipnorm", type=float, metavar="X",
        help="clip all gradients together")  # fmt: skip
    add("--clipnorm", type=float, metavar="X", help="clip each gradient's norm")
    add("--clipvalue", type=float, metavar="X", help="clip each number")

    add = group(
        "keeping",
        "python train.py --checkpoint-dir runs/a --resume --ledger runs/a.ledger",
    )
    add("--checkpoint-dir", metavar="DIR",
        help="keep the state of the training there; s3:// and other URLs, too")  # fmt: skip
    add("--checkpoint-every", type=count, metavar="N",
        help="every N steps (default: at the end of each epoch)")  # fmt: skip
    add("--checkpoint-keep", type=count, metavar="K",
        help="keep the last K checkpoints (default: 3)")  # fmt: skip
    add("--resume", action="store_true", help="continue from the last good checkpoint")
    add("--resume-anyway", dest="resume", action="store_const", const="anyway",
        help="also if the model, the optimizer or the data differ")  # fmt: skip
    add("--ledger", metavar="FILE", help="write down which rows each step has used")

    add = group(
        "numbers", "python train.py --precision float64 --seed 7 --json run.json"
    )
    add("--precision", default="float32",
        help="float32 | float64 | mixed_bfloat16 | mixed_float16")  # fmt: skip
    add_arguments("numbers", add)
    add("--json", metavar="FILE", help="write the summary and every step's loss")
    add("--verbose", default="auto", choices=("0", "1", "2", "auto"),
        help="0 silent | 1 bar | 2 line an epoch | auto")  # fmt: skip
    return p


def _model_parallel(text: str) -> int:
    raise argparse.ArgumentTypeError(
        "it is removed: layers are no longer placed on several devices of a process\n"
        f"HINT: --tensor-parallel {text} or --shard-weights cuts weights over ranks (native, "
        "mpi); for a script, collectiverun -np N --keras --set shard_weights=True script.py"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    open_streams()
    outlive_readers()
    try:
        place = detect_rank()
        rank = 0 if place.joining else place.rank  # a joiner is alone at first
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    try:
        with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as silenced:
            if rank != 0:
                silenced.enter_context(contextlib.redirect_stderr(nowhere))
                silenced.enter_context(contextlib.redirect_stdout(nowhere))
            args = parser().parse_args(argv)
    except SystemExit as end:
        _wait_for_rank_zero(rank if end.code else 0)
        raise
    try:
        with requirements.explain_missing():
            return _run(args, rank)
    except CollectiveError as error:
        rank = rank if error.rank is None else error.rank
        alone = not error.everywhere or _wait_for_rank_zero(rank)
        where = f"rank {rank}: " if alone else ""
        if rank == 0 or alone:
            print(f"{where}error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except ProcessExit as end:
        return end.exit_code
    except KeyboardInterrupt:
        if rank == 0:
            hint = "" if args.checkpoint_dir else "--checkpoint-dir DIR; then "
            hint += "--resume continues from the last checkpoint"
            print(f"\ninterrupted\nHINT: {hint}", file=sys.stderr, flush=True)
        return 130


def _wait_for_rank_zero(rank: int) -> bool:
    """Give rank 0 time to print: a launcher ends all ranks as soon as one has failed.

    Do not wait after MPI has started: its finalization waits for every rank, so rank 0
    would wait for the ranks that sleep.

    Returns:
        Whether rank 0 has not ended in that time, so that it has not this rank's error.
    """
    waits = rank != 0 and "mpi4py.MPI" not in sys.modules
    if waits:
        time.sleep(10)
    return waits


def _run(args: argparse.Namespace, rank: int) -> int:
    if args.list_backends:
        from collective.backends import registry
        from collective.doctor.report import backends_text

        if rank == 0:
            print(backends_text(registry.describe_backends()))
        return 0
    with quiet():
        from collective.training.calls import command

    for option, file in (("--json", args.json), ("--timeline", args.timeline)):
        if file and rank == 0:
            json_file.check_writable(option, file)
    files = [f for f in (args.json, args.timeline, args.ledger) if f]
    if len(set(files)) < len(files):
        raise UsageError(
            "--json, --timeline and --ledger write a file each, and two have one name",
            hint="another name for one of them",
        )
    checkpoint = _checkpoint(args)
    if checkpoint is not None:
        checkpoint.raises = False  # the results come first

    def report(summary: Summary) -> None:
        summary.print()
        if args.json:
            summary.write_json(args.json)

    job = command.TrainingJob.of(vars(args))
    command.run(job, checkpoint=checkpoint, ledger=args.ledger, report=report)
    if checkpoint is not None:
        checkpoint.raise_if_failed()
    return 0


def _checkpoint(args: argparse.Namespace) -> Checkpoint | None:
    """Return the checkpoint that the options ask for, or None."""
    from collective.training import Checkpoint

    if args.checkpoint_dir is not None:
        return Checkpoint(
            args.checkpoint_dir,
            every=args.checkpoint_every,
            keep=args.checkpoint_keep or 3,
            resume=args.resume,
        )
    for name in ("resume", "checkpoint_every", "checkpoint_keep"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} needs a folder", hint="--checkpoint-dir DIR")
    return None


if __name__ == "__main__":
    sys.exit(main())
