"""The form in which gradients travel: unchanged, or as 16-bit floats."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Makes a tensor smaller before it is reduced, and restores it afterwards.

    A class of your own is a subclass with both methods. It must return the same dtypes
    and shapes on every rank, and it must be possible to sum its tensors.
    """

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor to send, and the context for ``decompress``."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the reduced tensor, in its form before ``compress``."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor itself."""
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in another dtype, and other tensors unchanged."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        floating = tensor.dtype.is_floating
        return tf.cast(tensor, cls.dtype) if floating else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """float16: the core adds in float32 and rounds the sum once."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """bfloat16: the range of float32. Horovod has none."""

    dtype = tf.bfloat16


class Compression:
    """The choices for ``compression=``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
