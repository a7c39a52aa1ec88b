"""The core on processors with fewer instructions than this one: ``apt-get install qemu-user``."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests import launch

CODE = """
import numpy as np, collective
collective.init()
ones = np.full(1000, collective.rank() + 1.0, np.float32)
assert (collective.allreduce(ones, collective.Sum) == 3).all()
assert (collective.broadcast(ones, 1) == 2).all()
"""


@pytest.mark.launches
@pytest.mark.skipif(
    not shutil.which("qemu-x86_64"), reason="qemu-user is not installed"
)
@pytest.mark.parametrize("processor", ["Nehalem", "Haswell"])  # no AVX; no AVX-512
def test_runs_on_older_processors(processor):
    emulated = ["qemu-x86_64", "-cpu", processor, sys.executable, "-c", CODE]
    command = [*launch.command("native", 2), *emulated]
    code, printed = launch.run(command, launch.environment(), 100)
    assert code == 0, printed
