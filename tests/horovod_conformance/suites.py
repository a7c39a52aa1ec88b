"""Runs Horovod's test files on two ranks, and finds the tests that fail."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.horovod_conformance.launch import Job, run

NAMES = (
    "test_tensorflow.py",
    "test_tensorflow_process_sets.py",
    "test_adasum_tensorflow.py",
    "test_tensorflow2_keras.py",
    "test_tensorflow2_keras_process_sets.py",
)
_PYTEST = """
import os, sys, pytest
name, folder = sys.argv[1:]
rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
report = f"--junit-xml={folder}/{name}.{rank}.xml"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", report, name]))
"""


@dataclasses.dataclass
class Outcome:
    """The outcome of a test file on two ranks.

    Attributes:
        summary: Numbers of passed, failed and skipped tests, on the worse rank.
        failed: The message of each test that failed on any rank.
    """

    summary: str
    failed: dict[str, str]


def outcome(copy: Path, checkout: Path, job: Job, suite: str) -> Outcome:
    """Run a test file of the copy; a rank without a report counts as a failure."""
    folder = copy / "test/parallel"
    reports = copy / "reports" / job.name
    reports.mkdir(parents=True, exist_ok=True)
    path = [str(folder), str(copy / "test/utils")]
    if job.word != "horovod":
        path.append(str(checkout))  # the tests use parts of the launcher
    command = [sys.executable, "-c", _PYTEST, suite, str(reports)]
    ended = run([*job.words, *command], folder, job, path)
    failed: dict[str, str] = {}
    counts = []
    for rank in range(2):
        report = reports / f"{suite}.{rank}.xml"
        if not report.exists():
            failed[f"rank {rank}"] = "no report\n" + ended.tail
            continue
        cases = ElementTree.parse(report).getroot().findall(".//testcase")
        bad = {
            case.attrib["name"]: message for case in cases if (message := _why(case))
        }
        failed |= bad
        skipped = sum(case.find("skipped") is not None for case in cases)
        counts.append((len(bad), len(cases) - len(bad) - skipped, skipped))
    if ended.code is None:
        failed["all"] = ended.tail
    bad_, passed, skipped = max(counts, default=(0, 0, 0))
    return Outcome(f"{passed} passed, {bad_} failed, {skipped} skipped", failed)


def _why(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            lines = found.attrib.get("message", "").splitlines() or [kind]
            return os.path.basename(lines[0])[:150] if "/" in lines[0] else lines[0]
    return ""
