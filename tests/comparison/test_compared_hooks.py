"""``compare.py --hooks``: the table, its words, and a run of it."""

import json
import sys

import pytest

from collective import compare
from collective.comparison import hooks
from collective.errors import UsageError
from collective.fit_options import NOT_EQUAL
from tests import launch

NAMES = ("none", "bfloat16", "powersgd:4")


def summary(losses, seconds, hook=None, **more):
    return {
        "backend": "native",
        "replicas": 2,
        "losses": losses,
        "seconds_per_step": {"compute": seconds / 2, "all_reduce": seconds / 2},
        "gradient_bytes": 4000,
        "not_equal_to_one_process": hook,
    } | more


def test_the_table_names_a_hook_and_finds_the_time_to_a_loss():
    falls = [1 / step for step in range(1, 41)]
    slowly = [2 / step for step in range(1, 40)] + [None]
    table = hooks.curves(
        {
            "none": summary(falls, 0.5),
            "powersgd:4": summary(slowly, 0.1, "hook PowerSGD(rank=4)"),
        }
    )
    assert table.columns == ["", "none", f"powersgd:4 ({NOT_EQUAL})"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["a step, ms"] == ["500.0", "100.0"]
    (target,) = (name for name in rows if name.startswith("steps to a loss of "))
    reached = hooks.means(slowly)
    assert target.endswith(f"{reached[38]:.4f}")  # the last one is not finite
    first = next(i for i, v in enumerate(hooks.means(falls), 1) if v <= reached[38])
    assert rows[target] == [str(first), "39"]
    assert rows["seconds to it"] == [f"{first / 2:.2f}", "3.90"]
    assert rows["loss at step 40"][1] == "inf"
    why = f"powersgd:4 is {NOT_EQUAL}, by design: hook PowerSGD(rank=4)."
    assert table.sentences[-1] == why
    only = hooks.curves({"none": summary(falls, 0.5)})
    assert not any(NOT_EQUAL in text for text in only.sentences)


def test_a_name_is_an_option():
    options = [hooks.options_of(name) for name in NAMES]
    assert options == [[], ["--transport-dtype", "bfloat16"], ["--hook", "powersgd:4"]]


@pytest.mark.parametrize("option", ["--hook", "--transport-dtype"])
def test_one_way_to_send_gradients_is_refused_beside_it(option, tmp_path):
    args, rest = compare.parser().parse_known_args(
        ["--hooks", "none", "--output", str(tmp_path), option, "bfloat16"]
    )
    with pytest.raises(UsageError, match="another one is given"):
        hooks.compare_hooks(args, rest, "compare.py")


def test_a_hook_is_refused_where_sameness_is_tested(capsys):
    assert compare.main(["--hook", "powersgd:4"]) == 2
    assert "--hook is not for compare.py" in capsys.readouterr().err


@pytest.mark.compares
@pytest.mark.launches
def test_three_ways_on_two_ranks(tmp_path):
    command = [
        sys.executable,
        "compare.py",
        "--hooks",
        ",".join(NAMES),
        "--model",
        "mlp",
    ]
    command += ["--steps", "12", "--output", str(tmp_path)]
    code, printed = launch.run(command, launch.environment(), 200)
    assert code == 0, printed
    assert f"powersgd:4 is {NOT_EQUAL}, by design" in " ".join(printed.split())
    assert "oneDNN" not in printed
    found = json.loads((tmp_path / "hooks.json").read_text())
    numbers = [found[name]["gradient_bytes"] for name in NAMES]
    assert numbers[0] == 2 * numbers[1] > 8 * numbers[2]
    why = found["powersgd:4"]["not_equal_to_one_process"]
    assert why == "hook PowerSGD(rank=4, min_compression=2.0)"
    page = (tmp_path / "report.html").read_text()
    assert f"powersgd:4 ({NOT_EQUAL})" in page
