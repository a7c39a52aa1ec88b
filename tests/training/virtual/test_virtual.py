"""One SHA-256 for any number of ranks, in this process and on ranks."""

import re
import sys

import keras
import numpy as np
import pytest

from collective.errors import CollectiveError, UsageError
from collective.training import Checkpoint
from collective.training.loop.state import state_sha256
from tests import launch
from tests.training import small
from tests.training.virtual import ranks_virtual

HERE = launch.ROOT / "tests/training/virtual"


def on_ranks(backend: str, ranks: int, *arguments: object) -> list[str]:
    """Return rank 0's lines for each model; ``single`` and ``tf-mirrored`` are one process."""
    start = launch.command(backend, ranks) if backend in launch.LAUNCHERS else []
    name = f"{backend}:{ranks}" if backend == "tf-mirrored" else backend
    script = [str(HERE / "ranks_virtual.py"), name, *map(str, arguments)]
    return printed_by([*start, sys.executable, *script])


def printed_by(command: list[str]) -> list[str]:
    code, printed = launch.run(command, launch.environment(forked=True), 500)
    found = re.findall(r"\w+: sha256 \w{64} loss \S+", printed)
    assert code == 0 and found, printed
    return found


@pytest.mark.launches
@launch.NEEDS_CORE
@pytest.mark.parametrize(
    "models",
    [
        ["cnn", "own_step", "coupled"],
        pytest.param([*ranks_virtual.MODELS], marks=pytest.mark.matrix),
    ],
    ids=["some", "all"],
)
def test_ranks_have_the_bits_of_one_process(models):
    """Three ranks have one, two and two of five pieces; some are empty in the last batch."""
    wanted = on_ranks("single", 1, ",".join(models), 5, 10)
    assert len(wanted) == len(models)
    assert on_ranks("native", 3, ",".join(models), 5, 10) == wanted


@pytest.mark.launches
@launch.NEEDS_CORE
def test_a_rank_that_dies_changes_no_bit():
    start = launch.command("native", 3)
    place = start.index("-np")
    start[place:place] = ["--min-np", "1"]
    ended = printed_by([*start, sys.executable, str(HERE / "ranks_dying.py")])
    assert ended == on_ranks("single", 1, "own_step", 5, 8)


@pytest.mark.launches
@pytest.mark.matrix
@launch.NEEDS_CORE
@pytest.mark.parametrize("model", ranks_virtual.MODELS)
def test_every_backend_has_the_same_bits(model):
    """There are as many pieces as the most ranks, and uneven numbers of pieces."""
    wanted = on_ranks("single", 1, model, 8, 200)
    for backend, counts in {
        "native": (2, 3, 4, 5, 8),
        "mpi": (2, 4),
        "tf-mirrored": (2, 4),
        "tf-multiworker": (2, 4),
    }.items():
        if backend == "tf-mirrored" and model in ("own_step", "coupled"):
            continue  # refused together with devices
        for ranks in counts:
            found = on_ranks(backend, ranks, model, 8, 200)
            assert found == wanted, f"{backend} on {ranks}"


@pytest.mark.launches
@pytest.mark.matrix
@pytest.mark.horovod
@pytest.mark.parametrize("model", ranks_virtual.MODELS)
def test_horovod_has_the_same_bits(model):
    wanted = on_ranks("single", 1, model, 8, 200)
    assert [on_ranks("horovod", n, model, 8, 200) for n in (2, 4)] == [wanted] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("replicas", [2, 3])
def test_devices_have_the_bits_of_one(replicas, backends_by_name, clean_keras):
    one = ranks_virtual.train(backends_by_name("single"), "cnn", 5, 6)
    mirrored = backends_by_name(f"tf-mirrored:{replicas}")
    other = ranks_virtual.train(mirrored, "cnn", 5, 6)
    assert other.state_sha256 == one.state_sha256
    assert other.losses == one.losses
    assert other.history == one.history


@pytest.mark.parametrize(
    "precision, options",
    [
        ("float32", {"accumulate": 2}),
        pytest.param("mixed_bfloat16", {}, marks=pytest.mark.matrix),
        pytest.param("mixed_float16", {}, marks=pytest.mark.matrix),
        pytest.param("float64", {}, marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_options_keep_the_bits(precision, options, backends_by_name, clean_keras):
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
    try:
        found = {
            ranks_virtual.train(
                backends_by_name(name), "cnn", 5, 3, **options
            ).state_sha256
            for name in ("single", "tf-mirrored:3")
        }
    finally:
        keras.config.set_dtype_policy("float32")
    assert len(found) == 1


def test_the_number_of_virtual_replicas_decides(backends_by_name, clean_keras):
    backend = backends_by_name("single")
    found = {
        ranks_virtual.train(backend, "cnn", count, 3).state_sha256
        for count in (1, 4, 5)
    }
    assert len(found) == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_masks_and_statistics_it_trains_the_same_model(
    accumulate, backends_by_name, clean_keras
):
    """It equals the training without virtual replicas, to rounding."""
    backend = backends_by_name("single")
    plain = small.train(backend)
    cut = small.train(backend, virtual_replicas=4, accumulate=accumulate)
    for one, other in zip(
        small.state(plain.model), small.state(cut.model), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(plain.losses, cut.losses, rtol=1e-5)


def test_a_resumed_training_has_the_same_bits(backends_by_name, tmp_path, clean_keras):
    """This holds on another number of replicas, too."""

    def train(name: str, steps: int, **more: object) -> str:
        result = ranks_virtual.train(
            backends_by_name(name), "cnn", 4, steps, check_every=0, **more
        )
        return result.state_sha256

    whole = train("single", 8)
    train("tf-mirrored:3", 5, checkpoint=Checkpoint(tmp_path, every=1))
    resumed = train("single", 8, checkpoint=Checkpoint(tmp_path, resume=True))
    assert resumed == whole
    with pytest.raises(CollectiveError, match="virtual_replicas 4, and here it is 5"):
        ranks_virtual.train(
            backends_by_name("single"),
            "cnn",
            5,
            9,
            checkpoint=Checkpoint(tmp_path, resume=True),
        )


def test_the_digest_is_that_of_the_saved_file(backends_by_name, tmp_path, clean_keras):
    result = ranks_virtual.train(backends_by_name("single"), "cnn", 2, 3)
    result.model.save(tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras")
    assert state_sha256(saved) == result.state_sha256
    kernel = saved.trainable_variables[0]
    value = np.array(kernel)
    value.flat[0] = np.nextafter(value.flat[0], 1)
    kernel.assign(value)
    assert state_sha256(saved) != result.state_sha256


@pytest.mark.parametrize(
    "count, said",
    [
        (2, "2 virtual replicas cannot be shared by 3 replicas"),
        (0, "virtual_replicas is 0"),
        (11, "a global batch of 10 rows cannot be cut into 11 virtual replicas"),
    ],
)
def test_what_cannot_be_done_is_refused(count, said, backends_by_name, clean_keras):
    with pytest.raises(UsageError, match=said) as caught:
        small.train(backends_by_name("tf-mirrored:3"), virtual_replicas=count)
    assert "virtual" in caught.value.hint
    assert caught.value.exit_code == 2


def test_gradients_that_are_rounded_are_refused(backends_by_name, clean_keras):
    backend = backends_by_name("single")
    backend.rounds_to = "bfloat16"
    try:
        with pytest.raises(UsageError, match="--transport-dtype"):
            small.train(backend, virtual_replicas=4)
    finally:
        backend.rounds_to = None


def test_what_is_not_finite_is_found(backends_by_name, clean_keras):
    x, y = small.rows()
    x[7] = np.inf
    words = {"data": (x, y), "virtual_replicas": 5, "terminate_on_nan": True}
    with pytest.raises(CollectiveError, match="not finite on replica"):
        small.train(backends_by_name("tf-mirrored:3"), **words)
