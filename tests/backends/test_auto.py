"""The choice of ``--backend auto``, by launcher and devices, equal on every rank."""

from __future__ import annotations

import sys

import pytest

from collective.backends import Options, auto
from collective.backends.horovod import installed
from collective.environment import Environment
from collective.environment import gpus as environment_gpus
from tests import launch

ALONE = Environment()
FOUR = Environment("mpirun", 2, 4, 2, 4)
BY_HOROVODRUN = Environment("horovodrun", 2, 4, 2, 4)


@pytest.mark.parametrize(
    "environment, devices, gpus, wanted",
    [
        (ALONE, None, 0, "single"),
        (ALONE, None, 1, "single"),
        (ALONE, None, 2, "tf-mirrored"),
        (ALONE, 4, 0, "tf-mirrored"),
        (ALONE, 1, 8, "single"),
        (FOUR, None, 0, "native"),
        (FOUR, None, 2, "native"),
    ],
)
def test_by_launcher_and_devices(environment, devices, gpus, wanted, monkeypatch):
    monkeypatch.setattr(auto, "gpus", lambda: gpus)
    monkeypatch.setattr(auto, "are_shared", lambda place: gpus < place.local_size)
    choice = auto.by_rule(environment, Options(devices=devices), started=False)
    assert choice.name == wanted and choice.because


@pytest.mark.parametrize("misfit", [None, "Horovod is not installed"])
def test_under_horovodrun(misfit, monkeypatch):
    monkeypatch.setattr(installed, "misfit", lambda: misfit)
    choice = auto.by_rule(BY_HOROVODRUN, Options(), started=False)
    assert choice.name == ("native" if misfit else "horovod")
    assert choice.because.startswith("horovodrun started 4 processes")
    assert not misfit or misfit in choice.because


@pytest.fixture
def on_gpus(monkeypatch):
    """Pretend that each of four ranks has a GPU that TensorFlow can use."""
    monkeypatch.setattr(auto, "gpus", lambda: 4)
    monkeypatch.setattr(environment_gpus, "of_host", lambda: 4)


def test_ranks_with_gpus_sum_on_them(on_gpus, monkeypatch):
    def chosen(environment: Environment, started: bool = False, **options) -> str:
        return auto.by_rule(environment, Options(**options), started).name

    assert chosen(FOUR) == "tf-multiworker"
    assert chosen(FOUR, min_np=2) == "native"
    assert chosen(FOUR, algorithm="direct") == "native"
    # NCCL allows one rank on a GPU.
    assert chosen(Environment("mpirun", 0, 8, 0, 8)) == "native"
    assert chosen(FOUR, started=True) == "native"
    monkeypatch.setattr(auto, "gpus", lambda: 0)  # TensorFlow without CUDA
    assert chosen(FOUR) == "native"


CHOOSES = """
import sys
from collective import session
from collective.backends import Options, auto
from collective.environment import detect, gpus

place = detect()
auto.gpus = gpus.of_host = lambda: place.size * int(sys.argv[1])
auto.tensorflow_has_started = lambda: place.rank == int(sys.argv[2])
for _ in range(2):
    name = auto.choose(place, Options()).name
    assert not session.is_initialized()
print("chose", name)
"""


@pytest.mark.launches
@launch.NEEDS_CORE
@pytest.mark.parametrize(
    "gpus, starts, wanted",
    [("1", "1", "native"), ("1", "-1", "tf-multiworker"), ("0", "0", "native")],
    ids=["started on one rank", "started on none", "no GPUs"],
)
def test_ranks_of_a_host_take_the_same(gpus, starts, wanted):
    """This holds even if TensorFlow has started on some: a script may print on one rank."""
    start = [sys.executable, "-m", "collective.launch", "-np", "3", sys.executable]
    code, printed = launch.run(
        [*start, "-c", CHOOSES, gpus, starts], launch.environment(), 60
    )
    assert code == 0, printed
    assert printed.count(f"chose {wanted}\n") == 3, printed


def test_where_all_take_the_core_no_rank_waits_for_another():
    """Only one of the four ranks exists here."""
    assert auto.choose(FOUR, Options()).name == "native"


def test_more_devices_than_gpus_is_refused(monkeypatch):
    import tensorflow as tf

    from collective.backends import devices
    from collective.errors import UsageError

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["GPU:0"])
    assert devices.local_devices(1) == ["/gpu:0"]
    with pytest.raises(UsageError, match=r"3 devices .* sees 1 GPU"):
        devices.local_devices(3)
    two = Environment("mpirun", 1, 2, 1, 2)
    with pytest.raises(UsageError, match="2 ranks with 3 GPUs each"):
        devices._own(list(range(4)), two, 3)
    assert devices._own(list(range(4)), two, 2) == [2, 3]
    assert devices._own([0], two, 1) == [0]
