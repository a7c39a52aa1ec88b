"""The timeline: its events, its form after any fault, and the agreement of clocks."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from collective.backends import Options
from collective.backends.single import SingleBackend
from collective.environment import Environment
from collective.training.observers import timeline
from collective.training.observers.trace_file import END, TraceFile
from tests import launch
from tests.training.small import PER_EPOCH, train

PARTS = {"step", "input", "forward/backward", "all-reduce", "update"}
# In microseconds: times are rounded to thousandths, and floats are binary.
ROUNDING = 0.01
# TensorFlow uses the wall clock, which may be adjusted at any time.
WALL_CLOCK = 1e5


def read(path: Path) -> list[dict]:
    """Return the events; fail if the file is not strict JSON."""
    return json.loads(path.read_text())


def rows_of(events: list[dict], lines: int = 1) -> dict[int, list[dict]]:
    """Return the spans of each rank; with 2 lines also of buckets that travel early."""
    rows = defaultdict(list)
    for event in events:
        assert event["tid"] in (0, 1)
        if event["ph"] == "X" and event["tid"] < lines:
            rows[event["pid"]].append(event)
    return rows


def end(span: dict) -> float:
    return span["ts"] + span["dur"]


def assert_nested(spans: list[dict]) -> None:
    """Check that of two spans in a row one contains the other, or they are disjoint."""
    open_spans: list[dict] = []
    for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
        assert span["dur"] >= 0
        while open_spans and end(open_spans[-1]) <= span["ts"] + ROUNDING:
            open_spans.pop()
        assert not open_spans or end(span) <= end(open_spans[-1]) + ROUNDING
        open_spans.append(span)


def steps_of(spans: list[dict]) -> dict[int, dict[str, dict]]:
    """Return the spans of each step by name, by the step's number."""
    steps = {s["args"]["number"]: {"step": s} for s in spans if s["name"] == "step"}
    for span in spans:
        for found in steps.values():
            step = found["step"]
            if step["ts"] - ROUNDING <= span["ts"] <= end(step) - ROUNDING:
                found.setdefault(span["name"], span)
    return steps


def assert_overlap(rows: dict[int, list[dict]], name: str, error: float) -> int:
    """Check that a span of a step overlaps on all ranks; return the number of steps."""
    ranks = [steps_of(spans) for spans in rows.values()]
    common = set.intersection(*map(set, ranks))
    for number in common:
        spans = [steps[number][name] for steps in ranks]
        assert max(s["ts"] for s in spans) <= min(map(end, spans)) + error
    return len(common)


# --- the file ---------------------------------------------------------------------


def test_processes_add_to_one_file_that_is_always_complete(tmp_path):
    path = tmp_path / "trace.json"
    first = TraceFile(str(path), 1 << 20, create=True)
    second = TraceFile(str(path), 1 << 20, create=False)
    assert first.read() == []
    for i in range(5):
        for pid, file in enumerate((first, second)):
            file.add([{"name": 'a "name"\n', "ts": i, "pid": pid}] * (i + 1))
            assert read(path) == first.read() == second.read()
    assert len(read(path)) == 2 * (1 + 2 + 3 + 4 + 5)


def test_a_file_ends_with_a_note_within_its_bound(tmp_path):
    path = tmp_path / "trace.json"
    files = [TraceFile(str(path), 4000, create=not i) for i in range(3)]
    for i in range(300):
        files[i % 3].add([{"name": "span", "ph": "X", "ts": i, "pid": i % 3}])
    assert 3000 < path.stat().st_size <= 4000
    assert {e["pid"] for e in read(path)[-3:]} == {0, 1, 2}
    assert {e["name"] for e in read(path)[-3:]} == {"the trace is full"}


def test_what_a_process_had_begun_to_write_when_it_was_killed_is_taken_out(tmp_path):
    path = tmp_path / "trace.json"
    file = TraceFile(str(path), 1 << 20, create=True)
    event = {"name": "span,\n", "ts": 1}
    wanted = []
    for torn in (b"", b",\n", b',\n{"name":"spa', b',\n{"name":"a"},{"na'):
        file.add([event, event])
        wanted += [event, event]
        assert read(path) == wanted
        with path.open("r+b") as written:
            written.seek(-len(END) if torn else 0, os.SEEK_END)
            written.write(torn)
    path.write_bytes(b"[\n{")  # before the first complete event
    file.add([event])
    assert read(path) == [event]


# --- one process ------------------------------------------------------------------


@pytest.mark.usefixtures("clean_keras")
@pytest.mark.parametrize("name", ["single", "tf-mirrored:3"])
def test_one_row_for_one_process(name, backends_by_name, tmp_path):
    path = tmp_path / "trace.json"
    train(backends_by_name(name), epochs=2, timeline=str(path), validate=True)
    events = read(path)
    name_of_row = next(e for e in events if e["name"] == "process_name")["args"]["name"]
    assert f": {name[:11]}" in name_of_row and ("3 replicas" in name_of_row) == (
        name != "single"
    )
    rows = rows_of(events)
    assert set(rows) == {0}
    assert_nested(rows[0])
    names = [s["name"] for s in rows[0]]
    assert set(names) == PARTS | {"validation"}
    assert all(names.count(part) == 2 * PER_EPOCH for part in PARTS)
    assert names.count("validation") == 2
    assert set(steps_of(rows[0])) == set(range(2 * PER_EPOCH))


@pytest.mark.usefixtures("clean_keras")
def test_it_stops_growing_and_the_training_goes_on(monkeypatch, tmp_path):
    monkeypatch.setattr(timeline, "LIMIT_BYTES", 3000)
    monkeypatch.setattr(timeline, "FLUSH_SECONDS", 0)
    backend = SingleBackend(Options(), Environment())
    result = train(backend, timeline=str(tmp_path / "trace.json"))
    assert len(result.losses) == 4 * PER_EPOCH
    assert (tmp_path / "trace.json").stat().st_size <= 3000
    assert read(tmp_path / "trace.json")[-1]["name"] == "the trace is full"


# --- ranks ------------------------------------------------------------------------

TRAIN = [sys.executable, str(launch.ROOT / "train.py"), "--verbose", "0"]
TRAIN += ["--model", "mlp", "--threads", "1"]


@pytest.mark.launches
@pytest.mark.parametrize(
    "killed", ["all", pytest.param("rank 1", marks=pytest.mark.matrix)]
)
def test_it_opens_when_ranks_are_killed(killed, tmp_path):
    path = tmp_path / "trace.json"
    options = ["--backend", "native", "--bucket-bytes", "10000", "--epochs", "1000000"]
    start = [sys.executable, "-m", "collective.launch", "-np", "2"]
    job = psutil.Popen(
        [*start, *TRAIN, *options, "--timeline", str(path)],
        cwd=launch.ROOT,
        env=launch.environment(forked=True),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 3 * launch.PATIENCE_SECONDS
        while not path.exists() or path.stat().st_size < 60_000:
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        family = [job, *job.children(recursive=True)]
        first = family if killed == "all" else [p for p in family[1:] if is_rank(p, 1)]
        assert first
        kill(first)
        assert job.wait(launch.PATIENCE_SECONDS) != 0
    finally:
        kill(family or [job, *job.children(recursive=True)])
        psutil.wait_procs(family, timeout=launch.PATIENCE_SECONDS)
    rows = rows_of(read(path))
    assert set(rows) == {0, 1}
    buckets = [f"all-reduce of bucket {i}" for i in (0, 1)]
    for spans in rows.values():
        assert_nested(spans)
    early = rows_of(read(path), lines=2)
    for spans in early.values():
        assert set(steps_of(spans)[3]) >= {*PARTS, *buckets}
    for name in buckets:
        assert assert_overlap(early, name, error=ROUNDING) > 10


def is_rank(process: psutil.Process, rank: int) -> bool:
    return process.environ().get("COLLECTIVE_RANK") == str(rank)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


NAMESPACE = ["unshare", "--time", "--monotonic", "1000", "--uts", "--fork"]


def namespaces() -> bool:
    """Return whether separate clocks and host names are possible here."""
    if not shutil.which("unshare"):
        return False
    trial = [*NAMESPACE, "hostname", "elsewhere"]
    return subprocess.run(trial, capture_output=True, timeout=120).returncode == 0


@pytest.mark.matrix
@pytest.mark.launches
@pytest.mark.skipif(not namespaces(), reason="time namespaces are not permitted")
def test_hosts_with_clocks_of_their_own_come_together(tmp_path):
    """Rank 1 has a clock that is 1000 seconds ahead, and another host name."""
    pytest.importorskip("mpi4py")
    path = tmp_path / "trace.json"
    program = [*TRAIN, "--backend", "mpi", "--steps", "40", "--timeline", str(path)]
    elsewhere = f"hostname elsewhere && exec {shlex.join(program)}"
    script = f"""
        test $OMPI_COMM_WORLD_RANK = 0 && exec {shlex.join(program)}
        exec {shlex.join([*NAMESPACE, "bash", "-c", elsewhere])}
    """
    code, printed = launch.run(
        [*launch.command("mpi", 2), "bash", "-c", script],
        launch.environment(forked=True),
        100,
    )
    assert code == 0, printed
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    events = read(path)
    clocks = [e["args"] for e in events if e["name"] == "recording begins"]
    offset, error = clocks[1]["offset_seconds"], clocks[1]["error_seconds"]
    assert clocks[0] == {"offset_seconds": 0, "error_seconds": 0}
    assert abs(offset - 1000) <= error < 1
    rows = rows_of(events)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"rank 0 on {socket.gethostname()}: mpi",
        "rank 1 on elsewhere: mpi",
    }
    for spans in rows.values():
        assert_nested(spans)
    assert assert_overlap(rows, "all-reduce", error=1e6 * error + WALL_CLOCK) == 40
