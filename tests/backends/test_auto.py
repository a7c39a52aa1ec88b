"""What ``--backend auto`` makes of measurements: the fit, the choice, what is kept."""

from __future__ import annotations

import json
import os
import sys

import pytest

from collective.backends import Options, launching
from collective.backends.auto import choose, measurements
from collective.backends.auto.measurements import Fit, Point, fit
from collective.backends.auto.probe import CALLS
from collective.environment import Environment, detect
from collective.environment import gpus as environment_gpus
from tests import launch

FOUR = Environment("mpirun", 0, 4, 0, 4)
FAST_LINK = Fit(2e-3, 1e-6, 1e-10)
SOON_THERE = Fit(1e-5, 1e-6, 1e-9)


def timed(line: Fit) -> list[Point]:
    """What a probe would measure if this were the whole truth."""
    return [Point(s, n, line.seconds([s // n] * n)) for s, n in CALLS]


@pytest.mark.parametrize(
    "line", [FAST_LINK, SOON_THERE, Fit(3e-4, 0.0, 2e-10)], ids=str
)
def test_the_fit_finds_latency_tensor_and_bandwidth(line):
    found = fit(timed(line))
    assert found.latency == pytest.approx(line.latency, rel=1e-6)
    assert found.each == pytest.approx(line.each, rel=1e-6, abs=1e-9)
    assert found.per_byte == pytest.approx(line.per_byte, rel=1e-6)


def test_the_fit_takes_noise_and_gives_no_negative_coefficient():
    noise = (1.3, 0.8, 1.1, 0.7, 1.2, 0.9, 1.1)
    points = [
        Point(p.size, p.tensors, p.seconds * by)
        for p, by in zip(timed(SOON_THERE), noise, strict=True)
    ]
    found = fit(points)
    assert min(found.latency, found.each, found.per_byte) >= 0
    assert all(
        0.5 < found.seconds([p.size // p.tensors] * p.tensors) / p.seconds < 2
        for p in points
    )
    falling = [Point(4, 1, 2e-3), Point(1 << 24, 1, 1e-3)]
    assert fit(falling).per_byte == 0 < fit(falling).latency
    with pytest.raises(ValueError):
        fit([])


@pytest.mark.parametrize(
    "sizes, wanted",
    [([1000], "soon-there"), ([4 << 20], "fast-link"), ([100] * 9000, "fast-link")],
    ids=["small", "large", "many"],
)
def test_chooses_by_the_gradients_of_the_model(sizes, wanted):
    found = {
        "fast-link": timed(FAST_LINK),
        "soon-there": timed(Fit(1e-5, 2e-6, 1e-9)),
        "broken": "ended with exit code 1",
    }
    choice = choose.fastest(found, sizes)
    assert choice.name == wanted == next(iter(choice.predicted))
    assert set(choice.predicted) == {"fast-link", "soon-there"}
    line = FAST_LINK if wanted == "fast-link" else Fit(1e-5, 2e-6, 1e-9)
    assert choice.predicted[wanted] == pytest.approx(line.seconds(sizes), rel=1e-3)
    lines = choose.table(choice, found, "1 MiB").splitlines()
    assert "<- chosen" in lines[1] and lines[1].split()[0] == wanted
    assert "broken" in lines[3] and "HINT: COLLECTIVE_PROBE=0" in lines[3]
    assert choose.fastest({"broken": "did not end in time"}, sizes) is None


def test_an_option_of_one_backend_leaves_that_one():
    assert "mpi" in choose.candidates(FOUR, Options())
    assert "single" not in choose.candidates(FOUR, Options())
    assert choose.candidates(FOUR, Options(algorithm="direct")) == ["native"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return measurements.ProbeCache({"ranks": 4, "tensorflow": ("cpu", "2.21")})


def test_what_was_found_is_kept_for_jobs_like_this_one(cache):
    found = {"native": timed(SOON_THERE), "mpi": timed(FAST_LINK)}
    assert cache.read() == {}
    assert cache.write(found)
    assert cache.read() == found
    assert [f.name for f in cache.path.parent.iterdir()] == [cache.path.name]
    other = measurements.ProbeCache({"ranks": 2, "tensorflow": ("cpu", "2.21")})
    assert other.path != cache.path and other.read() == {}
    os.replace(cache.path, other.path)  # as if two keys had one hash
    assert other.read() == {}


def test_a_failure_is_not_kept(cache):
    cache.write({"native": timed(SOON_THERE), "horovod": "did not end in time"})
    assert cache.read() == {"native": timed(SOON_THERE)}
    assert "in time" not in cache.path.read_text()
    older = {"job": cache.of, "found": {"horovod": "did not end in time"}}
    cache.path.write_text(json.dumps(older))
    assert cache.read() == {}


@pytest.mark.parametrize("text", [
    "", "{", "[1]", "null", '{"job": 1}', '{"job": JOB, "found": [2]}',
    '{"job": JOB, "found": {"native": 3}}', '{"job": JOB, "found": {"native": [{}]}}',
    '{"job": JOB, "found": {"native": [{"size": 4, "tensors": 1, "seconds": NaN}]}}',
])  # fmt: skip
def test_a_broken_file_counts_as_none(cache, text):
    cache.path.parent.mkdir(parents=True)
    cache.path.write_text(text.replace("JOB", json.dumps(cache.of)))
    assert cache.read() == {}


def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    cache = measurements.ProbeCache({"ranks": 4})
    cache.write({"native": timed(SOON_THERE)})
    assert cache.read() == {}


def test_the_key_tells_jobs_apart():
    of = measurements.job(FOUR)
    assert of["ranks"] == 4 and of["hosts"] == 1 and of["launcher"] == "mpirun"
    assert of != measurements.job(Environment("mpirun", 0, 2, 0, 2))
    json.dumps(of)


@pytest.mark.parametrize("place", [
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"},
    {"COLLECTIVE_RANK": "1", "COLLECTIVE_SIZE": "2", "COLLECTIVE_JOB": "a"},
    {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"},
    {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    {"TF_CONFIG": "{}"},
], ids=lambda place: next(iter(place)))  # fmt: skip
def test_a_job_within_a_job_is_a_new_one(place):
    kept = {
        "PATH": "/bin",
        "HOROVOD_CYCLE_TIME": "2",
        "COLLECTIVE_LIBRARY": "core.so",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
    }
    assert launching.unlaunched({**place, **kept}) == kept
    assert detect(launching.unlaunched(place)) == Environment()


IN_FORKS = """
import os, time
from collective.backends.auto.choose import in_a_fork
assert in_a_fork(lambda: [1, 2], 20) == [1, 2]
assert in_a_fork(lambda: print("not seen") or 1 / 0, 20) is None
assert in_a_fork(lambda: os._exit(3), 20) is None
assert in_a_fork(lambda: time.sleep(100), 0.2) is None
print("done")
"""


@pytest.mark.launches
def test_a_fork_answers_or_is_ended():
    code, printed = launch.run(
        [sys.executable, "-c", IN_FORKS], launch.environment(), 60
    )
    assert (code, printed) == (0, "done\n")


CHOOSES = """
import os, sys
from collective.backends import Options
from collective.backends.auto import choose as auto
from collective.backends.auto.measurements import Point
from collective.environment import detect

def time(name, environment, cores):
    assert environment.rank == 0 and len(cores) >= 1
    if name == "tf-multiworker":
        return "ended with exit code 1"
    return [Point(4, 1, 2e-3 if name == "native" else 1e-3)]

auto.time = time
auto.candidates = lambda *_: ["native", "tf-multiworker", "mpi"]
place = detect()
timed, auto.time = auto.time, lambda *_: 1 / 0
for switch in ("", "0"):  # training starts at once: nothing is timed
    os.environ["COLLECTIVE_PROBE"] = switch
    choice = auto.choose(place, Options(), lambda: 1 / 0)
    assert choice.name == "native" and not choice.predicted, choice
    assert "ZeroDivisionError" not in choice.because, choice
os.environ["COLLECTIVE_PROBE"], auto.time = "1", timed
choice = auto.choose(place, Options(), [4000] if place.rank == 0 else None)
assert choice.name == "mpi" and list(choice.predicted) == ["mpi", "native"], choice
tried = []
auto.time = lambda name, *_: tried.append(name) or "ended with exit code 1"
assert auto.choose(place, Options(), [4000]) == choice
# A failure is not kept, so it is timed again; measurements are.
assert tried == (["tf-multiworker"] if place.rank == 0 else []), tried
# Without asking for it, nothing is timed while something is missing.
os.environ["COLLECTIVE_PROBE"] = ""
auto.candidates = lambda *_: ["native", "mpi"]
assert auto.choose(place, Options(), [4000]) == choice
auto.candidates = lambda *_: ["native", "tf-multiworker", "mpi"]
tried.clear()
assert auto.choose(place, Options(), [4000]).name == "native" and not tried
os.environ["COLLECTIVE_PROBE"] = "1"
auto.fastest = None
choice = auto.choose(place, Options(), [4000])
assert choice.name == "native" and "not measured: TypeError" in choice.because, choice
print("chosen")
"""


@pytest.mark.launches
@launch.NEEDS_CORE
def test_all_ranks_follow_rank_zero(tmp_path):
    variables = {"XDG_CACHE_HOME": str(tmp_path)}
    start = [sys.executable, "-m", "collective.launch", "-np", "3"]
    code, printed = launch.run(
        [*start, sys.executable, "-c", CHOOSES], launch.environment(**variables), 60
    )
    assert code == 0, printed
    assert printed.count("] chosen\n") == 3, printed
    assert printed.count("auto: timing") == 5


@pytest.mark.compares
@pytest.mark.launches
@launch.NEEDS_CORE
def test_a_training_on_what_auto_has_measured(tmp_path):
    """On our launcher: two candidates, each in a job of its own."""
    variables = {"XDG_CACHE_HOME": str(tmp_path), "COLLECTIVE_PROBE": "1"}
    file = tmp_path / "run.json"
    command = [*launch.command("native", 2), sys.executable, "train.py", "--steps", "2"]
    code, printed = launch.run(
        [*command, "--model", "mlp", "--json", str(file)],
        launch.environment(**variables),
        240,
    )
    assert code == 0, printed
    summary = json.loads(file.read_text())
    predicted = summary["predicted_all_reduce"]
    assert set(predicted) == {"native", "tf-multiworker"}, printed
    assert summary["backend"] == min(predicted, key=predicted.get)
    assert summary["chosen_because"].startswith("predicted all-reduce ")
    assert "auto: timing native on 2 ranks" in printed
    assert "tensors:" in printed and printed.count("<- chosen") == 1
    assert len(list(tmp_path.glob("collective/probes/*.json"))) == 1


@pytest.fixture
def on_gpus(monkeypatch):
    """As if each of four ranks had a GPU that TensorFlow can use."""
    monkeypatch.setattr(choose, "gpus", lambda: 4)
    monkeypatch.setattr(environment_gpus, "of_host", lambda: 4)
    monkeypatch.setattr(choose, "tensorflow_has_started", lambda: False)


def test_ranks_with_gpus_sum_on_them(on_gpus, monkeypatch):
    assert choose.by_rule(FOUR, Options()).name == "tf-multiworker"
    assert choose.by_rule(FOUR, Options(min_np=2)).name == "native"
    eight = Environment("mpirun", 0, 8, 0, 8)  # NCCL takes one rank a GPU
    assert choose.by_rule(eight, Options()).name == "native"
    monkeypatch.setattr(choose, "tensorflow_has_started", lambda: True)
    assert choose.by_rule(FOUR, Options()).name == "native"
    monkeypatch.setattr(choose, "gpus", lambda: 0)  # TensorFlow without CUDA
    assert choose.by_rule(FOUR, Options()).name == "native"


def test_more_devices_than_gpus_is_refused(monkeypatch):
    import tensorflow as tf

    from collective.backends import devices
    from collective.errors import UsageError

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["GPU:0"])
    assert devices.local_devices(1) == ["/gpu:0"]
    with pytest.raises(UsageError, match=r"3 devices .* sees 1 GPU"):
        devices.local_devices(3)
    two = Environment("mpirun", 1, 2, 1, 2)
    with pytest.raises(UsageError, match="2 ranks with 3 GPUs each"):
        devices._own(list(range(4)), two, 3)
    assert devices._own(list(range(4)), two, 2) == [2, 3]
    assert devices._own([0], two, 1) == [0]
