"""Predictions: the simulated network, the model of a step, the words of --predict."""

import json

import pytest

from collective import compare, library
from collective.comparison.prediction import scaling
from collective.comparison.prediction.cluster import parse
from collective.comparison.prediction.models import PUBLISHED, bert_base, profile
from collective.comparison.prediction.simulator import Cluster, Wire, simulate
from collective.comparison.prediction.step import POLICIES, buckets, predict
from collective.errors import UsageError

pytestmark = pytest.mark.skipif(
    not library.path().exists(), reason="the core was not built"
)
MB = 1 << 20
WIRE = Wire(3.125e9)


@pytest.mark.parametrize(
    ("hosts", "slots", "algorithm"),
    [
        (2, 1, "auto"),
        (4, 2, "auto"),
        (3, 3, "auto"),
        (8, 1, "ring"),
        (8, 1, "halving-doubling"),
        (5, 1, "tree"),
    ],
)
def test_one_host_stands_for_all_where_all_do_the_same(hosts, slots, algorithm):
    sizes = [4 << 10, MB, 5 * MB]
    folded, complete = (
        simulate(hosts, slots, [WIRE], sizes, algorithm, fold) for fold in (True, False)
    )
    for (one,), (other,) in zip(folded, complete, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


def test_a_message_costs_what_the_model_says():
    # Two ranks: 16 bytes each way to compare calls, then halving and doubling.
    wire = Wire(1e9, latency=10e-6, per_message=1e-6, per_byte=0)
    ((seconds,),) = simulate(2, 1, [wire], [4 << 10])
    steps = [16, 2048, 2048]
    assert seconds == pytest.approx(sum(12e-6 + n / 1e9 for n in steps), rel=1e-6)


@pytest.mark.parametrize("hosts", [4, 16, 64])
def test_large_messages_are_bound_by_the_wire(hosts):
    least = 2 * (hosts - 1) / hosts * 32 * MB / WIRE.bytes_per_second
    ((ours,), (twice,)) = simulate(hosts, 1, [WIRE], [32 * MB, 64 * MB])
    assert least < ours < 1.1 * least
    assert ours < twice < 2.1 * ours


def test_each_cost_makes_it_slower():
    slower = [
        WIRE,
        Wire(WIRE.bytes_per_second / 2),
        Wire(WIRE.bytes_per_second, latency=50e-6),
        Wire(WIRE.bytes_per_second, per_message=5e-6),
        Wire(WIRE.bytes_per_second, per_byte=1e-9),
    ]
    ((base, *rest),) = simulate(8, 1, slower, [MB])
    assert all(one > base for one in rest)


def test_what_cannot_be_simulated_is_refused():
    for hosts, slots, size in [(1, 4, MB), (2, 0, MB), (2, 1000, MB), (2, 1, 1)]:
        with pytest.raises(UsageError, match="cannot be simulated"):
            simulate(hosts, slots, [WIRE], [size])


def made_up(seconds=0.1):
    return profile("made up", [([4 * MB], 1.0), ([8 * MB, 64], 2.0)], seconds, "here")


def test_gradients_appear_from_the_last_layer_to_the_first():
    gradients = made_up(0.3).gradients
    assert [one.bytes for one in gradients] == [64, 8 * MB, 4 * MB]
    ready = [0.1 + 0.2 * 2 / 3] * 2 + [0.3]
    assert [one.ready for one in gradients] == pytest.approx(ready)
    assert [size for size, _ in buckets(made_up(), 4 * MB)] == [8 * MB + 64, 4 * MB]
    assert [size for size, _ in buckets(made_up(), None)] == [12 * MB + 64]


def test_overlap_hides_what_a_sum_after_all_gradients_does_not():
    cluster = Cluster(4, 1, WIRE)
    overlapped, after = (
        predict(made_up(), cluster, POLICIES[name]) for name in ("native", "mpi")
    )
    assert after.step > overlapped.step > made_up().seconds
    assert after.step == pytest.approx(after.compute + after.sums, rel=0.05)
    slow = predict(made_up(), Cluster(4, 1, Wire(1e8)), POLICIES["native"])
    assert slow.bound == "wire" and slow.step > slow.wire
    assert predict(made_up(10), cluster, POLICIES["native"]).bound == "compute"


def test_bert_has_its_published_number_of_parameters():
    elements = sum(sum(sizes) for sizes, _ in bert_base()) // 4
    assert elements == 109_514_298  # 110M, with the masked-language head's bias
    assert set(PUBLISHED) == {"resnet50", "resnet101", "vgg16", "bert-base"}


def test_the_words_of_a_cluster():
    asked = parse("hosts=64,slots=8,link=25gbit,latency=20us,step=0.25s,device=cpu")
    assert (asked.cluster.hosts, asked.cluster.slots) == (64, 8)
    assert asked.cluster.wire.bytes_per_second == pytest.approx(3.125e9)
    assert asked.cluster.wire.latency == pytest.approx(20e-6)
    assert asked.seconds == 0.25 and not asked.gpu
    for words in ("hosts=4", "hosts=1,link=1gbit", "hosts=4,link=9", "horses=2"):
        with pytest.raises(UsageError) as error:
            parse(words)
        assert "hosts=64" in error.value.hint


@pytest.mark.trains
def test_compare_predicts_without_training(tmp_path, capsys):
    words = "hosts=5,link=10gbit,step=50ms"
    options = ["--model", "mlp", "--data", "synthetic:8x8:10"]
    folder = ["--output", str(tmp_path)]
    assert compare.main(["--predict", words, *folder, *options]) == 0
    printed = capsys.readouterr().out
    assert "not measured" in printed and "as given" in printed
    found = json.loads((tmp_path / "prediction.json").read_text())
    assert {row["ranks"] for row in found["predictions"]} == {2, 4, 5}
    assert {row["backend"] for row in found["predictions"]} == set(POLICIES)
    assert all(0 < row["efficiency"] <= 1 for row in found["predictions"])
    assert (tmp_path / "prediction.png").stat().st_size > 1000
    wrong = ["--predict", "hosts=5,link=10gbit", "--optimizer", "sgd"]
    assert compare.main([*wrong, *folder]) == 2


def test_the_tables_of_the_docs():
    found = scaling.sweep([made_up()], [8])
    text = scaling.markdown(found)
    assert text.count("| made up | ours |") == 8 and "100 Gb/s, 20 µs" in text
