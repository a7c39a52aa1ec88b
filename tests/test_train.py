"""The command line: the default run, and one clear error for every wrong use.

Wrong uses run within this session, and on three ranks within one launch of this file: there
each rank calls ``train.main`` and the output of all is gathered. A case that ends the job by
itself has a launch of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from collective import train as cli
from tests import launch, own

HERE = "tests/test_train.py"
ROOT = launch.ROOT
RANKS = 3
LAUNCHED = launch.launched()


@pytest.fixture
def keras_as_it_was(clean_keras):
    import keras

    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def command(keras_as_it_was, capfd, monkeypatch, tmp_path):
    """Run ``train.py`` here; return the exit codes and the output of all ranks."""
    if LAUNCHED:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        tmp_path = world.bcast(tmp_path, root=0)
    monkeypatch.setattr(cli, "_wait_for_rank_zero", lambda rank: None)

    def run(*arguments: str) -> tuple[set[int], str]:
        capfd.readouterr()
        try:
            code = cli.main([a.format(tmp=tmp_path) for a in arguments])
        except SystemExit as end:
            code = end.code
        printed = "".join(capfd.readouterr())
        if not LAUNCHED:
            return {code}, printed
        return set(world.allgather(code)), "".join(world.allgather(printed))

    run.tmp = tmp_path
    return run


def torn(folder: Path) -> None:
    np.savez(folder / "whole.npz", x=np.arange(400.0), y=np.arange(400))
    whole = (folder / "whole.npz").read_bytes()
    (folder / "torn.npz").write_bytes(whole[: len(whole) // 2])


# The words that are typed, and the text of the error.
WRONG = {
    "unknown-backend": ("--backend nccl", "unknown backend 'nccl'"),
    "unknown-ops": (
        "--backend tf-mirrored --cross-device-ops carrier-pigeon",
        "unknown cross-device ops 'carrier-pigeon'",
    ),
    "unknown-algorithm": ("--algorithm butterfly", "invalid choice: 'butterfly'"),
    "missing-file": ("--data {tmp}/nowhere.npz", "nowhere.npz does not exist"),
    "torn-file": ("--data {tmp}/torn.npz", "torn.npz cannot be read as .npz"),
    "empty-folder": ("--data {tmp}/empty", "nor a file of that name"),
    "unknown-data": ("--data cats", "there is no data set 'cats'"),
    "label-out-of-range": (
        "--model tests.own:few_outputs",
        "labels go from 0 to 9, but model 'few_outputs' has 3",
    ),
    "model-does-not-fit": (
        "--model tests.own:other_shape",
        "model 'other_shape' does not fit the data (a row of x has shape (8, 8, 1))",
    ),
    "no-model": ("--model tests.own:no_model", "returned a str, not a keras.Model"),
    "unknown-model": ("--model gpt9", "there is no model 'gpt9'"),
    "missing-module": ("--model nowhere:build", "there is no module 'nowhere'"),
    "missing-function": ("--model tests.own:build", "has no function 'build'"),
    "two-clips": ("--clipnorm 1 --clipvalue 1", "one way to clip at a time"),
    "unknown-optimizer": ("--optimizer sgdd", "optimizer 'sgdd' cannot be made"),
    "unknown-precision": ("--precision float12", "unknown precision 'float12'"),
    "bad-option": ("--bach-size 3", "--bach-size"),
    "bad-count": ("--global-batch-size 0", "'0' is not a whole number from 1 up"),
    "bad-number": ("--learning-rate fast", "invalid float value: 'fast'"),
    "bad-interval": ("--check-every -1", "--check-every"),
    "resume-nowhere": ("--resume", "--resume needs a folder"),
    "checkpoint-nowhere": ("--checkpoint-every 9", "--checkpoint-every needs a folder"),
    "keep-nowhere": ("--checkpoint-keep 2", "--checkpoint-keep needs a folder"),
    "one-file": (
        "--json {tmp}/a --ledger {tmp}/a",
        "--json, --timeline and --ledger write a file each",
    ),
    "no-clip": ("--clipnorm -1", "clipnorm is -1.0, not a number above 0"),
    "no-rate": ("--learning-rate nan", "a learning rate of nan"),
    "compiled": (
        "--model tests.own:drifting --optimizer sgd",
        "comes compiled, with an optimizer of its own",
    ),
    "exact-transport": (
        "--backend native --precision float64 --transport-dtype float16",
        "--transport-dtype is for float32 gradients",
    ),
    "bucket-of-shards": (
        "--backend native --shard-optimizer --bucket-bytes 9",
        "--bucket-bytes is for the all-reduce of gradients",
    ),
    "too-few-ranks": (
        "--backend native --min-np 9",
        "min_np=9, and the number of ranks is",
    ),
    "bad-seed": ("--seed -1", "'-1' is not a whole number below 2**32"),
    "bad-verbose": ("--verbose loud", "invalid choice: 'loud'"),
}
IN_ONE_PROCESS = {
    "option-of-native": (
        "--backend tf-mirrored --bucket-bytes 9",
        "error: bucket_bytes is an option of backend 'tf-multiworker' and 'mpi' and",
    ),
    "option-of-parameter-server": (
        "--parameter-servers 2",
        "error: parameter_servers is an option of backend 'tf-parameter-server'",
    ),
    "unusable-backend": ("--backend mpi", "cannot be used here: one process, started"),
    "option-of-multiworker": (
        "--communication ring",
        "error: communication is an option of backend 'tf-multiworker'",
    ),
    "devices-of-native": (
        "--backend native --devices 2",
        "error: devices is an option of backend 'tf-mirrored' and 'tf-central-storage'",
    ),
    "json-nowhere": ("--json {tmp}/no/run.json", "run.json cannot be written"),
    "timeline-nowhere": ("--timeline {tmp}/no/t.json", "t.json cannot be written"),
}
ON_RANKS = {
    "no-worker": (
        "--backend tf-parameter-server --parameter-servers 2",
        f"{RANKS} ranks are a chief, 2 parameter servers and no worker",
    ),
    "unusable-backend": (
        "--backend tf-mirrored",
        f"cannot be used here: {RANKS} processes were started",
    ),
}
CASES = WRONG | (ON_RANKS if LAUNCHED else IN_ONE_PROCESS)
if LAUNCHED:  # tf-mirrored does not start on ranks, with any options
    del CASES["unknown-ops"]


@pytest.mark.parametrize("name", CASES)
def test_wrong_use_ends_in_one_error_and_a_hint(name, command):
    typed, message = CASES[name]
    if not LAUNCHED or os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        torn(command.tmp)
        (command.tmp / "empty").mkdir()
    codes, printed = command(*typed.split())
    assert codes == {2}, printed
    assert printed.count(message) == 1, printed
    assert printed.count("error: ") == printed.count("HINT: ") == 1, printed
    assert "Traceback" not in printed and "Epoch" not in printed
    assert printed.rstrip().splitlines()[-1].startswith("HINT: ")


def holder_of_the_poisoned_row(seed: int, batch: int, replicas: int) -> tuple[int, int]:
    """Return the step that meets the row, and the replica that has it."""
    from collective.training.input.pipeline import Input, share

    plan = Input(own.poisoned(), batch, seed=seed)
    for step in range(plan.steps_per_epoch):
        numbers = list(plan.plan.row_numbers(step, step + 1))
        if own.POISONED in numbers:
            place = numbers.index(own.POISONED)
            for replica in range(replicas):
                start, stop = share(len(numbers), replica, replicas)
                if start <= place < stop:
                    return step, replica
    raise AssertionError


# Seeds that put the row on different replicas.
@pytest.mark.parametrize(
    "seed", [0, 3, *(pytest.param(n, marks=pytest.mark.matrix) for n in (1, 2))]
)
def test_a_loss_that_is_not_finite_names_step_rank_and_variable(seed, command):
    of = "rank" if LAUNCHED else "replica"
    step, holder = holder_of_the_poisoned_row(seed, 15, RANKS)
    # In the case of one process with three replicas.
    mirrored = [] if LAUNCHED else ["--backend", "tf-mirrored", "--devices", str(RANKS)]
    codes, printed = command(
        *["--data", "tests.own:poisoned", "--model", "tests.own:two_layers"],
        *f"--global-batch-size 15 --verbose 0 --seed {seed}".split(),
        *["--terminate-on-nan", *mirrored],
    )
    assert codes == {1}, printed
    message = f"step {step}: the loss or its gradient is not finite on {of} {holder}; "
    assert printed.count(message) == 1, printed
    # tanh(inf) is 1, so only the gradient of the kernel that met it is not finite.
    assert "'two_layers/hidden/kernel'" in printed or "'hidden/kernel'" in printed
    assert printed.count("HINT: ") == 1 and "Traceback" not in printed


@pytest.mark.skipif(not LAUNCHED, reason="compares ranks")
def test_poisoned_seeds_reach_more_than_one_rank():
    holders = {holder_of_the_poisoned_row(s, 15, RANKS)[1] for s in (0, 3)}
    assert len(holders) > 1


@pytest.mark.skipif(not LAUNCHED, reason="compares ranks")
def test_ranks_whose_steps_differ_end_in_one_error(command):
    typed = "--data tests.own:finite --model tests.own:drifting --global-batch-size 16"
    codes, printed = command(*typed.split(), "--check-every", "3", "--verbose", "0")
    assert codes == {2}, printed
    message = f"the graph of the step has other constants on rank {RANKS - 1} than"
    assert printed.count("error: ") == 1 and message in printed, printed
    assert printed.count("HINT: ") == 1 and "Traceback" not in printed


SHORT = "--model mlp --steps 30 --precision float64 --learning-rate 0.01 --seed 4"


def test_losses_on_file_are_those_of_one_process(command, tmp_path_factory):
    codes, printed = command(*SHORT.split(), "--json", "{tmp}/run.json")
    assert codes == {0}, printed
    assert printed.count("samples per second") == 1
    summary = json.loads((command.tmp / "run.json").read_text())
    assert summary["steps"] == len(summary["losses"]) == 30
    assert (summary["replicas"], summary["backend"]) == (
        (RANKS, "native") if LAUNCHED else (1, "single")
    )
    folder = os.environ.get(launch.REFERENCE)
    if LAUNCHED:
        wanted = json.loads(Path(folder, "run.json").read_text())
        np.testing.assert_allclose(summary["losses"], wanted["losses"], rtol=1e-11)
        for name, value in wanted["test"].items():
            assert summary["test"][name] == pytest.approx(value, rel=1e-9)


@pytest.mark.launches
def test_on_ranks(command):
    pytest.importorskip("mpi4py")
    command(*SHORT.split(), "--json", "{tmp}/run.json")
    ended = launch.launch("mpi", RANKS, [HERE], command.tmp, seconds=300)
    assert ended.passed()


def test_an_interrupt_is_reported_once_with_what_goes_on(command, monkeypatch):
    def interrupted(args, rank):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    codes, printed = command("--checkpoint-dir", "{tmp}/runs")
    assert codes == {130} and "Traceback" not in printed
    assert printed.count("interrupted\nHINT: --resume continues from the last") == 1


# --- separate programs --------------------------------------------------------


def script(*arguments: str, before=(), **more: str) -> tuple[int | None, str]:
    env = launch.environment(forked=bool(before), **more)
    if not before:  # train.py silences TensorFlow by itself
        del env["TF_CPP_MIN_LOG_LEVEL"]
    program = [sys.executable, str(ROOT / "train.py"), *arguments]
    return launch.run([*before, *program], env, 110)


@pytest.mark.launches
def test_the_default_run_learns_the_digits_and_sums_up(tmp_path):
    import jsonschema

    code, printed = script("--json", str(tmp_path / "run.json"))
    assert code == 0, printed
    for line in ("backend", "replicas", "test accuracy", "samples per second"):
        assert line in printed
    for part in ("input", "compute", "all-reduce"):
        assert f"\n  {part} " in printed
    assert "Traceback" not in printed and "oneDNN" not in printed
    summary = json.loads((tmp_path / "run.json").read_text())
    schema = json.loads((ROOT / "docs/reference/summary.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(summary, schema)
    assert summary["test"]["accuracy"] >= 0.97
    assert summary["steps"] == len(summary["losses"]) == 12 * 23
    assert len(summary["history"]["loss"]) == 12
    assert [f.name for f in tmp_path.iterdir()] == ["run.json"]


def _fields(schema: dict) -> set[str]:
    return set(schema["properties"])


def test_the_schema_has_the_fields_of_summary_and_job():
    import dataclasses

    from collective.backends import Options
    from collective.training.calls.command import TrainingJob
    from collective.training.loop.summary import Summary

    schema = json.loads((ROOT / "docs/reference/summary.schema.json").read_text())
    page = (ROOT / "docs/reference/summary.md").read_text()
    options = schema["properties"]["options"]
    for kind, part in (
        (Summary, schema),
        (TrainingJob, options),
        (Options, options["properties"]["options"]),
    ):
        names = {f.name for f in dataclasses.fields(kind)}
        assert names == _fields(part) == set(part["required"])
        assert all(p.get("description") for p in part["properties"].values())
    assert all(f"`{name}`" in page for name in _fields(schema))


@pytest.mark.launches
def test_list_backends_and_help_import_no_tensorflow():
    for option in ("--list-backends", "--help"):
        program = (
            "import sys\n"
            "from collective import train as cli\n"
            f"try: cli.main(['{option}'])\n"
            "except SystemExit as end: assert not end.code\n"
            "assert 'tensorflow' not in sys.modules\n"
        )
        code, printed = launch.run(
            [sys.executable, "-c", program], launch.environment(COLUMNS="80"), 30
        )
        assert code == 0, printed
        if option == "--list-backends":
            for name in ("single", "tf-mirrored", "tf-multiworker", "mpi"):
                assert name in printed
            here, started, _ = printed.split("\n\n")
            assert here.startswith("Can be used in this process:\n  single ")
            assert "tf-mirrored" in here and "mpi " not in here
            # The text does not say "no", but what to type, and why it is necessary.
            assert started.startswith("Can be used here when started so:\n")
            assert "  mpi  " in started and "mpirun -np 4 python script.py" in started
            assert "started without mpirun" in started and "no:" not in printed
            assert max(map(len, printed.splitlines())) <= 80


def test_help_shows_an_example_for_each_group():
    text = cli.parser().format_help()
    groups = [g for g in cli.parser()._action_groups if g.description]
    assert len(groups) == 6
    for group in groups:
        example = group.description
        assert example in text and "python train.py --" in example
        typed = example.split("train.py ")[1].split()
        cli.parser().parse_args(typed)  # the example itself is valid
        options = {o for a in group._group_actions for o in a.option_strings}
        assert options & set(typed)


@pytest.mark.launches
def test_the_mpirun_of_another_mpi_is_reported():
    """The ranks find PMI_RANK, and an MPI that believes it is alone."""
    pytest.importorskip("mpi4py")
    code, printed = script("--backend", "mpi", PMI_RANK="0", PMI_SIZE="4")
    assert code == 2, printed
    assert "mpirun started 4 processes, but MPI (Open MPI" in printed
    assert printed.count("error: ") == printed.count("HINT: ") == 1
    assert "Traceback" not in printed


@pytest.mark.launches
def test_real_ranks_print_an_error_once_and_exit_with_its_code():
    code, printed = script("--backend", "nccl", before=launch.command("mpi", 2))
    assert code == 2, printed
    assert printed.count("unknown backend 'nccl'") == 1
    assert printed.count("HINT: one of: single, ") == printed.count("HINT: ") == 1


@pytest.mark.launches
def test_a_row_that_one_rank_alone_cannot_read_ends_the_job():
    from collective.training.input.pipeline import Input, share
    from tests.own import UNREADABLE

    plan = Input((np.zeros((24, 1)), np.zeros(24)), 8, seed=0)
    place = next(
        list(numbers).index(UNREADABLE)
        for numbers in (plan.plan.row_numbers(s, s + 1) for s in range(3))
        if UNREADABLE in numbers
    )
    holder = next(r for r in range(2) if place < share(8, r, 2)[1])
    code, printed = script(
        *[
            "--data",
            "tests.own:unreadable",
            "--model",
            "mlp",
            "--global-batch-size",
            "8",
        ],
        before=launch.command("mpi", 2),
    )
    assert code == 2, printed
    assert printed.count(f"rank {holder}: error: ") == 1, printed
    assert (
        printed.count("error: ") == 1 and f"row {UNREADABLE} cannot be read" in printed
    ), printed
    assert printed.count("HINT: ") == 1 and "Traceback" not in printed, printed
