"""Layouts of a model's variables over a mesh: ``keras.distribution``'s words, found by us."""

from __future__ import annotations

from typing import Any


def suggest(
    model: Any,
    mesh: Any,
    *,
    batch_dim_name: str | None = None,
    x: Any = None,
    rows: int = 32,
) -> Any:
    """Return a layout map for a model, and print it so that it can be edited.

    Args:
        model: A built Keras model.
        mesh: A ``keras.distribution.DeviceMesh`` of several axes.
        batch_dim_name: The axis of the batch; by default the first.
        x: Inputs, as an example, for a model without symbolic ones.
        rows: The rows of a batch, by which activations are weighed.

    Returns:
        A ``keras.distribution.LayoutMap``.

    Raises:
        UsageError: The mesh lacks an axis for the model, or the model's inputs are unknown.
    """
    import keras

    from collective.training.partition.mesh import suggestion
    from collective.training.partition.mesh.layouts import Mesh

    axes = suggestion.suggest(model, Mesh.of(mesh, batch_dim_name), x=x, rows=rows)
    found = keras.distribution.LayoutMap(mesh)
    for path, names in axes.items():
        print(f"layout_map[{path!r}] = {names}")
        found[path] = names
    return found
