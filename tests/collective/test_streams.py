"""Standard streams that are closed, unread, or unable to print some letters."""

import sys
from pathlib import Path

import pytest

from tests.launch import capture

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys
from collective.streams import open_streams, outlive_readers
open_streams(); outlive_readers()
for word in ("gr\\u00fcn", "rot"):
    print(word, flush=True)
os.fstat(0), os.fstat(1), os.fstat(2)
os.write(int(sys.argv[1]), b"to its end")
"""


def run(redirected, *options):
    """Run the program with a shell; return its exit code, and the text that it could write."""
    words = [sys.executable, *options, "-c", '"$PROGRAM"', "3"]
    done = capture(
        ["sh", "-c", f"{' '.join(words)} {redirected}"],
        env={"PROGRAM": PROGRAM, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_closed_streams_are_opened(closed):
    assert run(f"3>&1 {closed}") == (0, "gr\\xfcn\nrot\nto its end", "")


def test_what_is_printed_is_dropped_where_there_is_no_output():
    assert run("3>&1 >&-")[:2] == (0, "to its end")


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_a_full_disk_is_reported_once_and_ends_nothing(options):
    code, out, err = run("3>&1 >/dev/full", *options)
    assert (code, out) == (0, "to its end")
    assert err.count("warning: ") == 1 and "No space left on device" in err
