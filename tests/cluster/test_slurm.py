"""A Slurm of several nodes without ssh: srun starts the daemons of mpirun."""

from __future__ import annotations

import re
import sys

import pytest

from tests.cluster.nodes import ROOT

PYTHON = sys.executable
SUMS = [PYTHON, "-m", "tests.cluster.programs", "sums"]
TRAINS = [PYTHON, "-m", "tests.cluster.programs", "trains"]
RUN = [PYTHON, "-m", "collective.launch"]


@pytest.fixture
def run(cluster, job_variables):
    """Run a command on the first node; check that nothing of it stays."""
    before = set(cluster.processes())
    files = [cluster.files(number) for number in (1, 2)]

    def run(*command, seconds=240):
        return cluster.run(1, command, seconds, **job_variables)

    yield run
    assert not cluster.left(before)
    assert [cluster.files(number) for number in (1, 2)] == files


def ranks(text: str) -> list[tuple[str, str]]:
    """Return node and job of each rank, in order; check that sums include all ranks."""
    found = sorted(re.findall(r"rank (\d) of (\d) on (\w+): (\d+), job (\w+)", text))
    assert {size for _, size, *_ in found} == {str(len(found))}, text
    assert {total for *_, total, _ in found} == {"1" * len(found)}, text
    return [(node, job) for _, _, node, _, job in found]


def test_the_launcher_in_an_allocation(run):
    done = run("salloc", "-N3", "-n4", "--ntasks-per-node=2", *RUN, *SUMS)
    assert done.returncode == 0, done.stderr
    found = ranks(done.stdout)
    assert {node for node, _ in found} == {"node1", "node2", "node3"}
    assert len({job for _, job in found}) == 1 and found[0][1] != "None"
    assert "in the Slurm allocation: node1:" in done.stderr


def test_daemons_start_no_daemons(run):
    """This is as on over 64 nodes, on which mpirun's daemons would start others."""
    radix = "--mpi-args=--prtemca rml_base_radix 1"
    done = run("salloc", "-N4", "-n4", *RUN, radix, *SUMS)
    assert done.returncode == 0, done.stderr
    assert len({node for node, _ in ranks(done.stdout)}) == 4


def test_the_batch_file_on_two_nodes(run, cluster):
    printed = cluster.folder / "printed"
    words = ["--wait", f"--output={printed}", "-n3", "--ntasks-per-node=2"]
    done = run("sbatch", *words, f"{ROOT}/deploy/slurm.sbatch", *SUMS)
    assert done.returncode == 0, done.stderr + printed.read_text()
    assert {node for node, _ in ranks(printed.read_text())} == {"node1", "node2"}


def test_srun_connects_ranks_by_pmix_or_says_what_to_type(run):
    done = run("srun", "-N2", "-n3", *SUMS)
    assert done.returncode == 1
    assert "gave MPI no way to connect them (neither PMIx nor PMI2)" in done.stderr
    assert "HINT: srun --mpi=pmix" in done.stderr and "collectiverun" in done.stderr
    plugins = run("srun", "--mpi=list").stderr.split()
    if "pmix" in plugins:
        done = run("srun", "-N2", "-n3", "--mpi=pmix", *SUMS)
        assert done.returncode == 0, done.stderr
        assert {node for node, _ in ranks(done.stdout)} == {"node1", "node2"}
    done = run("srun", "-N2", "-n3", "--mpi=pmi2", *SUMS)  # with Open MPI
    assert done.returncode == 1
    assert "HINT: PMI2 is for MPICH; with Open MPI: srun --mpi=pmix" in done.stderr


def test_the_launcher_is_started_once(run):
    done = run("srun", "-N2", "-n2", *RUN, "-np", "2", *SUMS)
    assert done.returncode == 2
    assert "srun started 2 launchers" in done.stderr and "rank" not in done.stdout


def test_a_batch_script_does_not_train_alone(run, cluster):
    printed = cluster.folder / "alone"
    wrapped = f"--wrap=cd {ROOT}; {' '.join(SUMS)}"
    done = run("sbatch", "--wait", "-N2", "-n3", f"--output={printed}", wrapped)
    assert done.returncode == 1
    assert "the Slurm job has 3 tasks, and only this process" in printed.read_text()


def test_srun_without_mpi_trains_by_tensorflows_collectives(run):
    alone = run(*TRAINS, "single")
    assert alone.returncode == 0, alone.stderr
    done = run("srun", "-N2", "-n3", *TRAINS, "auto", seconds=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == alone.stdout.splitlines() * 3
