"""Settings of Keras and TensorFlow that change results, which the ranks compare.

A ``keras.json`` of one host, an environment variable of one container or a call in one
branch of a script may change them, and nothing else would show it.
"""

from __future__ import annotations

import functools
import hashlib
import os

import keras
import numpy as np
import tensorflow as tf

import collective
from collective.training.keras_compat.tensorflow_names import determinism

# Environment variables that choose kernels; read when TensorFlow or a library starts.
_CHOOSING = ("TF_ENABLE_ONEDNN", "ONEDNN_", "DNNL_", "XLA_FLAGS", "TF_XLA_FLAGS")


# oneDNN's dtype for products of float32 on processors; the second name is TensorFlow's.
_MATH_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")


def products_of_float32() -> str:
    """Return the dtype in which processors multiply matrices of float32."""
    modes = {os.environ.get(name, "").upper() for name in _MATH_MODES}
    if modes & {"BF16", "F16", "ANY"}:
        return "bfloat16"
    return "tensorfloat32" if "TF32" in modes else "float32"


def describe_settings() -> dict[str, str]:
    """Return the settings by which this process computes, each by the name that sets it."""
    libraries = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_CHOOSING)
    }
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return {
        "keras.config.epsilon()": repr(keras.config.epsilon()),
        "keras.config.floatx()": keras.config.floatx(),
        "keras.config.image_data_format()": keras.config.image_data_format(),
        "keras.config.dtype_policy()": keras.config.dtype_policy().name,
        "tf.config.functions_run_eagerly()": str(tf.config.functions_run_eagerly()),
        "TensorFloat-32": str(tf32),
        "op determinism": str(determinism.is_enabled()),
        "jit of all functions": str(tf.config.optimizer.get_jit() or "off"),
        "settings of oneDNN and XLA": str(libraries or "default"),
        "code of collective": f"{collective.__version__} ({_digest_of_code()})",
        "version of Keras": keras.__version__,
        "version of TensorFlow": tf.__version__,
        "version of NumPy": np.__version__,  # it draws and converts rows
    }


@functools.cache
def _digest_of_code() -> str:
    """Return a digest of the Python files of this package.

    A checkout on one host may be older than the others, under the same version.
    """
    digest = hashlib.sha256()
    root = os.path.dirname(collective.__file__)
    # The folder of the backends is a link in a checkout.
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(file for file in files if file.endswith(".py")):
            with open(os.path.join(folder, name), "rb") as file:
                digest.update(name.encode() + file.read())
    return digest.hexdigest()[:8]
