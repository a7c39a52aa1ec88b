"""What is said of results: who was fastest, and the page."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from collective import comparison
from collective.comparison import command, figures, page, tables
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

    assert tuple(figures.OF_PART) == tuple(timed(1.0).parts) == PARTS
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
    found.write(tmp_path / "results.json")
    told_ = json.loads((tmp_path / "results.json").read_text())
    jsonschema.validate(told_, json.loads(SCHEMA.read_text()))
    assert told_["equal"]["float64"]["losses"]["mpi"][1] is None


def test_tables_tell_all_backends():
    shown = tables.tables(results(wrong=True))
    titles = [t.title for t in shown]
    assert titles[0] == "Equal? float64, against single"
    assert "Fast? 2 replicas" in titles and titles[-1] == "Left out"
    (row,) = [r for r in shown[0].rows if r[0] == "native"]
    assert row[1] == "NOT EQUAL" and row[-1] == "step 4, b/bias"
    assert all(len(r) == len(t.columns) for t in shown for r in t.rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    found = results(wrong=True)
    pictures = figures.draw(found, folder)
    page.write(folder / "report.html", found, tables.tables(found), pictures)
    return folder


def test_the_page_has_every_picture_twice_and_needs_nothing_else(folder):
    text = (folder / "report.html").read_text()
    for name in figures.FIGURES:
        assert (folder / f"{name}.png").stat().st_size > 5000
        assert f'<figure id="{name}">' in text
    assert text.count("data:image/svg+xml;base64,") == 2 * len(figures.FIGURES)
    addresses = re.findall(r'(?:src|srcset|href)="([^"]{0,40})', text)
    assert all(address.startswith("data:") for address in addresses)
    assert "<b>no</b>" not in text and "&lt;b&gt;no&lt;/b&gt;" in text
    assert "Not every backend trained the same model" in text


def test_without_matplotlib_the_results_are_written_and_a_hint_says_why(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, figures.__name__)
    monkeypatch.delattr(comparison, "figures")
    printed = io.StringIO()
    command._write(results(), tmp_path, Console(file=printed, width=200))
    assert (tmp_path / "results.json").exists()
    assert "matplotlib is missing\nHINT: pip install" in printed.getvalue()


def test_the_page_praises_no_comparison_in_which_a_run_failed(tmp_path):
    found = results()
    found.equal["float64"].failures["mpi"] = ["ended with exit code 7", "the end"]
    page.write(tmp_path / "report.html", found, tables.tables(found), {})
    text = (tmp_path / "report.html").read_text()
    assert "Some runs failed." in text and "the end" in text
    assert "trained the same model." not in text


def test_a_browser_shows_the_page(folder, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium here (apt-get install chromium)")
    shot, log = tmp_path / "page.png", tmp_path / "net.json"
    subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync",
         "--disable-background-networking", "--disable-component-update",
         f"--user-data-dir={tmp_path}/user", "--no-first-run",
         "--window-size=1100,3000", f"--log-net-log={log}", f"--screenshot={shot}",
         f"file://{folder}/report.html"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert shot.stat().st_size > 20_000
    # The browser calls home by itself; the page calls nobody.
    called = re.findall(r'"url":"(?:https?|wss?)://([^/"]+)', log.read_text())
    assert [host for host in called if "google" not in host] == []
