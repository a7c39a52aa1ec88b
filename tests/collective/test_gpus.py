"""The GPUs that a rank sees, on hosts made of files: no GPU is needed."""

from __future__ import annotations

import pytest

from collective.environment import Environment, gpus


def place(rank: int, ranks: int) -> Environment:
    return Environment("mpirun", rank, ranks, rank, ranks)


@pytest.fixture
def four(tmp_path, monkeypatch):
    """Make a host with four NVIDIA GPUs."""
    for number in range(4):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr(gpus, "_NVIDIA", tmp_path)


@pytest.fixture
def two_of_amd(tmp_path, monkeypatch):
    """Make a host with two GPUs of AMD; its processor is a node, too."""
    for number, units in enumerate((0, 440, 440)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(f"simd_count {units}\n")
    (tmp_path / "3").mkdir()  # a node that must not be read
    monkeypatch.setattr(gpus, "_NVIDIA", tmp_path / "none")
    monkeypatch.setattr(gpus, "_AMD", tmp_path)


def test_no_gpu_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "_NVIDIA", tmp_path / "none")
    monkeypatch.setattr(gpus, "_AMD", tmp_path / "none")
    assert gpus.granted({"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    assert gpus.gpu_variables(place(1, 2), {}) == {}


def test_what_the_job_was_granted(four):
    assert gpus.granted({}) == ["0", "1", "2", "3"]
    assert gpus.granted({"CUDA_VISIBLE_DEVICES": " 2, GPU-1f"}) == ["2", "GPU-1f"]
    assert gpus.granted({"CUDA_VISIBLE_DEVICES": "2,-1,3"}) == ["2"]
    assert gpus.granted({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.parametrize("ranks, shares", [
    (1, [{}]),
    (2, ["0,1", "2,3"]),
    (3, ["0", "1", "2"]),
    (4, ["0", "1", "2", "3"]),
    (8, ["0", "0", "1", "1", "2", "2", "3", "3"]),
])  # fmt: skip
def test_ranks_of_a_host_divide_its_gpus(four, ranks, shares):
    of_all = {"COLLECTIVE_HOST_GPUS": "4"}
    wanted = [{"CUDA_VISIBLE_DEVICES": s} | of_all if s else s for s in shares]
    found = [gpus.gpu_variables(place(rank, ranks), {}) for rank in range(ranks)]
    assert found == wanted
    assert [gpus.of_host(own) for own in found] == [4] * ranks


def test_a_share_is_of_what_was_granted(four):
    given = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    own = gpus.gpu_variables(place(1, 2), given)
    assert own == {"CUDA_VISIBLE_DEVICES": "GPU-b", "COLLECTIVE_HOST_GPUS": "2"}


def test_slurm_shows_each_rank_its_own(four):
    own = {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "4"}
    assert gpus.of_host(own | {"SLURM_GPUS_PER_TASK": "1"}) == 4
    assert gpus.of_host(own) == 1


def test_amd(two_of_amd):
    assert gpus.granted({}) == ["0", "1"]
    assert gpus.granted({"HIP_VISIBLE_DEVICES": "1"}) == ["1"]
    found = gpus.gpu_variables(place(1, 2), {})
    assert found.pop("COLLECTIVE_HOST_GPUS") == "2"
    assert found == {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}
