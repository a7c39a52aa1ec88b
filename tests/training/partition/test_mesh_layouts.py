"""Layout maps: resolved to layouts of variables, and found for a model without one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import collective.layouts
from collective.errors import UsageError
from collective.training.partition.layouts import Sharded
from collective.training.partition.mesh.layouts import Mesh, resolve
from collective.training.partition.mesh.ranks import groups_along, place_of

L = keras.layers
MESH = Mesh({"batch": 2, "model": 2}, "batch")


def devices() -> Any:
    names = [f"cpu:{i}" for i in range(4)]
    return keras.distribution.DeviceMesh((2, 2), ["batch", "model"], names)


def layout_map(**patterns: Any) -> Any:
    made = keras.distribution.LayoutMap(devices())
    for pattern, axes in patterns.items():
        made[f".*{pattern}"] = axes
    return made


def model() -> Any:
    return keras.Sequential(
        [
            keras.Input((4, 6)),
            L.LSTM(8, name="lstm"),
            L.Dense(6, name="even"),
            L.Dense(3, name="odd"),
        ]
    )


def test_axes_are_cut_as_the_map_says() -> None:
    layouts = {
        "even/kernel": (None, "model"),
        "lstm/.*kernel": (None, "model"),
        "odd/kernel": ("model", "batch"),
    }
    found = resolve(model(), layout_map(**layouts), Mesh.of(devices()))
    by_end = {path.split("/", 1)[1]: layout for path, layout in found.by_path.items()}
    assert by_end["even/kernel"].cut == {"model": Sharded(1, (3,))}
    assert by_end["lstm/lstm_cell/kernel"].cut == {"model": Sharded(1, (4,) * 4)}
    assert by_end["odd/kernel"].cut == {"model": Sharded(0, (3,))}
    assert by_end["odd/kernel"].in_pieces and not by_end["even/kernel"].in_pieces
    assert not found.kept_whole and not found.unmatched


def test_what_stays_whole_is_said_by_name() -> None:
    layouts = {"odd/kernel": (None, "model"), "missing": ("model",)}
    found = resolve(model(), layout_map(**layouts), MESH)
    (path,) = found.kept_whole
    assert path.endswith("odd/kernel") and "3 is not divided" in found.kept_whole[path]
    assert found.unmatched == [".*missing"]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (("model",), "has 1 axes"),
        (("model", "model"), "twice"),
        (("model", "pipe"), "lacks"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(axes: Any, said: str) -> None:
    made = model()
    path = made.get_layer("even").kernel.path
    with pytest.raises(UsageError, match=said):
        resolve(made, {path: axes}, MESH)


def test_ranks_lie_in_row_major_order() -> None:
    sizes = {"a": 2, "b": 3}
    assert groups_along(sizes, "b") == [[0, 1, 2], [3, 4, 5]]
    assert groups_along(sizes, "a") == [[0, 3], [1, 4], [2, 5]]
    assert place_of(sizes, 4) == {"a": 1, "b": 1}
    with pytest.raises(UsageError, match="rank 6"):
        place_of(sizes, 6)


# Left out of make test: which of two equal cuts is found differs between runs.
@pytest.mark.matrix
def test_a_map_is_found_by_what_is_exchanged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    inputs = keras.Input((64,), dtype="int32")
    h = L.Embedding(512, 64, name="words")(inputs)
    n = L.LayerNormalization()(h)
    h = h + L.MultiHeadAttention(4, 16, name="heads")(n, n)
    n = L.LayerNormalization()(h)
    h = h + L.Dense(64, name="down")(L.Dense(256, activation="gelu", name="up")(n))
    made = keras.Model(inputs, L.Dense(512, name="head")(h))
    found = collective.layouts.suggest(made, devices(), rows=1)
    axes = {path: tuple(layout.axes) for path, layout in found.items()}
    by_end = {"/".join(path.split("/")[-2:]): names for path, names in axes.items()}
    assert by_end["up/kernel"] == (None, "model")
    assert by_end["down/kernel"] == ("model", None)
    assert by_end["up/bias"] == ("model",)
    assert by_end["query/kernel"] == by_end["key/kernel"] == (None, "model", None)
    assert by_end["attention_output/kernel"] == ("model", None, None)
    assert by_end["head/kernel"] == (None, "model")
    assert "words/embeddings" in by_end
    assert "up/kernel'] = (None, 'model')" in capsys.readouterr().out
    assert np.prod(made.get_layer("words").embeddings.shape) == 512 * 64
