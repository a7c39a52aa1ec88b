"""The identity of a rank, from the environment of each launcher."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest

from collective import environment
from collective.environment import (
    Environment,
    addresses,
    cores_per_process,
    detect,
    detect_rank,
    lone,
)
from collective.environment.base import RANKS_PER_HOST, place_on
from collective.errors import UsageError

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


CLUSTER = {"chief": ["a:1"], "worker": ["a:2", "[::1]:3", "a:3"]}


def tf_config(kind, index, cluster=CLUSTER):
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "7", "SLURM_NODEID": "1"}  # srun --mpi=pmi2


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
        (SLURM | PMI2, Environment("srun", 3, 7, 1, 2, 1, 3)),
        (
            SLURM | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            Environment("srun", 6, 7, 0, 1, 3, 4),
        ),
        (
            SLURM | {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "7"},
            Environment("srun", 3, 7, 1, 2),
        ),
        (
            TORCHRUN | {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"},
            Environment("torchrun", 3, 4, 1, 2, 1, 2),
        ),
        (
            GLOO | {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"},
            Environment("horovodrun", 1, 6, 1, 3, 0, 1),
        ),
        (
            {"PMIX_RANK": "1", "PMIX_NAMESPACE": "j", "COLLECTIVE_SIZE": "3"},
            Environment("PMIx", 1, 3, 1, 3),
        ),
        # Our launcher's table, under mpirun: it belongs to another job, and is ignored.
        (OPEN_MPI | {RANKS_PER_HOST: "4,3,1"}, Environment("mpirun", 5, 8, 1, 4)),
        (OPEN_MPI | {RANKS_PER_HOST: "4(x2)"}, Environment("mpirun", 5, 8, 1, 4, 1, 2)),
        (OPEN_MPI | {RANKS_PER_HOST: "1,3,4"}, Environment("mpirun", 5, 8, 1, 4, 1, 2)),
        (tf_config("chief", 0), Environment("TF_CONFIG", 0, 4, 0, 3)),
        (tf_config("worker", 1), Environment("TF_CONFIG", 2, 4, 0, 1)),
        (tf_config("worker", 2), Environment("TF_CONFIG", 3, 4, 2, 3)),
        (tf_config("worker", 0, {"worker": ["a:1"]}), Environment()),
        ({"TF_CONFIG": ""}, Environment()),
    ],
)
def test_detect(variables, wanted):
    found = detect(variables)
    assert found == wanted
    assert found.launched == bool(found.launcher)


def test_every_rank_knows_its_place_where_hosts_have_unequal_numbers():
    def beneath_mpirun(rank, local_rank, local_size):
        numbers = map(str, (rank, 5, local_rank, local_size))
        return dict(zip(OPEN_MPI, numbers, strict=False)) | {RANKS_PER_HOST: "2,1,2"}

    local = [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)]
    found = [detect(beneath_mpirun(rank, *here)) for rank, here in enumerate(local)]
    assert [(e.rank, e.size) for e in found] == [(rank, 5) for rank in range(5)]
    assert [(e.local_rank, e.local_size) for e in found] == local
    across = [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]
    assert [(e.cross_rank, e.cross_size) for e in found] == across


@pytest.mark.parametrize(
    "variables, launcher, rank",
    [
        (SLURM | OPEN_MPI, "mpirun", 5),  # mpirun in a Slurm allocation
        (SLURM | HYDRA, "mpirun", 2),
        (OPEN_MPI | GLOO, "horovodrun", 1),
        (
            OPEN_MPI | {"COLLECTIVE_HOROVODRUN": "1"},
            "horovodrun",
            5,
        ),  # started by mpirun
        (HYDRA | {"COLLECTIVE_HOROVODRUN": "1"}, "horovodrun", 2),
        (OPEN_MPI | OURS, "collectiverun", 1),
        (OPEN_MPI | tf_config("worker", 0), "mpirun", 5),  # tf-multiworker sets it
    ],
)
def test_innermost_launcher_wins(variables, launcher, rank):
    found = detect(variables)
    assert (found.launcher, found.rank) == (launcher, rank)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "3", "WORLD_SIZE": "4"},  # a CI system may set these
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"},  # sbatch without srun
        {"OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_half_of_the_variables_is_no_launch(variables):
    assert detect(variables) == Environment()


@pytest.mark.parametrize(
    "variables, message",
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK='x'"),
        (HYDRA | {"PMI_SIZE": "-4"}, "PMI_SIZE='-4'"),
        (OURS | {"COLLECTIVE_RANK": "2"}, "rank 2 of 2"),
        (OURS | {"COLLECTIVE_LOCAL_RANK": "1"}, "1 of 1 on this host"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "j"}, "without the number of "),
        ({"TF_CONFIG": "{"}, "it is not JSON"),
        ({"TF_CONFIG": "[]"}, "not a JSON object"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a", "b"]}}'}, "no task"),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, "not a table of lists"),
        (tf_config("ps", 0), "'ps' does not train"),
        (tf_config("worker", 3), "no worker 3"),
    ],
)
def test_what_makes_no_sense_is_reported(variables, message):
    with pytest.raises(UsageError) as caught:
        detect(variables)
    assert message in caught.value.message and caught.value.hint


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


def test_a_place_among_hosts_with_ranks_in_any_order():
    hosts = ["a", "b", "a", "c", "b", "a"]
    places = [place_on("mpirun", rank, hosts) for rank in range(6)]
    assert [(p.local_rank, p.local_size) for p in places] == [
        *((0, 3), (0, 2), (1, 3), (0, 1), (1, 2), (2, 3))
    ]
    assert [(p.cross_rank, p.cross_size) for p in places] == [
        *((0, 3), (1, 3), (0, 2), (2, 3), (1, 2), (0, 1))
    ]


CYCLIC = {"SLURM_DISTRIBUTION": "cyclic"}
STEP = SLURM | {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_NODELIST": "n[1-4]",
}


def test_a_launcher_may_know_the_addresses_of_all_ranks():
    hosts = [a.partition(":")[0] for a in addresses(STEP)]
    assert hosts == ["n1", "n1", "n2", "n2", "n3", "n3", "n4"]
    hosts = [a.partition(":")[0] for a in addresses(STEP | CYCLIC)]
    assert hosts == ["n1", "n2", "n3", "n4", "n1", "n2", "n3"]
    ports = [a.partition(":")[2] for a in addresses(STEP)]
    assert len(set(addresses(STEP))) == 7
    assert all(20000 <= int(p) < 32768 for p in ports)
    assert ports != [
        a.partition(":")[2] for a in addresses(STEP | {"SLURM_JOB_ID": "71"})
    ]
    assert addresses(STEP | {"SLURM_DISTRIBUTION": "plane=2"}) == []
    assert addresses(tf_config("worker", 1)) == ["a:1", "a:2", "[::1]:3", "a:3"]
    assert addresses(SLURM) == addresses(OPEN_MPI) == addresses({}) == []


BATCH = {"SLURM_JOB_ID": "70", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "pod 0 of an Indexed Job"),
        ({"JOB_COMPLETION_INDEX": "3"} | tf_config("worker", 0, {}), "pod 3"),
        (BATCH, "the Slurm job has 4 tasks"),
        ({"PMI_SIZE": "3"}, "a PMI launcher started 3"),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, "Flux started 2"),
    ],
)
def test_one_of_several_does_not_train_alone(variables, message):
    assert detect(variables) == Environment()  # tools continue
    with pytest.raises(UsageError, match=message) as caught:
        detect_rank(variables)
    assert "export COLLECTIVE_RANK=0 COLLECTIVE_SIZE=1" in caught.value.hint
    alone = {"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "1"}
    assert detect_rank(variables | alone).size == 1


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH | {"SLURM_NTASKS": "1"},
        BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun -n1
        {"PMI_SIZE": "1"},
        {"LSB_DJOB_HOSTFILE": "/no/such/file"},
    ],
)
def test_one_process_may_train_alone(variables):
    assert detect_rank(variables).size == 1


def test_one_process_on_several_allocated_hosts_does_not_train(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("n1\nn1\n")  # two slots, as for a program with two threads
    assert detect_rank({"PBS_NODEFILE": str(file)}).size == 1
    file.write_text("n1\nn2\n")
    with pytest.raises(UsageError, match="PBS has allocated 2 hosts"):
        detect_rank({"PBS_NODEFILE": str(file)})


def test_ray_train_does_not_train_in_each_worker(monkeypatch):
    context = types.SimpleNamespace(get_world_size=lambda: 3)
    train = types.SimpleNamespace(get_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray.train", train)
    with pytest.raises(UsageError, match="Ray Train started 3 workers"):
        detect_rank({})
    monkeypatch.setitem(sys.modules, "ray.train", types.SimpleNamespace())
    assert detect_rank({}) == Environment()


def test_one_of_several_launchers_starts_no_job():
    with pytest.raises(UsageError, match="srun started 7 launchers"):
        lone.check_launcher(SLURM)
    with pytest.raises(UsageError, match="pod 1 of an Indexed Job"):
        lone.check_launcher({"JOB_COMPLETION_INDEX": "1"})
    for fine in ({}, BATCH, SLURM | OPEN_MPI, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}):
        lone.check_launcher(fine)
