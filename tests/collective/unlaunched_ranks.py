"""Ranks of a job that no launcher watches, and the beginnings of their programs."""

import os
import subprocess
import sys
import textwrap
import time

from tests.launch import PYTHONPATH


class Ranks:
    """Processes of one job, started without a launcher, which would end the rest."""

    def __init__(self, size, code, before=(), **variables):
        self.job = f"test {os.getpid()} {time.monotonic_ns()}"
        self.processes = []
        self.before = before  # words before the command
        self.add(range(size), size, code, **variables)

    def add(self, ranks, size, code, **variables):
        """Start more ranks."""
        self.processes += [
            subprocess.Popen(
                [*self.before, sys.executable, "-c", textwrap.dedent(code)],
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    "COLLECTIVE_RANK": str(rank),
                    "COLLECTIVE_SIZE": str(size),
                    "COLLECTIVE_LOCAL_RANK": str(rank),
                    "COLLECTIVE_LOCAL_SIZE": str(size),
                    "COLLECTIVE_JOB": self.job,
                    "COLLECTIVE_TIMEOUT": "30",
                    **variables,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]

    def finish(self, timeout=240):
        """Return exit code, output and errors of each."""
        try:
            outputs = [
                process.communicate(timeout=timeout) for process in self.processes
            ]
        finally:
            for process in self.processes:
                process.kill()
        return [
            (process.returncode, out, err)
            for process, (out, err) in zip(self.processes, outputs, strict=True)
        ]


PRELUDE = """
    import os, signal, sys, time
    import numpy as np
    import collective
    collective.init()
    rank, size = collective.rank(), collective.size()
"""
# With these, a rank waits for an action of another, however slow that is: ``post`` makes
# a file in the folder of the variable POSTED, ``hear`` waits until the file exists.
POST = """
    def post(what):
        open(os.path.join(os.environ["POSTED"], what), "w").close()

    def hear(*posted):
        for what in posted:
            while not os.path.exists(os.path.join(os.environ["POSTED"], what)):
                time.sleep(0.01)
"""
