"""Plain mistakes, and their messages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from collective.environment import unknown
from collective.hosts import Host
from collective.launch import remote_shell
from collective.launch.__main__ import main
from collective.launch.remote_shell import RemoteShell
from tests import launch

DOCS = launch.ROOT / "docs" / "reference" / "environment.md"


def test_a_misspelt_variable_is_named(monkeypatch, capsys):
    monkeypatch.setenv("COLLECTIVE_TIMOUT", "5")
    assert main(["-np", "1", "--dry-run", "true"]) == 0
    assert "COLLECTIVE_TIMOUT is not a variable" in (err := capsys.readouterr().err)
    assert "did you mean COLLECTIVE_TIMEOUT?" in err


def test_a_process_without_our_launcher_names_it_once():
    environment = {k: v for k, v in os.environ.items() if k != "COLLECTIVE_BOARD"}
    code = "from collective.environment import detect_rank as d; d(); d()"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"COLLECTIVE_RECODER": "off"},
        capture_output=True,
        text=True,
    )
    assert ended.stderr.count("did you mean COLLECTIVE_RECORDER?") == 1, ended.stderr


def test_every_variable_of_the_documentation_is_known():
    written = set(re.findall(rf"{unknown.PREFIX}([A-Z_]+)", DOCS.read_text()))
    assert written - {""} == unknown.KNOWN - {"BUILD_CORE"} | written & {"BUILD_CORE"}
    assert unknown.warnings({f"COLLECTIVE_{name}": "" for name in unknown.KNOWN}) == []


def test_the_hint_of_an_unreachable_host_is_a_line_that_one_types():
    command = RemoteShell(port=2222).command(Host("node1"), "collective.doctor", "-x")
    hint = remote_shell.hint(command)
    assert hint.endswith("-p 2222 node1 true") and len(hint) < 120


SPAWNS = """
import multiprocessing, sys
from collective.environment import detect_rank
detect_rank()
multiprocessing.get_context("spawn").Pool(1).map(abs, [1])
"""


def test_a_pool_without_a_main_guard_is_refused_by_name(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNS)
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240
    )
    assert "would train, too\nHINT: put the script's code under" in ended.stderr
    assert ended.returncode == -signal.SIGTERM and len(ended.stderr) < 1000


UNEQUAL = """
import keras, numpy as np, collective
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
collective.fit(model, np.ones((8, 4)), np.ones((9, 1)), batch_size=4, checkpoint="ck")
"""


@pytest.mark.launches
def test_a_plain_mistake_leaves_no_dump_and_no_hint_of_a_checkpoint(tmp_path: Path):
    ended = subprocess.run(
        [*launch.command("native", 2), sys.executable, "-c", UNEQUAL],
        cwd=tmp_path,
        env=launch.environment(COLLECTIVE_RECORDER=""),
        capture_output=True,
        text=True,
        timeout=600,  # on a busy machine
    )
    assert ended.returncode and "HINT: " in ended.stderr, ended.stderr
    assert "continues from" not in ended.stderr, ended.stderr
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == []
