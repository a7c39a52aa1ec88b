"""Objects that count as arrays, with or without a copy, and those with a clear error."""

import array as standard
import threading

import numpy as np
import pytest

import collective
from collective.errors import UsageError
from collective.operations.call import contiguous


class Interface:
    """Has only __array_interface__."""

    def __init__(self, memory):
        self.memory = memory

    @property
    def __array_interface__(self):
        return self.memory.__array_interface__


class Exchange:
    """Has only DLPack."""

    def __init__(self, memory, device=1):
        self.memory, self.device = memory, device

    def __dlpack__(self, **options):
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device, 0


class Frame:
    """Has only __array__, which may be a copy, like a table of pandas."""

    def __init__(self, memory):
        self.memory = memory

    def __array__(self, dtype=None, copy=None):
        return self.memory.copy()


KINDS = {
    "interface": Interface,
    "dlpack": Exchange,
    "buffer": lambda memory: standard.array("f", memory.tolist()),
}


def total(rank_values, size):
    return sum(rank_values(rank) for rank in range(size))


def numbers(rank, count=1000):
    return np.arange(count, dtype="f4") + rank


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_copy(rank, size, kind):
    source, out = KINDS[kind](numbers(rank)), KINDS[kind](np.zeros(1000, "f4"))
    assert np.shares_memory(
        contiguous(source), np.asarray(getattr(source, "memory", source))
    )
    assert collective.allreduce(source, collective.Sum, out) is out
    wanted = total(numbers, size)
    np.testing.assert_array_equal(getattr(out, "memory", out), wanted)
    assert collective.allreduce_async(source, collective.Sum, out).wait() is out
    (same,) = collective.grouped_allreduce([source], collective.Sum, [out])
    assert same is out
    assert collective.broadcast(source, 0, out) is out
    np.testing.assert_array_equal(getattr(out, "memory", out), numbers(0))
    np.testing.assert_array_equal(collective.allreduce(source, collective.Sum), wanted)


@pytest.mark.parametrize(
    "copied",
    [
        Frame,
        lambda array: array.tolist(),
        lambda array: np.repeat(array, 2)[::2],
        lambda array: np.asfortranarray(array.reshape(-1, 10)),
    ],
    ids=["frame", "list", "strided", "by columns"],
)
def test_by_a_copy(rank, size, copied):
    array = copied(numbers(rank))
    result = collective.allreduce(array, collective.Sum)
    np.testing.assert_array_equal(np.ravel(result), total(numbers, size))


def test_a_list_of_arrays_is_one_array_but_in_a_group(rank, size):
    both = [numbers(rank), numbers(rank) * 2]
    result = collective.allreduce(both, collective.Sum)
    assert isinstance(result, np.ndarray) and result.shape == (2, 1000)
    for form in (both, tuple(both), np.stack(both)):
        first, second = collective.grouped_allreduce(form, collective.Sum)
        np.testing.assert_array_equal(first, total(numbers, size))
        np.testing.assert_array_equal(second, 2 * first)


def test_scalars(rank, size):
    for one in (np.float64(rank), float(rank), np.array(float(rank))):
        result = collective.allreduce(one, collective.Sum)
        assert result.shape == () and result == sum(range(size))
    with pytest.raises(UsageError, match="out is read-only float64"):
        collective.allreduce(np.float64(1), out=np.float64(0))


def read_only():
    out = np.zeros(1000, "f4")
    out.flags.writeable = False
    return out


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (read_only, "out is read-only float32"),
        (lambda: Exchange(read_only()), "out is read-only float32"),
        (lambda: bytes(4000), "read-only"),
        (lambda: np.zeros(1000, ">f4"), "out is >f4"),
        (lambda: np.zeros(1000, "f8"), "out is float64"),
        (lambda: np.zeros((10, 100), "f4"), r"out is float32\[10, 100\]"),
        (lambda: np.zeros(2000, "f4")[::2], "out is float32"),
        (lambda: [0.0] * 1000, "out is a list"),
        (lambda: Frame(np.zeros(1000, "f4")), "out is a Frame"),
        (lambda: Exchange(np.zeros(1000, "f4"), device=2), "memory of a device"),
    ],
)
def test_an_output_that_cannot_be(rank, size, out, message):
    for call in (collective.allreduce, collective.allreduce_async):
        with pytest.raises(UsageError, match=message):
            call(numbers(rank), out=out())
    collective.barrier()


def test_inputs_that_cannot_be(rank, size):
    for wrong in (np.zeros(3, "c16"), np.zeros(3, "i2"), np.array(["a"])):
        with pytest.raises(UsageError, match="do not know dtype"):
            collective.allreduce(wrong)
    with pytest.raises(UsageError, match="memory of a device"):
        collective.allreduce(Exchange(numbers(rank), device=2))
    for options in ({"op": 7}, {"algorithm": "quick"}, {"transport_dtype": "int8"}):
        with pytest.raises(UsageError):
            collective.allreduce(numbers(rank), **options)
    with pytest.raises(TypeError):
        collective.allreduce(numbers(rank), name=3)
    collective.barrier()


def test_a_forgotten_handle_keeps_its_arrays(rank, size):
    for _ in range(20):
        collective.allreduce_async(np.ones(100_000))
    handles = [collective.allreduce_async(np.full(5000, float(i))) for i in range(20)]
    for i, handle in enumerate(handles):
        np.testing.assert_array_equal(handle.wait(), np.full(5000, float(i)))


def test_threads_with_process_sets_of_their_own(rank, size):
    sets = [collective.ProcessSet(range(size)) for _ in range(4)]
    wrong = []

    def work(number):
        array = np.full(3000, float(rank + number))
        wanted = sum(range(size)) + size * number
        for _ in range(50):
            result = collective.allreduce(
                array, collective.Sum, process_set=sets[number]
            )
            if (result != wanted).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
