"""Measures how long an elastic function takes to continue without a killed worker.

    python benchmarks/recovery.py --runs 5

The same script (``WORKER``) runs under ``horovodrun --min-np`` with Horovod and under
``collective.launch --min-np`` with the drop-in: the last of three workers kills itself
(``kill -9``) in a step. The time lasts from there to the end of the next step that the others
finish. Contestants take turns. Horovod needs a host for each worker, because it never returns
to one on which a worker failed: these are three names of this host. Its workers meet again
only after ``--gloo-timeout-seconds``, 30 by default; so one contestant has 3.
"""

import os
import signal
import socket
import statistics
import sys
import tempfile
from pathlib import Path

import workloads

sys.path.insert(0, str(workloads.ROOT))
from tests.launch import run

STEPS = 60
WORKER = """
import importlib, os, signal, sys, time
import tensorflow as tf
hvd = importlib.import_module(sys.argv[1])
hvd.init()
log = open(sys.argv[2], "a", buffering=1)

@hvd.elastic.run
def train(state):
    while state.step < int(sys.argv[3]):
        if hvd.size() == 3 and hvd.rank() == 2 and state.step == 20:
            print("killed", time.time(), file=log)
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(tf.ones(1000), op=hvd.Sum, name="gradient")
        time.sleep(0.01)
        state.step += 1
        state.commit()
        if hvd.rank() == 0:
            print(hvd.size(), time.time(), file=log)

train(hvd.elastic.TensorFlowState([tf.Variable(0.0)], step=0))
"""


def seconds(launch: list[str], module: str) -> float:
    """Return the seconds from the kill to the end of the next step."""
    with tempfile.TemporaryDirectory() as folder:
        script, log = Path(folder, "worker.py"), Path(folder, "log")
        script.write_text(WORKER)
        log.write_text("")
        command = [*launch, sys.executable, str(script), module, str(log), str(STEPS)]
        _, printed = run(command, dict(os.environ), 180)
        lines = [line.split() for line in log.read_text().splitlines()]
    killed = [float(time) for what, time in lines if what == "killed"]
    on = [float(time) for what, time in lines if what == "2"]
    if not killed or not on:
        sys.exit(f"{module} did not continue:\n{printed[-6000:]}")
    return on[0] - killed[0]


def main() -> None:
    """Run the rounds and print a line for each."""
    parser = workloads.parser(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    # Like Ctrl-C, so that the running job ends, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ours = [*workloads.LAUNCH, "3", "--min-np", "2"]
    hosts = f"localhost:1,127.0.0.1:1,{socket.gethostname()}:1"
    theirs = ["horovodrun", "--gloo", "-np", "3", "--min-np", "2", "-H", hosts]
    hasty = [*theirs, "--gloo-timeout-seconds", "3"]
    ways = {
        "Horovod Elastic": lambda: seconds(theirs, "horovod.tensorflow"),
        "with 3 s": lambda: seconds(hasty, "horovod.tensorflow"),
        "the drop-in": lambda: seconds(ours, "collective.tensorflow"),
    }
    found = workloads.take_turns(ways, options.runs)
    print(f"{'':>16} {'median s':>9} {'lowest':>7} {'highest':>8}")
    for name, times in found.items():
        middle = statistics.median(times)
        print(f"{name:>16} {middle:9.3f} {min(times):7.3f} {max(times):8.3f}")


if __name__ == "__main__":
    main()
