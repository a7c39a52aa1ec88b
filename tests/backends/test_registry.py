"""Backends by name: which are usable here, the reasons if not, and the choice of auto."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from collective import backends
from collective.backends import Options, auto
from collective.backends.registry import options_of, set_options
from collective.backends.tf_multiworker import MultiWorkerBackend
from collective.environment import Environment
from collective.errors import UsageError
from tests import launch

ALONE = Environment()
FOUR = Environment("mpirun", 2, 4, 2, 4)
BY_HOROVODRUN = Environment("horovodrun", 2, 4, 2, 4)
LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "RANK")


@pytest.fixture(autouse=True)
def started_alone(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_unknown_backend_is_wrong_use_and_names_all():
    with pytest.raises(UsageError, match="unknown backend 'nccl'") as caught:
        backends.get("nccl")
    assert caught.value.exit_code == 2
    for name in backends.BACKENDS:
        assert name in caught.value.hint


@pytest.mark.parametrize("name", ["mpi", "tf-multiworker", "tf-parameter-server"])
def test_backend_of_ranks_alone_says_what_to_type(name):
    with pytest.raises(UsageError, match=f"'{name}' cannot be used here") as caught:
        backends.get(name)
    assert caught.value.exit_code == 2
    assert "HINT: mpirun" in str(caught.value) or "HINT: pip" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["single", "tf-mirrored", "tf-one-device", "tf-central-storage"]
)
def test_backend_of_one_process_on_four_ranks_is_refused(name, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="4 processes") as caught:
        backends.get(name)
    assert caught.value.exit_code == 2
    assert caught.value.hint == "python script.py"


@pytest.mark.parametrize("environment", [ALONE, FOUR], ids=["alone", "four"])
def test_every_backend_says_whether_it_can_be_used(environment):
    found = backends.list_backends(environment)
    assert list(found) == list(backends.BACKENDS)
    for availability in found.values():
        assert availability.reason
        assert bool(availability.hint) != availability.usable
    assert found["single"].usable == (environment.size == 1)


def test_every_option_has_a_backend():
    taken = map(options_of, backends.BACKENDS)
    assert set().union(*taken) == {f.name for f in dataclasses.fields(Options)}
    given = Options(min_np=2, devices=3, threads=4)
    assert set_options(given) == {"min_np", "devices", "threads"}


def test_more_ranks_than_were_started_are_refused():
    with pytest.raises(UsageError, match="min_np=2, and the number of ranks is 1"):
        backends.get("native", Options(min_np=2))


def test_elastic_ranks_hold_no_parts():
    with pytest.raises(UsageError, match="its part of the weights is lost") as caught:
        backends.get("native", Options(min_np=1, tensor_parallel=2))
    assert caught.value.exit_code == 2


def test_without_mpi4py_the_hint_installs_it(monkeypatch):
    from collective.backends import world

    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: None)
    found = world.mpi_availability(FOUR)
    assert not found.usable and found.hint.startswith("pip install mpi4py")


def test_auto_says_why(monkeypatch):
    monkeypatch.setattr(auto, "gpus", lambda: 0)
    backend = backends.get("auto")
    assert backend.name == "single" and "one process" in backend.chosen_because
    assert backends.get("single").chosen_because == "asked for"


def test_no_option_is_taken_silently(monkeypatch):
    with pytest.raises(UsageError, match="unknown cross-device ops 'fast'") as caught:
        backends.get("tf-mirrored", Options(devices=2, cross_device_ops="fast"))
    assert "hierarchical-copy" in caught.value.hint
    with pytest.raises(UsageError, match="NCCL needs GPUs"):
        backends.get("tf-mirrored", Options(devices=2, cross_device_ops="nccl"))
    monkeypatch.setattr("collective.backends.tf_multiworker.gpus", lambda: 0)
    with pytest.raises(UsageError, match="NCCL needs GPUs"):
        MultiWorkerBackend(Options(communication="nccl"), FOUR)


@pytest.mark.parametrize(
    "option", [{"algorithm": "direct"}, {"transport_dtype": "float16"}], ids=str
)
def test_an_option_of_another_backend_is_refused(option):
    (name,) = option
    message = f"^{name} is an option of backend 'native'"
    with pytest.raises(UsageError, match=message) as caught:
        backends.get("single", Options(**option))
    assert (
        caught.value.exit_code == 2
        and caught.value.hint == f"backend native, or leave {name} out"
    )


def test_an_algorithm_that_is_not_there_is_reported_at_once():
    with pytest.raises(UsageError, match="no algorithm 'butterfly'"):
        backends.get("native", Options(algorithm="butterfly"))


def test_where_there_is_no_tpu_it_is_reported_at_once(monkeypatch):
    from collective.backends import tf_strategy

    monkeypatch.delenv("TPU_NAME", raising=False)
    monkeypatch.setattr(tf_strategy, "CHIPS", ("/dev/nowhere",))
    with pytest.raises(UsageError, match="there is no TPU") as caught:
        backends.get("tf-tpu")
    assert caught.value.exit_code == 2 and "TPU_NAME" in caught.value.hint
    monkeypatch.setattr(tf_strategy, "CHIPS", ("/dev/null",))
    monkeypatch.setattr(tf_strategy.importlib.util, "find_spec", lambda name: None)
    assert (
        tf_strategy.TPUBackend.availability(ALONE).reason == "libtpu is not installed"
    )


@pytest.mark.matrix  # it waits for a TPU
def test_a_tpu_that_cannot_be_reached_is_one_error():
    """The strategy's own code runs as far as it can without a TPU."""
    code, printed = python(
        "import collective.backends\n"
        "from collective.errors import UsageError\n"
        "try: collective.backends.get('tf-tpu')\n"
        "except UsageError as error: print(error)\n",
        TPU_NAME="local",
    )
    assert code == 0 and "TPU 'local': " in printed, printed
    assert printed.rstrip().splitlines()[-1].startswith("HINT: ")


def python(program: str, **variables: str) -> tuple[int | None, str]:
    env = launch.environment(**variables)
    return launch.run([sys.executable, "-c", program], env, seconds=60)


def test_listing_imports_neither_tensorflow_nor_mpi():
    code, printed = python(
        "import sys, collective.backends\n"
        "from collective.environment import Environment\n"
        "collective.backends.list_backends()\n"
        "collective.backends.list_backends(Environment('mpirun', 2, 4, 2, 4))\n"
        "assert not {'tensorflow', 'keras', 'mpi4py.MPI'} & set(sys.modules)\n"
    )
    assert code == 0, printed


@pytest.mark.parametrize("name", ["mpi", "tf-multiworker"])
def test_mpirun_of_another_mpi_is_reported(name):
    """Hydra sets rank 2 of 4; the MPI that mpi4py loads does not read it: 0 of 1."""
    pytest.importorskip("mpi4py")
    code, printed = python(
        "import sys, collective.backends\n"
        "from collective.errors import CollectiveError\n"
        "try:\n"
        f"    collective.backends.get({name!r})\n"
        "except CollectiveError as error:\n"
        "    print(error); sys.exit(error.exit_code)\n",
        PMI_RANK="2",
        PMI_SIZE="4",
    )
    assert code == 2, printed
    assert "started 4 processes" in printed and "sees 1" in printed
    assert "HINT: use the mpirun of the MPI" in printed


def test_collective_on_rank_zero_only_raises_at_once():
    """A callback on rank 0 could do this, and the others would wait for ever."""
    from collective.backends.single import SingleBackend
    from collective.errors import CollectiveError

    backend = SingleBackend(Options(), ALONE)
    backend.size = 2
    with (
        backend.only_rank_zero("callback Mine"),
        pytest.raises(CollectiveError, match="called from callback Mine"),
    ):
        backend.all_reduce([1.0])
    assert backend.all_reduce([1.0]) == [1.0]


def test_errors_name_no_option_of_a_command_line(monkeypatch):
    """A program that calls collective.fit has no command line, or its own."""
    monkeypatch.setattr(sys, "argv", ["/home/me/my_script.py"])
    texts = []
    for options in (
        {"min_np": 2},
        {"devices": 3},
        {"algorithm": "direct"},
        {"communication": "nccl"},
    ):
        with pytest.raises(UsageError) as caught:
            backends.get("single", Options(**options))
        texts.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        backends.get("fast")
    texts.append(str(caught.value))
    for environment in (ALONE, FOUR, BY_HOROVODRUN):
        found = backends.list_backends(environment).values()
        texts += [f.reason + f.hint for f in found]
    assert not [t for t in texts if "--" in t or "train.py" in t]
    assert "mpirun -np 4 python /home/me/my_script.py" in "".join(texts)
