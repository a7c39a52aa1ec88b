"""Searches of hyperparameters on ranks: the trials, scores and models of one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from collective.errors import CollectiveError, UsageError
from collective.training.unedited.script_job import SEARCH, ScriptJob
from collective.training.unedited.searches import share_searches
from tests import launch
from tests.training.unedited.test_unedited import Ranks

HERE = Path(__file__).parent
KERAS = [sys.executable, "-m", "collective.launch", "-np", "2", "--keras"]
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?")
BAR = "\u2501"  # a progress bar is drawn again as time allows
# How long a trial, the search or a step has taken.
TIMES = re.compile(r"\[\d+h \d+m \d+s\]|elapsed time: .*|\d+m?s(/step)?")

BASE_TUNER = """
from keras_tuner.src import backend, utils
class BaseTuner:
    def __init__(self, oracle, overwrite=False):
        self.oracle = oracle
    def search(self):
        for number in "012":
            trial = self.oracle.populate_space(number)
            self._try_run_and_update_trial(trial)
    def _run_and_update_trial(self, trial):
        self.oracle.update_trial(trial["values"], self.run_trial(trial))
    def _try_run_and_update_trial(self, trial):
        try:
            self._run_and_update_trial(trial)
        except Exception as error:
            self.oracle.failed.append(error)
"""


@pytest.fixture
def keras_tuner(tmp_path, monkeypatch):
    """Stand for KerasTuner, which may be missing: return a function that imports it."""
    files = {
        "__init__.py": "",
        "src/__init__.py": "",
        "src/utils.py": "def save_json(path, obj): open(path, 'w').write(obj)\n",
        "src/backend/__init__.py": "from keras_tuner.src.backend import io\n",
        "src/backend/io.py": "def rmtree(path): pass\n",
        "src/engine/__init__.py": "",
        "src/engine/base_tuner.py": BASE_TUNER,
    }
    for name, text in files.items():
        path = tmp_path / "keras_tuner" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    mine = [name for name in sys.modules if name.startswith("keras_tuner")]
    for name in mine:
        monkeypatch.delitem(sys.modules, name)

    def tuner():
        from keras_tuner.src.engine.base_tuner import BaseTuner

        return BaseTuner

    yield tuner
    for name in [name for name in sys.modules if name.startswith("keras_tuner")]:
        del sys.modules[name]


class Oracle:
    """Proposes and keeps what a rank would by itself."""

    def __init__(self, rank):
        self.rank, self.kept, self.failed = rank, [], []

    def populate_space(self, trial_id):
        return {"status": "RUNNING", "values": f"{trial_id} of rank {self.rank}"}

    def update_trial(self, trial_id, metrics, step=0):
        self.kept.append((trial_id, metrics))


def of(rank, sent, tuner, measured):
    """Search on one rank; return what its oracle has kept."""
    job = ScriptJob(Ranks(rank, sent))
    vars(job)["by_strategy"] = False
    share_searches(job)
    kind = type("Tuner", (tuner(),), {"run_trial": lambda self, trial: measured})
    found = kind(Oracle(rank))
    found.search()
    assert job.used == {SEARCH}
    job.undo()
    return found.oracle.kept


def test_all_oracles_have_the_trials_and_the_metrics_of_rank_zero(keras_tuner):
    sent = []
    kept = [of(rank, sent, keras_tuner, {"loss": rank}) for rank in range(2)]
    assert kept[0] == kept[1] and not sent
    assert kept[1][2] == ("2 of rank 0", {"loss": 0})


def test_an_error_of_the_job_is_not_the_failure_of_a_trial(keras_tuner):
    def run_trial(self, trial):
        if trial["values"][0] == "0":
            raise ValueError("a failure of this trial")
        raise CollectiveError("rank 1 died", hint="none")

    job = ScriptJob(Ranks(0, []))
    vars(job)["by_strategy"] = False
    share_searches(job)
    tuner = type("Tuner", (keras_tuner(),), {"run_trial": run_trial})(Oracle(0))
    with pytest.raises(CollectiveError, match="rank 1 died"):
        tuner.search()
    assert [*map(type, tuner.oracle.failed)] == [ValueError, CollectiveError]
    job.undo()


def test_what_cannot_search_is_refused_by_name(keras_tuner):
    job = ScriptJob(Ranks(0, []))
    vars(job)["by_strategy"] = True
    share_searches(job)
    with pytest.raises(UsageError, match="'two' cannot search with KerasTuner"):
        keras_tuner()(Oracle(0)).search()
    job.undo()
    vars(job)["by_strategy"] = False
    job.folder = SimpleNamespace()
    share_searches(job)
    with pytest.raises(UsageError, match="continues from its own folder"):
        keras_tuner()(Oracle(0))
    job.undo()


def lines(text: str) -> list[str]:
    """Return the lines that a script has printed, without times, bars and ranks."""
    found = [line.removeprefix("[0] ") for line in text.splitlines() if BAR not in line]
    return [TIMES.sub("", line).rstrip() for line in found]


def assert_printed_alike(found: list[str], wanted: list[str], tolerance: float) -> None:
    assert [NUMBER.sub("", x) for x in found] == [NUMBER.sub("", x) for x in wanted]
    for one, other in zip(found, wanted, strict=True):
        numbers = [[*map(float, NUMBER.findall(line))] for line in (one, other)]
        np.testing.assert_allclose(*numbers, tolerance, tolerance, err_msg=other)


def compare(script: str, tmp_path: Path, *words: str, tolerance: float = 1e-9) -> None:
    """Check that ranks print what one process prints."""
    outputs = []
    # Keras' wrappers need scikit-learn, which tests/lean hides from Keras.
    env = launch.environment(PYTHONHASHSEED="0", PYTHONPATH=str(launch.ROOT))
    for start in ([sys.executable], KERAS):
        folder = tmp_path / "found"
        line = [*start, str(HERE / script), str(folder), *words]
        ended = launch.capture(line, 300, env=env)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        outputs.append(lines(ended.stdout))
        if folder.exists():
            folder.rename(tmp_path / str(len(start)))
    assert_printed_alike(outputs[1], outputs[0], tolerance)


LAUNCHES = [pytest.mark.launches, launch.NEEDS_CORE, launch.NOT_ON_RANKS]


def launches(*words: str, matrix: bool = False):
    marks = [*LAUNCHES, *[pytest.mark.matrix] * matrix]
    return pytest.param(words, marks=marks, id=" ".join(words))


@pytest.mark.parametrize(
    "words",
    [
        launches("random", "bayesian", "hyperband"),
        launches("grid", matrix=True),
    ],
)
def test_a_search_of_kerastuner(words, tmp_path):
    pytest.importorskip("keras_tuner")
    compare("search_script.py", tmp_path, *words)


@pytest.mark.parametrize("words", [launches(matrix=True)])
def test_a_search_of_scikit_learn(words, tmp_path):
    pytest.importorskip("sklearn")
    compare("scikit_script.py", tmp_path, *words)


@pytest.mark.parametrize("words", [launches(matrix=True)])
def test_a_search_of_autokeras(words, tmp_path):
    pytest.importorskip("autokeras")
    compare("autokeras_script.py", tmp_path, *words, tolerance=1e-4)
