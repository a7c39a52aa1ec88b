"""The benchmark runs, checks its own results, and writes them."""

import json
import sys
from pathlib import Path

import pytest

from collective.bench.__main__ import main
from tests.launch import STARTS_RANKS, capture

ROOT = Path(__file__).parents[2]
pytestmark = STARTS_RANKS


def test_results_as_table_and_as_json(tmp_path):
    table = tmp_path / "rows.json"
    result = capture(
        [
            *[sys.executable, "-m", "collective.launch", "-np", "2"],
            *[sys.executable, "-m", "collective.bench", "--sizes", "4,64K,1M"],
            *["--offset", "0,16,1", "--seconds", "0.01"],
            *["--json", str(table)],
        ],
        120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(table.read_text())
    assert written["limits"]["ranks"] == 2
    rows = written["rows"]
    assert {(row["bytes"], row["in_place"], row["offset"]) for row in rows} == {
        (size, place, offset)
        for size in (4, 64 << 10, 1 << 20)
        for place in (True, False)
        for offset in (0, 16, 1)
    }
    assert all(row["wrong"] == 0 and row["median_s"] > 0 for row in rows)
    assert result.stdout.count("\n") == 3 + len(rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sizes", "4,x"],
        ["--sizes=-4"],
        ["--offset", "0,page"],
        ["--peers", "nccl"],
        ["--seconds", "0"],
    ],
)
def test_wrong_use_ends_with_2(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("file", ["/no/such/folder/file", "/"])
def test_a_file_that_cannot_be_written_is_reported_before_it_measures(file, capsys):
    assert main(["--json", file]) == 2
    assert f"error: --json: {file} cannot be written\nHINT: " in capsys.readouterr().err
