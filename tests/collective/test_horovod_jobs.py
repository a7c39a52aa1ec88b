"""Tests in jobs of their own: examples, launchers, variables, timeline, run()."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from horovod_examples import BEYOND_HOROVOD, EXAMPLES

import collective
from collective.errors import CollectiveError
from tests.launch import STARTS_RANKS, capture, environment

HERE = Path(__file__).parent
pytestmark = STARTS_RANKS


def output_of(command, seconds=150, **variables):
    result = capture(
        command,
        seconds,
        env=environment(forked=True, COLLECTIVE_TIMEOUT="240", **variables),
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


def launched(*command):
    return [sys.executable, "-m", "collective.launch", "-np", "2", *command]


def came_to(word):
    """Return the outcome of each example for Horovod, with this word in it."""
    pytest.importorskip("tensorflow")
    driver = [sys.executable, str(HERE / "horovod_examples.py"), word]
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "--gloo"]
    command = (
        launched(*driver)
        if word == "collective"
        else [*horovodrun, "-np", "2", *driver]
    )
    printed = output_of(command)
    found = {
        name: json.loads(result)
        for name, result in re.findall(r"(\w+) came to (.*)", printed)
    }
    assert set(found) == {p.stem for p in EXAMPLES.glob("*.py")}
    return found


def test_examples():
    came_to("collective")


@pytest.mark.horovod
def test_examples_train_what_they_train_on_horovod_itself():
    """BEYOND_HOROVOD has the examples that Horovod itself cannot run, with its errors."""
    here, there = came_to("collective"), came_to("horovod")
    for name, error in BEYOND_HOROVOD.items():
        assert there.pop(name) == error
    for name, losses in there.items():
        # tape_loop sends float16, and Horovod also sums in float16.
        tolerance = 2e-3 if name == "tape_loop" else 1e-6
        assert here[name] == pytest.approx(losses, rel=tolerance), name


NOT_SUMMED = """
import keras, numpy as np, horovod.tensorflow as hvd
hvd.init()
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
model.set_weights([np.ones((1, 1))])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(np.full((8, 1), hvd.rank() + 1.0), np.zeros((8, 1)), verbose=0)
weights = hvd.allgather(model.get_weights()[0]).numpy().ravel()
print("weights differ:", bool(weights[0] != weights[1]))
"""


@pytest.mark.horovod
def test_horovods_own_optimizer_sums_nothing_on_keras_3():
    """Therefore it is absent from the examples that it shares with this project."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    command = [horovodrun, "--gloo", "-np", "2", sys.executable, "-c", NOT_SUMMED]
    assert output_of(command).count("weights differ: True") == 2


STEP = """
import keras, tensorflow as tf, collective.tensorflow as hvd
forgotten = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
try:
    forgotten.apply([tf.ones([1])], [keras.Variable([1.0])])
except ValueError as error:
    assert "has not been initialized; use hvd.init()" in str(error)
else:
    raise AssertionError("it trained without summing")
first = hvd.ProcessSet([0])
hvd.init(process_sets=[first])
assert first.size() == 1 and hvd.size_op(first.process_set_id) == 1
@tf.function
def step(x):
    return hvd.grouped_allreduce([x, x * 2.0, x * 3.0], op=hvd.Sum)
total = [float(t) for t in step(tf.constant(float(hvd.rank())))]
print("total", total, hvd.mpi_enabled(), hvd.mpi_enabled() and hvd.mpi_threads_supported())
"""


COMMUNICATORS = """
from mpi4py import MPI
hvd.init(MPI.COMM_WORLD)
mine = hvd.add_process_set(hvd.ProcessSet(MPI.COMM_WORLD.Split(hvd.rank() % 2)))
two = hvd.add_process_set([1, 2])
within = hvd.allreduce(tf.constant([2.0**hvd.rank()]), op=hvd.Sum, process_set=mine)
assert float(within[0]) == (2.0 if hvd.rank() == 1 else 5.0), within
assert mine.ranks == ([1] if hvd.rank() == 1 else [0, 2]) and mine.mpi_comm is not None
assert two.process_set_id == max(hvd.allgather_object(mine.process_set_id)) + 1
try:
    hvd.init(mine.mpi_comm)
except NotImplementedError as error:
    print("some:", error)
"""


@pytest.mark.matrix
def test_under_mpirun():
    pytest.importorskip("tensorflow")
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("needs Open MPI")
    command = [str(mpirun), "-np", "3", "--oversubscribe", sys.executable, "-c"]
    printed = output_of([*command, STEP + COMMUNICATORS])
    assert printed.count("total [3.0, 6.0, 9.0] True True") == 3
    assert printed.count("some: init(comm=...) with some of the ranks") == 3


LOST = """
import signal, sys
sys.stdout.flush()
@hvd.elastic.run
def train(state):
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(tf.constant(1.0))
    except tf.errors.OpError as error:
        print(type(error).__name__)
        raise
train(hvd.elastic.ObjectState(epoch=0))
"""


def test_horovods_variables(tmp_path):
    """The test has horovodrun's variables, then those that tune Horovod, then a lost worker."""
    pytest.importorskip("tensorflow")
    trace = tmp_path / "trace.json"
    ranks = []
    for rank in range(2):
        place = {
            "RANK": rank,
            "SIZE": 2,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": 2,
            "GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "GLOO_RENDEZVOUS_PORT": os.getpid(),
            "CONTROLLER": "gloo",
            "FUSION_THRESHOLD": 0,
            "CYCLE_TIME": 5,
            "TIMELINE": trace,
            "STALL_CHECK_TIME_SECONDS": 7,
            "STALL_SHUTDOWN_TIME_SECONDS": 50,
            "LOG_LEVEL": "warning",
        }
        variables = {f"HOROVOD_{name}": str(value) for name, value in place.items()}
        code = STEP + (
            "import os\n"
            "print(os.environ['COLLECTIVE_STALL_SECONDS'], "
            "os.environ['COLLECTIVE_TIMEOUT'])\n"
            "hvd.stop_timeline()\n" + LOST
        )
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    printed = [rank.communicate(timeout=600) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL], printed
    lost = r"rank 0: a worker was lost: rank 1 \(process \d+\) died"
    assert re.search(lost, printed[0][1]), printed[0][1]
    assert "HINT: start the job again" in printed[0][1]
    assert printed[0][0].splitlines()[-1] == "AbortedError"
    for out, _ in printed:
        assert "total [1.0, 2.0, 3.0]" in out and "7 50" in out
    assert printed[0][1].count("HOROVOD_CYCLE_TIME is ignored") == 1
    assert "is ignored" not in printed[1][1]
    assert "FUSION_THRESHOLD is" not in printed[0][1]
    names = [event["name"] for event in json.loads(trace.read_text())]
    # One tensor at a time: no fusion.
    assert sum("bucket" in name for name in names) == 3


def test_variables_that_hold_what_they_cannot(monkeypatch):
    from collective import horovod_variables

    for name, value in ("FUSION_THRESHOLD", "64MB"), ("LOG_LEVEL", "loud"):
        with monkeypatch.context() as patch:
            patch.setenv(f"HOROVOD_{name}", value)
            with pytest.raises(CollectiveError, match=f"{value} is no"):
                horovod_variables.honour()


KILLED = """
import os, signal, sys, time, numpy as np, collective
from collective import timeline
collective.init()
if collective.rank() == 0:
    timeline.start(sys.argv[1], limit_bytes=int(sys.argv[2]))
for turn in range(200):
    collective.allreduce(np.full(10 + turn, collective.rank()), name='with "quotes"')
if collective.rank() == 1:  # the end of rank 0, which writes, is its own
    time.sleep(1000)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("limit", [1 << 20, 5000])
def test_timeline_is_valid_when_killed_and_bounded(tmp_path, limit):
    trace = tmp_path / "trace.json"
    result = subprocess.run(
        launched(sys.executable, "-c", KILLED, str(trace), str(limit)),
        env=environment(),
        capture_output=True,
        timeout=240,
    )
    assert result.returncode == 128 + signal.SIGKILL
    events = json.loads(trace.read_text())
    assert trace.stat().st_size <= limit
    calls = [event for event in events if event["ph"] == "X"]
    assert calls[0]["name"] == 'with "quotes"' and calls[0]["args"]["bytes"] == 80
    assert all(event["dur"] > 0 for event in calls)
    if limit > 5000:
        assert len(calls) == 200
    else:
        assert 5 < len(calls) < 200 and events[-1]["name"] == "the trace is full"


def double_of_rank(factor, *, plus):
    import numpy as np

    collective.init()
    mine = np.array([factor * collective.rank() + plus])
    return collective.rank(), float(collective.allreduce(mine, collective.Sum)[0])


def test_run_calls_a_function_on_every_rank():
    results = collective.run(double_of_rank, (2,), {"plus": 1}, np=3)
    assert results == [(rank, 9.0) for rank in range(3)]
    here = "closures are pickled by value"
    assert collective.run(lambda: here, num_proc=1, verbose=True) == [here]


def test_run_on_hosts_that_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = collective.run(
        double_of_rank, (2,), {"plus": 0}, np=2, hosts="localhost:2"
    )
    assert results == [(0, 2.0), (1, 2.0)]
    assert not list(tmp_path.iterdir())
    file = tmp_path / "hosts"
    file.write_text("localhost slots=2\n")
    options = {"hostfile": str(file), "output_filename": str(tmp_path / "out")}
    assert collective.run(os.getpid, np=2, disable_cache=True, **options)
    assert (tmp_path / "out").is_dir()


def test_run_reports_what_a_rank_raised():
    def fails():
        collective.init()
        if collective.rank() == 1:
            raise ValueError("on rank 1 only")
        collective.barrier()

    with pytest.raises(CollectiveError, match=r"rank 1 failed[^$]*on rank 1 only"):
        collective.run(fails, np=2)
    with pytest.raises(CollectiveError, match=r"failed[^$]*on rank 1 only"):
        collective.run(fails, np=2, min_np=2)
    with pytest.raises(CollectiveError, match="at least 1"):
        collective.run(fails, np=0)


COMES_AND_GOES = """
import os, signal, sys, time
import numpy as np
import collective.tensorflow as hvd

hvd.init()
first = int(os.environ["COLLECTIVE_RANK"])
assert hvd.rank() == {0: 0, 1: 1, 2: 1}[first]  # once init() returns, in the job

@hvd.elastic.run
def train(state):
    while state.met < 2 or hvd.size() == 2:
        if first == 0 and state.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        workers = int(hvd.allreduce(np.ones(2), op=hvd.Sum)[0])
        state.step += 1
        state.total += workers if state.step <= 3 else 0
        state.met += state.step > 4 and workers == 2
        if first == 2 and state.met == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        state.commit()
        time.sleep(0.01)
    return state.total, state.met

state = hvd.elastic.ObjectState(step=0, total=0, met=0)
print("ended", train(state), hvd.rank(), hvd.size())
"""


def test_an_elastic_function_goes_on_while_workers_come_and_go():
    # Rank 0 is killed; rank 2 is started in its place, joins, and leaves again.
    pytest.importorskip("tensorflow")
    command = [sys.executable, "-m", "collective.launch", "-np", "2", "--min-np", "1"]
    ended = capture(
        [*command, "--max-np", "2", sys.executable, "-c", COMES_AND_GOES], 150
    )
    assert ended.returncode == 0, ended.stderr
    # Three steps of two workers before, and two after.
    assert ended.stdout == "[1] ended (6, 2) 0 1\n", ended.stdout
