"""Models of losses and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.keras_coverage.case import Case, below, between, one_hot, signed

_NAMES = dict.fromkeys(
    ["serialize", "deserialize", "get"], "writes or reads a description"
)

# Cases by the kind of prediction.
_KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], np.ndarray], str]] = {
    "number": (lambda: layers.Dense(3, "softplus"), between(0.1, 2, 3), "mse"),
    "binary": (lambda: layers.Dense(1, "sigmoid"), below(2, 1), "binary_crossentropy"),
    "class": (
        lambda: layers.Dense(3, "softmax"),
        one_hot(3),
        "categorical_crossentropy",
    ),
    "label": (
        lambda: layers.Dense(3, "softmax"),
        below(3),
        "sparse_categorical_crossentropy",
    ),
}

_LOSSES = {
    "binary": """BinaryCrossentropy BinaryFocalCrossentropy Hinge SquaredHinge Dice Tversky
    binary_crossentropy binary_focal_crossentropy hinge squared_hinge dice tversky""",
    "class": """CategoricalCrossentropy CategoricalFocalCrossentropy
    CategoricalHinge KLDivergence categorical_crossentropy
    categorical_focal_crossentropy categorical_hinge
    kl_divergence""",
    "number": """CosineSimilarity Huber LogCosh MeanAbsoluteError MeanAbsolutePercentageError
    MeanSquaredError MeanSquaredLogarithmicError Poisson cosine_similarity huber log_cosh
    mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error poisson""",
    "label": """SparseCategoricalCrossentropy CategoricalGeneralizedCrossEntropy Circle
    sparse_categorical_crossentropy categorical_generalized_cross_entropy circle""",
}
_METRICS = {
    "binary": """AUC BinaryAccuracy BinaryCrossentropy BinaryIoU FalseNegatives FalsePositives
    Hinge Precision PrecisionAtRecall Recall RecallAtPrecision SensitivityAtSpecificity
    SpecificityAtSensitivity SquaredHinge TrueNegatives TruePositives binary_accuracy
    binary_crossentropy binary_focal_crossentropy hinge squared_hinge""",
    "class": """CategoricalAccuracy CategoricalCrossentropy CategoricalHinge F1Score FBetaScore
    KLDivergence OneHotIoU OneHotMeanIoU TopKCategoricalAccuracy categorical_accuracy
    categorical_crossentropy categorical_focal_crossentropy categorical_hinge kl_divergence
    top_k_categorical_accuracy""",
    "label": """IoU MeanIoU SparseCategoricalAccuracy SparseCategoricalCrossentropy
    SparseTopKCategoricalAccuracy sparse_categorical_accuracy
    sparse_categorical_crossentropy sparse_top_k_categorical_accuracy""",
    "number": """Accuracy ConcordanceCorrelation CosineSimilarity LogCoshError Mean
    MeanAbsoluteError MeanAbsolutePercentageError MeanMetricWrapper MeanSquaredError
    MeanSquaredLogarithmicError PearsonCorrelation Poisson R2Score RootMeanSquaredError Sum
    concordance_correlation huber log_cosh mean_absolute_error
    mean_absolute_percentage_error mean_squared_error mean_squared_logarithmic_error
    pearson_correlation poisson""",
}
NO_LOSSES = {"Loss": "a base class", **_NAMES}
NO_METRICS = {"Metric": "a base class", **_NAMES}
_OPTIONS: dict[str, dict[str, Any]] = {
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2], "sparse_y_pred": False},
    "MeanIoU": {"num_classes": 3, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": lambda a, b: keras.ops.sum(a * b, -1)},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}


def _with(found: Any, name: str) -> Any:
    """Return an instance of a class, or a function with the arguments that it needs."""
    if name in ("Mean", "Sum"):
        return _of_predictions(found)
    if isinstance(found, type):
        return found(**_OPTIONS.get(name, {}))
    if name == "categorical_generalized_cross_entropy":
        return lambda a, b: found(a, b, q=0.5)
    if "top_k" in name:
        return lambda a, b: found(a, b, 2)
    return found


def _of_predictions(kind: type) -> Any:
    """Return a metric of one value, for a model that outputs labels, too."""

    class OfPredictions(kind):  # type: ignore[misc, valid-type]
        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None):
            return super().update_state(y_pred, sample_weight)

    return OfPredictions()


def _scored(kind: str, **settings: Callable[[], Any]) -> Case:
    head, labels, loss = _KINDS[kind]

    def build() -> tuple[Any, Any]:
        x = keras.Input((4,))
        return x, head()(layers.Dense(5, activation="tanh")(x))

    standard = {"loss": lambda: loss, "metrics": list}
    return Case(
        build,
        lambda rows: (signed(4)(rows), labels(rows)),
        **(standard | settings),
    )


def _in_float32(one: Case) -> Case:
    """Return the case in float32, because TensorFlow has no kernel in float64."""
    return replace(one, floatx="float32", tolerance=1e-5)


def _ctc(name: str) -> Case:
    def build() -> tuple[Any, Any]:
        x = keras.Input((6, 3))
        return x, layers.Dense(5)(x)

    return Case(
        build,
        lambda rows: (signed(6, 3)(rows), below(4, 2)(rows) + 1),
        loss=lambda: _with(getattr(keras.losses, name), name),
        metrics=list,
        tolerance=1e-6,  # Keras computes it in float32
    )


LOSSES = {
    name: _scored(kind, loss=lambda name=name: _with(getattr(keras.losses, name), name))
    for kind, names in _LOSSES.items()
    for name in names.split()
    if hasattr(keras.losses, name)
} | {name: _ctc(name) for name in ("CTC", "ctc")}
METRICS = {
    name: _scored(
        kind, metrics=lambda name=name: [_with(getattr(keras.metrics, name), name)]
    )
    for kind, names in _METRICS.items()
    for name in names.split()
    if hasattr(keras.metrics, name)
}
for _name, _case in METRICS.items():
    if "topk" in _name.lower().replace("_", ""):
        METRICS[_name] = _in_float32(_case)
