"""Random faults in unedited scripts: ``python -m tests.chaos.scripts --seconds 300 --seed 1``.

Each round runs a script with several trainings on 1 to 3 ranks. Ranks are killed and stopped
at random moments, others take their place (``--max-np``), and jobs that have ended are
resumed (``--resume``) on another number of ranks. The result must be that of one process.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tests import launch
from tests.chaos import rounds
from tests.training.unedited.small_model import MAKE

SCRIPT = (
    """
import json, os, time, keras, numpy as np
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
x, y = np.random.normal(size=(60, 5)), np.random.normal(size=(60, 1))
"""
    + MAKE
    + """class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(float(os.environ.get("PACE", 0)))
    on_test_batch_end = on_predict_batch_end = on_train_batch_end
more = [
    Slow(),
    keras.callbacks.EarlyStopping("loss", patience=99, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.01),
    keras.callbacks.ModelCheckpoint("best.keras", "loss", save_best_only=True),
]
first, second = make(), make()
h = first.fit(x, y, batch_size=9, epochs=6, validation_split=0.2, verbose=0, callbacks=more)
best = keras.models.load_model("best.keras")
first.save("first.keras")
os.replace("first.keras", "last.keras")
seen = first.predict(x, batch_size=9, verbose=0, callbacks=[Slow()])
g = second.fit(x, seen, epochs=2, verbose=0, callbacks=[Slow()], steps_per_epoch=3)
for _ in range(8):
    second.train_on_batch(x[:32], y[:32])
    time.sleep(float(os.environ.get("PACE", 0)))
print("RESULT", json.dumps([
    h.history, g.history, second.evaluate(x, y, verbose=0, callbacks=[Slow()]),
    [float(w.sum()) for w in (*first.get_weights(), *best.get_weights())],
]), flush=True)
"""
)
PACE = "0.5"


def flat(result: object) -> list[float]:
    if isinstance(result, dict):
        return [n for value in result.values() for n in flat(value)]
    if isinstance(result, list):
        return [n for value in result for n in flat(value)]
    return [float(str(result))]


def result_of(printed: str) -> list[float] | None:
    """Return the numbers that a script has printed, or None if it has printed none."""
    lines = [line for line in printed.splitlines() if "RESULT " in line]
    assert len(lines) < 2, printed
    return flat(json.loads(lines[0].split("RESULT ")[1])) if lines else None


def ranks_of(job: subprocess.Popen) -> list[psutil.Process]:
    """Return the processes that run the script."""
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if "script.py" in process.cmdline()[-1:] and process.num_threads() > 8:
                found.append(process)
        except psutil.Error:
            continue
    return found


def one_job(rng: random.Random, folder: Path, log: list[str]) -> str:
    """Run one job with faults to its end; return what it has printed."""
    size, grows = rng.choice([1, 2, 2, 3]), rng.random() < 0.6
    elastic = size > 1 and rng.random() < 0.8
    words = [sys.executable, "-m", "collective.launch", "-np", str(size)]
    if elastic:
        words += ["--min-np", "1", *(["--max-np", str(size)] if grows else [])]
        words += ["--blacklist-cooldown-range", "1", "2"] if grows else []
    words += ["--keras", "--resume", "states", "script.py"]
    variables = {"PACE": PACE, "COLLECTIVE_RESUME_SECONDS": "0.3"}
    faults = rng.randrange(4)
    log.append(f"{size} ranks, elastic: {elastic}, grows: {grows and elastic}")
    with (folder / "output").open("w+") as output:
        job = subprocess.Popen(
            words,
            cwd=folder,
            env=launch.environment(PYTHONHASHSEED="0", **variables),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for _ in range(faults):
                deadline = time.monotonic() + rng.uniform(3, 20)
                while job.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                ranks = ranks_of(job) if job.poll() is None else []
                if not ranks:
                    continue
                victim, kind = rng.choice(ranks), rng.choice(["kill", "kill", "stop"])
                log.append(f"{kind} {victim.pid}")
                if kind == "kill":
                    victim.kill()
                else:
                    victim.suspend()
                    time.sleep(rng.uniform(0.2, 4))
                    victim.resume()
            job.wait(300)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                log.append("it hangs")
        output.seek(0)
        return output.read()


def one_round(seed: int, folder: Path, wanted: list[float]) -> str:
    """Run jobs until one comes to the end of the script.

    Raises:
        AssertionError: The result is not that of one process, or a job hangs.
    """
    rng, log = random.Random(seed), list[str]()
    (folder / "script.py").write_text(SCRIPT)
    printed = ""
    for _ in range(12):
        printed = one_job(rng, folder, log)
        assert "it hangs" not in log, f"{log}\n{printed[-6000:]}"
        assert "Traceback" not in printed, f"{log}\n{printed[-6000:]}"
        found = result_of(printed)
        if found is not None:
            np.testing.assert_allclose(found, wanted, 1e-8, err_msg=f"{log}")
            return "; ".join(log)
    raise AssertionError(f"it comes to no end: {log}\n{printed[-6000:]}")


def main(arguments: list[str] | None = None) -> int:
    """Run rounds; return 1 if one failed."""
    options = rounds.parser("python -m tests.chaos.scripts").parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(SCRIPT)
        env = launch.environment(PYTHONHASHSEED="0")
        code, printed = launch.run(
            [sys.executable, "script.py"], env, 200, Path(folder)
        )
        assert code == 0, printed
        wanted = result_of(printed)
        assert wanted is not None
    count, found = rounds.run(options, lambda s, at: one_round(s, at, wanted))
    print(f"{count} rounds of scripts, {found} findings")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
