"""Random faults in unedited scripts: ``python -m tests.chaos.scripts --seconds 300 --seed 1``.

Each round runs a script with several trainings on 1 to 3 ranks. Ranks are killed, stopped and
interrupted at random moments, the whole job gets a Ctrl-C, a callback raises an error on every
rank or on one, others take the place of the dead (``--max-np``), and jobs that have ended are
resumed (``--resume``) on another number of ranks. The result must be that of one process, and
a job must end as the fault demands. The script is slow as long as faults are to come.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from tests import launch
from tests.chaos import rounds
from tests.training.unedited.small_model import MAKE

SCRIPT = (
    """
import os, json, time, keras, numpy as np
keras.config.set_floatx("float64")
keras.utils.set_random_seed(3)
x, y = np.random.normal(size=(60, 5)), np.random.normal(size=(60, 1))
"""
    + MAKE
    + """def number(name):
    with open(name) as file:
        return float(file.read())
class Slow(keras.callbacks.Callback):
    batches = 0
    def on_train_batch_end(self, batch, logs=None):
        if Slow.batches == 0:
            print("TRAINS", flush=True)
        time.sleep(number("pace"))
        Slow.batches += 1
        if Slow.batches == number("fails"):
            raise ValueError("of a callback")
        if os.path.exists("fails-one") and "COLLECTIVE_RANK" in os.environ:
            try:
                os.rename("fails-one", "failed")
            except OSError:
                return
            raise ValueError("of a callback")
    on_test_batch_end = on_predict_batch_end = on_train_batch_end
more = [
    Slow(),
    keras.callbacks.EarlyStopping("loss", patience=99, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.01),
    keras.callbacks.ModelCheckpoint("best.keras", "loss", save_best_only=True),
]
first, second = make(), make()
h = first.fit(x, y, batch_size=9, epochs=3, validation_split=0.2, verbose=0, callbacks=more)
best = keras.models.load_model("best.keras")
first.save("first.keras")
os.replace("first.keras", "last.keras")
seen = first.predict(x, batch_size=9, verbose=0, callbacks=[Slow()])
g = second.fit(x, seen, epochs=2, verbose=0, callbacks=[Slow()], steps_per_epoch=3)
for _ in range(4):
    second.train_on_batch(x[:32], y[:32])
    time.sleep(number("pace"))
print("RESULT", json.dumps([
    h.history, g.history, first.evaluate(x, y, verbose=0, callbacks=[Slow()]),
    [float(w.sum()) for m in (first, second, best) for w in m.get_weights()],
]), flush=True)
"""
)
#: The number of batches that the script's callback sees.
BATCHES = 41
#: Seconds that a batch takes while faults are to come; the script takes 10 to 40 s.
PACES = [0.2, 0.5, 0.9]
#: The most seconds from the first batch, and from one fault, to the next one.
LONGEST = 7.0
KINDS = ["kill"] * 4 + ["stop", "interrupt-job", "interrupt-rank", "fail", "fail-one"]
#: Seconds for which a job may start or end, on a machine with other work.
PATIENCE = 400.0
ERRORS = ("KeyboardInterrupt", "ValueError: of a callback")


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


def prepare(folder: Path) -> None:
    """Write the script and the files by which it is slowed down and made to fail."""
    for name, text in {"script.py": SCRIPT, "pace": "0", "fails": "0"}.items():
        (folder / name).write_text(text)


def ranks_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that run the script in ``folder``, which servers have forked."""
    found = []
    for server in psutil.Process().children():
        try:
            if any(word.endswith("forkserver.py") for word in server.cmdline()):
                found += [p for p in server.children() if p.cwd() == str(folder)]
        except psutil.Error:
            continue
    return found


@dataclass
class Job:
    """A job of a round, and what has struck it.

    Attributes:
        process: The launcher.
        output: What the job prints.
        struck: The faults that have struck it.
    """

    folder: Path
    process: subprocess.Popen
    output: Path
    struck: list[str] = field(default_factory=list)

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def await_(self, seconds: float, text: str | None = None) -> bool:
        """Wait for a while, or for a text; return whether the job still runs."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if text is not None and text in self.printed():
                break
            time.sleep(0.05)
        return self.process.poll() is None

    def strike(self, rng: random.Random, kind: str) -> None:
        """Have a fault strike the job, if there is somebody to strike."""
        if kind == "fail-one":
            (self.folder / kind).touch()
            if self.await_(5):
                (self.folder / kind).unlink(missing_ok=True)
            if (self.folder / "failed").exists():
                (self.folder / "failed").unlink()
                self.struck.append(kind)
            return
        ranks = ranks_of(self.folder)
        if not ranks:
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            victim = rng.choice(ranks)
            if kind == "kill":
                victim.kill()
            elif kind == "stop":
                victim.suspend()
                time.sleep(rng.uniform(0.2, 4))
                victim.resume()
            elif kind == "interrupt-rank":
                victim.send_signal(signal.SIGINT)
            else:
                os.kill(self.process.pid, signal.SIGINT)
            self.struck.append(kind)

    def check(self) -> None:
        """Compare how the job has ended with what the faults demand."""
        code, printed = self.process.returncode, self.printed()
        errors = [text for text in ERRORS if text in printed]
        if "Traceback" in printed:
            assert errors, "it shows another error"
        if not self.struck or set(self.struck) == {"stop"}:
            assert code == 0 and not errors, f"exit code {code}"
        wanted = {0, 1}
        if set(self.struck) & {"interrupt-job", "interrupt-rank"}:
            wanted |= {128 + signal.SIGINT}
        if "kill" in self.struck:
            wanted |= {128 + signal.SIGKILL}
        assert code in wanted, f"exit code {code}"
        if not {"kill"} & set(self.struck) and code == 1:
            assert errors, "it names no reason"


def start(rng: random.Random, folder: Path, log: list[str]) -> Job:
    """Start a job on 1 to 3 ranks, of one of the kinds that go on without some of them."""
    size, grows = rng.choice([1, 2, 2, 2, 3]), rng.random() < 0.6
    elastic = size > 1 and rng.random() < 0.8
    words = [sys.executable, "-m", "collective.launch", "-np", str(size)]
    if elastic:
        words += ["--min-np", "1", *(["--max-np", str(size)] if grows else [])]
        words += ["--blacklist-cooldown-range", "1", "2"] if grows else []
    words += ["--keras", "--resume", "states", "script.py"]
    log.append(f"{size} ranks, elastic: {elastic}, grows: {grows and elastic}")
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=launch.environment(
                forked=True, PYTHONHASHSEED="0", COLLECTIVE_RESUME_SECONDS="0.3"
            ),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(folder, process, output)


def one_job(rng: random.Random, folder: Path, faults: list[str], log: list[str]) -> Job:
    """Run one job to its end, and strike it with the first of ``faults``, until one ends it."""
    (folder / "pace").write_text(str(rng.choice(PACES)) if faults else "0")
    fails = bool(faults) and faults[0] == "fail"
    (folder / "fails").write_text(str(rng.randint(1, BATCHES)) if fails else "0")
    job = start(rng, folder, log)
    try:
        if fails:
            job.await_(120, ERRORS[1])
            job.struck += [faults.pop(0)] if ERRORS[1] in job.printed() else []
        elif faults and rng.random() < 0.15:
            job.await_(rng.uniform(0, 6))  # while it starts
        else:
            job.await_(PATIENCE, "TRAINS")
        while faults and not fails and job.await_(rng.uniform(0, LONGEST)):
            if faults[0] == "fail":
                break
            job.strike(rng, faults.pop(0))
        if not faults:
            (folder / "pace").write_text("0")
        job.await_(PATIENCE)
        assert job.process.poll() is not None, "it hangs"
        job.check()
    except AssertionError as error:
        log.append(f"struck: {job.struck}")
        raise AssertionError(f"{error}: {log}\n{job.printed()[-6000:]}") from error
    finally:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()
    log.append(f"{', '.join(job.struck)}: exit code {job.process.returncode}")
    return job


def one_round(seed: int, folder: Path, wanted: list[float], hits: list[int]) -> str:
    """Run jobs until one comes to the end of the script.

    Args:
        wanted: The numbers that one process prints.
        hits: The number of faults that were drawn, and of those that have struck, so far.

    Raises:
        AssertionError: The result is not that of one process, or a job does not end as its
            faults demand.
    """
    rng, log = random.Random(seed), list[str]()
    prepare(folder)
    faults = rng.choices(KINDS, k=rng.randint(1, 4))
    hits[0] += len(faults)
    for _ in range(12):
        job = one_job(rng, folder, faults, log)
        hits[1] += len(job.struck)
        found = result_of(job.printed())
        if found is not None:
            np.testing.assert_allclose(found, wanted, 1e-8, err_msg=f"{log}")
            return "; ".join(log)
    raise AssertionError(f"it comes to no end: {log}")


def main(arguments: list[str] | None = None) -> int:
    """Run rounds; return 1 if one failed."""
    options = rounds.parser("python -m tests.chaos.scripts").parse_args(arguments)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started by a shell with &
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hits = [0, 0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[launch.FORKSERVER] = str(folder / str(os.getpid()))
        prepare(folder)
        env = launch.environment(forked=True, PYTHONHASHSEED="0")
        code, printed = launch.run([sys.executable, "script.py"], env, 200, folder)
        assert code == 0, printed
        wanted = result_of(printed)
        assert wanted is not None
        count, found = rounds.run(
            options, lambda seed, at: one_round(seed, at, wanted, hits)
        )
    print(
        f"{count} rounds of scripts, {hits[1]} of {hits[0]} faults struck, {found} findings"
    )
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
