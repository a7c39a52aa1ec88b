"""Tables of results: which are equal, and which was fastest."""

import json
from pathlib import Path

import jsonschema

from collective.comparison import tables
from collective.comparison.speed import Timed, bottleneck, fastest
from tests.comparison.made_up import results, timed

SCHEMA = Path(__file__).parents[2] / "docs" / "reference" / "results.schema.json"


def test_the_fastest_is_clear_only_when_ahead_in_every_round():
    clear = fastest({"mpi": timed(1, 2, 3), "native": timed(2, 3, 4)})
    assert (clear.backend, clear.second, clear.clear) == ("native", "mpi", True)
    assert "more than the noise" in clear.sentence()
    crossed = fastest({"mpi": timed(1, 5, 3), "native": timed(2, 3, 4)})
    assert crossed.backend == "mpi" or not crossed.clear
    assert "within the noise" in crossed.sentence()
    assert not fastest({"mpi": timed(1, 2), "native": timed(2, 3)}).clear
    assert fastest({"mpi": timed(1), "native": Timed(failure="hung")}).second == ""
    assert fastest({"native": Timed()}) is None


def test_knows_the_parts_of_a_step_as_training_names_them():
    from collective.training.loop.times import PARTS

    assert tuple(timed(1.0).parts) == PARTS
    for part in PARTS:
        one = timed(1.0)
        one.parts[part] = 1.0
        assert " of a step: " in bottleneck("mpi", one)


def test_names_the_bottleneck():
    one = timed(1.0)
    assert "compute is 60% of a step" in bottleneck("mpi", one)
    one.parts["wait"] = 1.0
    assert "one process is slower" in bottleneck("mpi", one)


def test_the_file_fits_its_schema_and_can_be_read_again(tmp_path):
    found = results()
    found.equal["float64"].losses["mpi"][1] = float("nan")
    found.write(str(tmp_path / "results.json"))
    table = json.loads((tmp_path / "results.json").read_text())
    jsonschema.validate(table, json.loads(SCHEMA.read_text()))
    assert table["equal"]["float64"]["losses"]["mpi"][1] is None


def test_tables_list_all_backends():
    shown = tables.tables(results(wrong=True))
    titles = [t.title for t in shown]
    assert titles[0] == "Equal? float64, against single"
    assert "Fast? 2 replicas" in titles and titles[-1] == "Left out"
    (row,) = [r for r in shown[0].rows if r[0] == "native"]
    assert row[1] == "NOT EQUAL" and row[-1] == "step 4, b/bias"
    assert all(len(r) == len(t.columns) for t in shown for r in t.rows)


def test_the_verdict_praises_no_comparison_in_which_a_run_failed():
    assert results().verdict == "Every compared backend trained the same model."
    assert results(wrong=True).verdict == "Not every backend trained the same model."
    found = results()
    found.equal["float64"].failures["mpi"] = ["ended with exit code 7", "the end"]
    assert found.verdict == "Some runs failed."
    assert "The last lines of mpi:\nthe end" in tables.tables(found)[0].sentences
    found.finished = False
    assert found.verdict.startswith("Interrupted")
