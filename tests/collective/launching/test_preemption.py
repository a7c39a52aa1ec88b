"""A process that an elastic rank forks ends on SIGTERM."""

import subprocess
import sys

# A daemon that hangs in C, and whose handler never runs, and one in Python's own code. The
# first signal must end both, because multiprocessing does not send a second one.
FORKS = """
import multiprocessing, os, signal, threading, time
from collective.elastic.preemption import Preemption
fork = multiprocessing.get_context("fork")
def sleeps():
    time.sleep(60)
def held():
    signal.pthread_sigmask(signal.SIG_BLOCK, [])
    threading.Lock().acquire()
    fork.Lock().acquire(); lock = fork.Lock(); lock.acquire(); lock.acquire()
with Preemption() as preemption:
    daemons = [fork.Process(target=t, daemon=True) for t in (sleeps, held)]
    for one in daemons:
        one.start()
    def later():
        daemons.append(fork.Process(target=sleeps, daemon=True))
        daemons[-1].start()
    thread = threading.Thread(target=later)
    thread.start()
    thread.join()
    for one in daemons:
        one.terminate()
        one.join(60)
    codes = [one.exitcode for one in daemons]
    for one in daemons:
        one.kill()
    assert codes == [-signal.SIGTERM] * 3, codes
    assert not preemption.noticed
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.noticed
"""


def test_what_a_rank_forks_ends_by_sigterm():
    forks = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=300
    )
    assert forks.returncode == 0, forks.stderr
