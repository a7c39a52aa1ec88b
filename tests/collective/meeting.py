"""Ranks that meet on one host, started without a launcher."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests import launch

MEET = """
    import collective
    try:
        collective.init()
        collective.barrier()
        print("met")
        for line in open("/proc/self/maps"):
            if " rw-s " in line:
                print(line.split(maxsplit=5)[5].strip())
    except collective.library.CollectiveError as error:
        print(error)
"""


def rank(number, job, of=2, program=MEET, **more):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=launch.environment(
            COLLECTIVE_RANK=str(number),
            COLLECTIVE_SIZE=str(of),
            COLLECTIVE_LOCAL_RANK=str(number),
            COLLECTIVE_LOCAL_SIZE=str(of),
            COLLECTIVE_JOB=job,
            COLLECTIVE_START_TIMEOUT="60",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **more,
    )


def names_of(pid):
    """Return the names of a process' Unix sockets in the abstract namespace."""
    opened = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            opened.add(os.readlink(file))
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [
        words[7][1:]
        for words in sockets[1:]
        if len(words) > 7 and f"socket:[{words[6]}]" in opened
    ]


def name_of_job(job):
    """Wait until rank 0 of a job listens; return the name of its socket."""
    waiting = rank(0, job)
    try:
        while not (names := names_of(waiting.pid)):
            assert waiting.poll() is None
        return names[0]
    finally:
        waiting.kill()
        waiting.communicate()
