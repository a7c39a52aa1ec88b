"""The ledger: perfect if each row was read once; otherwise it names the errors.

Plain, in one process; ``test_fit.test_on_ranks`` runs this file on several.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import collective
from collective.errors import UsageError
from collective.training import Checkpoint
from collective.training.input import pipeline
from collective.training.input.plan import RowPlan
from collective.training.observers.ledger.observer import SIZE, read_receipts
from collective.training.observers.ledger.receipts import receipt
from collective.training.observers.ledger.verify import check, main
from collective.training.observers.ledger.writer import Ledger, mark
from tests import launch
from tests.training.small import NAMES, PER_EPOCH, ROWS, gather, model, rows, train

pytestmark = pytest.mark.usefixtures("clean_keras")
PLAIN = pytest.mark.skipif(launch.launched(), reason="rank 0's error ends the job")
PLAN = RowPlan(rows=53, global_batch_size=10, seed=5, shuffle=True)


@pytest.fixture(params=NAMES)
def backend(request, backends_by_name):
    return backends_by_name(request.param)


def account(path, capsys, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(path)]) == code
    return capsys.readouterr().out


def write(
    path, steps=range(2 * PER_EPOCH), replicas: int = 3, change=None, plan=PLAN
) -> None:
    """Write a ledger as three replicas do; ``change`` gets the entry of each step."""
    ledger = Ledger(path)
    ledger.begin(plan, steps.start, replicas, "made up")
    for step in steps:
        numbers = plan.row_numbers(step, step + 1)
        read = []
        for replica in range(replicas):
            start, stop = pipeline.share(len(numbers), replica, replicas)
            read.append([start, stop, mark(numbers[start:stop])])
        if change is not None:
            read = change(step, numbers, read)
        ledger.add(step, read)
    ledger.close()


def test_it_notes_what_was_read(backend, tmp_path, capsys):
    path = tmp_path / "ledger"
    train(backend, steps=2 * PER_EPOCH + 2, ledger=path)
    if backend.rank == 0:
        found = check(path)
        assert found.faults == []
        assert found.epochs == [ROWS, ROWS, 20]
        assert [run.replicas for run in found.runs] == [backend.replicas]
        shown = account(path, capsys)
        assert f"epoch 1: all {ROWS} rows, each used once\n" in shown
        assert f"epoch 2: 20 of {ROWS} rows, each used once\n" in shown
    written, *others = gather(backend, path.exists())
    assert written and not any(others)


@PLAIN
def test_the_order_of_keras_is_replayed(tmp_path, capsys):
    """A script that calls ``keras.utils.set_random_seed`` trains in it."""
    keras.utils.set_random_seed(4)
    made = model()()
    path = tmp_path / "trained"
    words = {"batch_size": 10, "epochs": 2, "verbose": 0, "backend": "single"}
    collective.fit(made, *rows(), **words, ledger=path)
    assert json.loads(path.read_text().splitlines()[0])["plan"]["shuffle"] == "keras"
    assert f"epoch 1: all {ROWS} rows, each used once\n" in account(path, capsys)
    batches = dataclasses.replace(PLAN, shuffle="keras-batch")
    write(tmp_path / "batches", plan=batches)
    assert check(tmp_path / "batches").faults == []
    with pytest.raises(UsageError, match="other values"):
        write(
            tmp_path / "unknown", range(0), plan=dataclasses.replace(PLAN, shuffle="x")
        )
        check(tmp_path / "unknown")


@pytest.mark.parametrize("kind", ["wrong-row", "wrong-share"])
def test_what_a_replica_really_read_is_noted(kind, backend, tmp_path, monkeypatch):
    """The last replica makes an error, which rank 0's plan cannot show."""
    if len(backend.local_replicas) > 1:
        return  # one process: its replicas cut the rows that it has read
    mine = backend.rank == backend.size - 1
    path, real = tmp_path / "ledger", pipeline.share

    def early(rows, replica, replicas):
        """Begin one row early, so that row is read twice."""
        start, stop = real(rows, replica, replicas)
        return tf.maximum(start - 1, 0), stop

    if mine and kind == "wrong-share":
        monkeypatch.setattr(pipeline, "share", early)
    if mine and kind == "wrong-row":
        row_numbers = RowPlan.row_numbers
        monkeypatch.setattr(
            RowPlan, "row_numbers", lambda *a: (row_numbers(*a) + 1) % ROWS
        )
    train(backend, steps=2, ledger=path)
    monkeypatch.undo()
    if backend.rank == 0:
        faults = check(path).faults
        if kind == "wrong-row":
            last = f"step 0: replica {backend.size - 1} has read other rows"
            assert len(faults) == 2 and faults[0].startswith(last)
        elif backend.size > 1:
            start, _ = real(10, backend.size - 1, backend.size)
            row = PLAN.row_numbers(0, 1)[start - 1]
            assert f"epoch 0: row {row} was used twice" in faults


def test_a_receipt_survives_the_sum_in_any_precision():
    numbers = np.array([0, 7, 2**40 + 3, 52], np.int64)
    places = np.arange(2**31 - 5, 2**31 - 1)
    read = np.stack([places, numbers], axis=1)
    wanted = (places[0], places[-1] + 1, mark(numbers))
    for dtype in (tf.float32, tf.float64, tf.bfloat16, tf.float16):
        parts = np.zeros([3, 3, SIZE], np.float32)
        parts[1, 1] = receipt(read)
        total = tf.add_n([tf.cast(part, dtype) for part in parts])
        got = read_receipts(np.asarray(tf.cast(total, tf.float64)).ravel())
        assert got == [(0, 0, 0), wanted, (0, 0, 0)]
    assert mark(numbers) == mark(numbers[::-1]) != mark(numbers[1:])


@PLAIN
def test_through_a_kill_and_a_resume_on_fewer(tmp_path, capsys, backends_by_name):
    one, three = (backends_by_name(name) for name in ("single", "tf-mirrored:3"))
    path, folder = tmp_path / "ledger", tmp_path / "runs"
    first = Checkpoint(folder, every=4)
    train(three, steps=PER_EPOCH + 3, ledger=path, checkpoint=first, data=rows())
    # It is killed in the middle of a line, and steps after the last checkpoint are lost.
    shutil.rmtree(folder / f"step-{PER_EPOCH + 3:09d}")
    with path.open("a") as file:
        file.write('{"step":9,"re')
    train(one, epochs=2, ledger=path, checkpoint=Checkpoint(folder, resume=True))
    found = check(path)
    assert found.faults == [] and found.epochs == [ROWS, ROWS]
    start = found.runs[1].start
    assert start in (4, 8) and found.runs[1].undone == 9 - start
    shown = account(path, capsys)
    assert "steps 0 to 8: 3 replicas (tf-mirrored)\n" in shown
    undone = f"{9 - start} steps undone and made again"
    assert f"steps {start} to 11: 1 replica (single), {undone}\n" in shown


def doubled(step, numbers, read):
    """Make two replicas overlap by one row."""
    if step == 7:
        read[1] = [2, read[1][1], mark(numbers[2 : read[1][1]])]
    return read


def skipped(step, numbers, read):
    if step == 5:
        read[0] = [1, 1, 0]
    return read


def other(step, numbers, read):
    if step == 3:
        read[2] = [*read[2][:2], mark(numbers[:3])]
    return read


WRONG = {
    "doubled": (doubled, f"epoch 1: row {PLAN.row_numbers(7, 8)[2]} was used twice"),
    "skipped": (skipped, f"epoch 0: row {PLAN.row_numbers(5, 6)[0]} was not used"),
    "other": (
        other,
        "step 3: replica 2 has read other rows than those at places 6 to 10",
    ),
    "one-less": (lambda s, n, read: read[: 2 if s == 2 else 3], "step 2: 2 replicas"),
}


@PLAIN
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(what, tmp_path, capsys):
    write(tmp_path / "good")
    assert "error" not in account(tmp_path / "good", capsys)
    change, message = WRONG[what]
    write(tmp_path / "bad", change=change)
    shown = account(tmp_path / "bad", capsys, code=1)
    assert f"error: {message}" in shown, shown
    assert "each used once" not in shown


@PLAIN
def test_a_step_made_twice_or_left_out_is_named(tmp_path, capsys):
    path = tmp_path / "ledger"
    write(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[-1]]))
    assert "step 11 was made twice" in account(path, capsys, code=1)
    path.write_text("".join(lines[:4] + lines[5:]))
    shown = account(path, capsys, code=1)
    assert "error: step 3 is not in the ledger" in shown
    assert shown.count("was not used") == 10
    # A resume from an earlier step repairs it.
    path.write_text("".join(lines[:4] + lines[5:]))
    write(path, range(2, 12), replicas=2)
    assert f"epoch 0: all {ROWS} rows" in account(path, capsys)


@PLAIN
def test_what_is_no_ledger_is_reported(tmp_path, capsys):
    good = tmp_path / "good"
    write(good)
    lines = good.read_text().splitlines(keepends=True)
    for name, content in {
        "empty": "",
        "text": "a text\nof two lines\n",
        "headless": "".join(lines[1:]),
        "hole": "".join([*lines[:3], "#" * 9 + "\n", *lines[3:]]),
        "list": json.dumps([1, 2]),
        "foreign": '{"from": 0}\n',
        "other": '{"from": 0, "replicas": 1, "backend": "mpi", "plan": {"a": 1}}\n',
    }.items():
        path = tmp_path / name
        path.write_text(content)
        assert main([str(path)]) == 2
        message = capsys.readouterr().err
        assert f"{name} is not a ledger: " in message and "\nHINT: " in message
    assert main([str(tmp_path / "nowhere")]) == main([]) == 2
    with pytest.raises(UsageError, match="cannot be written to"):
        Ledger(tmp_path / "no" / "ledger")


@PLAIN
@pytest.mark.launches
def test_as_a_program(tmp_path):
    write(tmp_path / "bad", change=doubled)
    program = [
        sys.executable,
        "-m",
        "collective.training.observers.ledger.verify",
        str(tmp_path / "bad"),
    ]
    code, printed = launch.run(program, launch.environment(), 60)
    assert code == 1 and "was used twice" in printed, printed
