"""``--dry-run`` with ``--keras``: says what the first step would hold, and trains nothing."""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest

from collective import backends
from collective.errors import UsageError
from collective.fit_options import FitOptions
from collective.training.steps.distributed import distributed
from collective.training.steps.settings import StepSettings
from collective.training.unedited.dry_run import DryRun
from tests import launch

pytestmark = pytest.mark.usefixtures("clean_keras")

SCRIPT = """
import keras, numpy as np
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("adam", "mse")
print("before fit")
model.fit(np.ones((30, 4)), np.ones((30, 1)), batch_size=10, verbose=0)
print("after fit")
"""


def model(**options) -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(64, "tanh", name=f"hidden_{i}") for i in range(2)]
    made = keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])
    made.compile("adam", "mse", **options)
    return made


def test_ends_before_the_first_step_and_describes_it(capfd):
    backend = backends.get("single")
    settings = StepSettings(backend, FitOptions(), is_kept=True)
    made = model()
    before = made.get_weights()
    with (
        distributed(settings, [DryRun(backend)]),
        pytest.raises(SystemExit) as ended,
    ):
        made.fit(np.ones((20, 4)), np.ones((20, 1)), batch_size=10, verbose=0)
    assert not ended.value.code
    for old, new in zip(before, made.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(made.optimizer.iterations) == 0
    said = capfd.readouterr().out
    assert "dry run: train_step of 'sequential" in said
    assert "rows: 10 a step, 10 on each of 1 replicas" in said
    assert "hidden_0" in said
    assert "1 sums of" in said
    assert "by accumulate: 1: " in said


@pytest.mark.parametrize(("eager", "is_ours"), [(True, False), (False, True)])
def test_what_it_cannot_describe_is_refused(eager, is_ours):
    dry_run = DryRun(backends.get("single"))
    with pytest.raises(UsageError, match="cannot describe"):
        dry_run.check(model(run_eagerly=eager), is_ours)


@pytest.mark.launches
def test_all_ranks_end_with_exit_code_zero(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "collective.launch", "-np", "2", "--dry-run"]
    command += ["--keras", str(script)]
    code, done = launch.run(command, launch.environment(), 60)
    assert code == 0, done
    assert "before fit" in done
    assert "after fit" not in done
    assert "rows: 10 a step, 5 on each of 2 replicas" in done
    assert "with shard_optimizer" in done
