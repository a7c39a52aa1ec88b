"""Who am I: what each launcher writes into the environment."""

from __future__ import annotations

import os

import pytest

from collective import environment
from collective.environment import Environment, cores_per_process, detect

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
HYDRA = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
}
GLOO = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "3",
}
OURS = {
    "COLLECTIVE_RANK": "1",
    "COLLECTIVE_SIZE": "2",
    "COLLECTIVE_LOCAL_RANK": "0",
    "COLLECTIVE_LOCAL_SIZE": "1",
}


@pytest.mark.parametrize(
    "variables, wanted",
    [
        ({}, Environment("", 0, 1, 0, 1)),
        (OPEN_MPI, Environment("mpirun", 5, 8, 1, 4)),
        (HYDRA, Environment("mpirun", 2, 4, 0, 2)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, Environment("mpirun", 2, 4, 2, 4)),
        (SLURM, Environment("srun", 3, 7, 1, 2)),
        (TORCHRUN, Environment("torchrun", 3, 4, 1, 2)),
        (GLOO, Environment("horovodrun", 1, 6, 1, 3)),
        (OURS, Environment("collectiverun", 1, 2, 0, 1)),
    ],
    ids=["alone", "openmpi", "mpich", "pmi", "slurm", "torchrun", "gloo", "ours"],
)
def test_detect(variables, wanted):
    found = detect(variables)
    assert found == wanted
    assert found.launched == bool(variables)


@pytest.mark.parametrize(
    "variables, launcher, rank",
    [
        (SLURM | OPEN_MPI, "mpirun", 5),  # mpirun in a Slurm allocation
        (SLURM | HYDRA, "mpirun", 2),
        (OPEN_MPI | GLOO, "horovodrun", 1),
        (OPEN_MPI | {"COLLECTIVE_HOROVODRUN": "1"}, "horovodrun", 5),  # by mpirun
        (HYDRA | {"COLLECTIVE_HOROVODRUN": "1"}, "horovodrun", 2),
        (OPEN_MPI | OURS, "collectiverun", 1),  # ours across hosts
    ],
)
def test_innermost_launcher_wins(variables, launcher, rank):
    found = detect(variables)
    assert (found.launcher, found.rank) == (launcher, rank)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "3", "WORLD_SIZE": "4"},  # a CI system may set these
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"},  # sbatch, no srun
        {"OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_half_of_the_variables_is_no_launch(variables):
    assert detect(variables) == Environment()


def test_detect_reads_this_process(monkeypatch):
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    assert detect().launcher == "collectiverun"


@pytest.mark.parametrize(
    "mine, cores, local_size, wanted",
    [
        (8, 8, 1, 8),
        (8, 8, 4, 2),
        (8, 8, 3, 2),
        (2, 2, 4, 1),
        (3, 8, 2, 3),
        (1, 8, 8, 1),
    ],
)
def test_cores_per_process(mine, cores, local_size, wanted, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(
        environment.os, "sched_getaffinity", lambda pid: set(range(mine)), raising=False
    )
    here = Environment("mpirun", 0, local_size, 0, local_size)
    assert cores_per_process(here) == wanted
