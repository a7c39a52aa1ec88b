"""Operations on single rows: images, signals, matrices, distributions."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.training.partition.operands import (
    BLOCKS,
    Operands,
    below,
    check,
    generator,
    left_out,
    raw,
    unit,
)


def test_distributions() -> None:
    functions = {
        "Softmax": lambda x, i: tf.nn.softmax(x),
        "LogSoftmax": lambda x, i: tf.nn.log_softmax(x),
        "TopKV2": lambda x, i: tf.math.top_k(x, 2),
        "sort": lambda x, i: tf.sort(x),
        "argsort": lambda x, i: tf.argsort(x),
        "BiasAdd": lambda x, i: tf.nn.bias_add(x, [1.0, 2.0, 3.0, 4.0]),
        "Softmax cross entropy": lambda x, i: tf.nn.softmax_cross_entropy_with_logits(
            tf.one_hot(i, 4, dtype=x.dtype), x
        ),
        "sparse": lambda x, i: tf.nn.sparse_softmax_cross_entropy_with_logits(i, x),
        "InTopKV2": lambda x, i: tf.math.in_top_k(i, tf.cast(x, tf.float32), 2),
        "fake quant": lambda x, i: tf.quantization.fake_quant_with_min_max_vars(
            tf.cast(x, tf.float32), -1.0, 1.0
        ),
        "per channel": lambda x, i: (
            tf.quantization.fake_quant_with_min_max_vars_per_channel(
                tf.cast(x, tf.float32), [-1.0] * 4, [1.0] * 4
            )
        ),
    }
    operands = Operands(generator(0), (1, 2)).sharded([4]).sharded([], 0, below(4))
    made = check(operands, functions, derivatives=2, tolerance=1e-6)
    assert not made.fallbacks
    twice = {
        "Softmax": lambda x: tf.nn.softmax(x),
        "of rows in the middle": lambda x: tf.nn.log_softmax(x),
    }
    check(Operands(generator(1), (1, 1)).sharded([3, 4], 1), twice, derivatives=2)


_IMAGES: dict[str, Any] = {
    "Conv2D": lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"),
    "strided": lambda x, k: tf.nn.conv2d(x, k, 2, "VALID"),
    "dilated": lambda x, k: tf.nn.conv2d(
        tf.stop_gradient(x), tf.stop_gradient(k), 1, "VALID", dilations=2
    ),
    "Depthwise": lambda x, k: tf.nn.depthwise_conv2d(x, k, [1] * 4, "SAME"),
    "transposed": lambda x, k: tf.nn.conv2d_transpose(
        x, tf.transpose(k, [0, 1, 3, 2]), [tf.shape(x)[0], 12, 12, 2], 2, "SAME"
    ),
    "MaxPool": lambda x, k: tf.nn.max_pool2d(x, 2, 2, "SAME"),
    "AvgPool": lambda x, k: tf.nn.avg_pool2d(x, 3, 2, "VALID"),
    "ResizeBilinear": lambda x, k: tf.image.resize(x, [9, 4]),
    "ResizeBicubic": lambda x, k: tf.image.resize(x, [9, 4], "bicubic"),
    "ResizeNearestNeighbor": lambda x, k: tf.image.resize(x, [9, 4], "nearest"),
    "ResizeArea": lambda x, k: tf.image.resize(x, [3, 4], "area"),
    "ScaleAndTranslate": lambda x, k: tf.image.resize(
        tf.cast(x, "float32"), [9, 4], antialias=True
    ),
    "AdjustContrast": lambda x, k: tf.image.adjust_contrast(x, 0.3),
    "AdjustHue": lambda x, k: tf.image.adjust_hue(x, 0.1),
    "AdjustSaturation": lambda x, k: tf.image.adjust_saturation(x, 1.4),
    "RGBToHSV": lambda x, k: tf.image.rgb_to_hsv(x),
    "HSVToRGB": lambda x, k: tf.image.hsv_to_rgb(x),
    "grayscale": lambda x, k: tf.image.rgb_to_grayscale(x),
    "flip": lambda x, k: tf.image.flip_left_right(x),
    "rot90": lambda x, k: tf.image.rot90(x),
    "crop": lambda x, k: tf.image.central_crop(x, 0.5),
    "padded": lambda x, k: tf.image.resize_with_crop_or_pad(x, 4, 8),
    "ExtractImagePatches": lambda x, k: tf.image.extract_patches(
        x, [1, 2, 2, 1], [1, 2, 2, 1], [1] * 4, "VALID"
    ),
    "SpaceToDepth": lambda x, k: tf.nn.space_to_depth(x, 2),
    "DepthToSpace": lambda x, k: tf.nn.depth_to_space(tf.concat([x] * 4, -1), 2),
    "LRN": lambda x, k: tf.nn.local_response_normalization(tf.cast(x, tf.float32)),
    "Dilation2D": lambda x, k: tf.nn.dilation2d(
        x, k[..., 0], [1] * 4, "SAME", "NHWC", [1] * 4
    ),
    "standardized": lambda x, k: tf.image.per_image_standardization(x),
    "total variation": lambda x, k: tf.image.total_variation(x),
    "ssim": lambda x, k: tf.image.ssim(x, x * 0.9, 1.0, filter_size=3),
    "sobel": lambda x, k: tf.image.sobel_edges(x),
}


@pytest.mark.parametrize("seed", range(3))
def test_images(seed: int) -> None:
    names = sorted(_IMAGES)[seed::3]
    operands = Operands(generator(seed), BLOCKS[seed]).sharded([6, 6, 3], 0, unit)
    operands = operands.whole([3, 3, 3, 2])
    functions = {name: _IMAGES[name] for name in names}
    made = check(operands, functions, derivatives=1, tolerance=1e-5)
    assert not made.fallbacks, made.fallbacks


def test_convolutions_twice_and_narrow() -> None:
    functions = {
        "Conv2D": lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"),
        "Depthwise": lambda x, k: tf.nn.depthwise_conv2d(x, k, [1] * 4, "SAME"),
        "pools": lambda x, k: tf.nn.avg_pool2d(
            tf.nn.max_pool2d(x, 2, 1, "SAME"), 2, 2, "SAME"
        ),
        "float32": lambda x, k: tf.nn.relu(
            tf.nn.bias_add(
                tf.nn.conv2d(tf.cast(x, "float32"), tf.cast(k, "float32"), 1, "SAME"),
                [1.0, 2.0],
            )
        ),
        "bfloat16": lambda x, k: tf.cast(
            tf.nn.conv2d(
                tf.cast(tf.stop_gradient(x), "bfloat16"),
                tf.cast(tf.stop_gradient(k), "bfloat16"),
                1,
                "SAME",
            ),
            "float32",
        ),
        "float32 depthwise": lambda x, k: tf.nn.depthwise_conv2d(
            tf.cast(x, "float32"), tf.cast(k, "float32"), [1] * 4, "SAME"
        ),
    }
    operands = Operands(generator(0), (1, 2)).sharded([4, 4, 3], 0, unit)
    made = check(operands.whole([2, 2, 3, 2]), functions, derivatives=2, tolerance=3e-2)
    assert not made.fallbacks, made.fallbacks


def test_convolutions_in_groups_whose_gradients_only_xla_has() -> None:
    functions = {
        "groups": lambda x, k: keras.ops.conv(x, k, 1, "same"),
        "in a loop": lambda x, k: tf.while_loop(
            lambda i, y: i < 2,
            lambda i, y: (i + 1, keras.ops.conv(y, k[..., :4], 1, "same")),
            [0, x],
        )[1],
    }
    operands = Operands(generator(0), (0, 1, 2)).sharded([4, 4, 4], 0, unit)
    made = check(operands.whole([2, 2, 2, 6]), functions, derivatives=1, tolerance=1e-9)
    assert not made.fallbacks, made.fallbacks


def test_volumes_and_signals() -> None:
    functions = {
        "Conv3D": lambda x, k: tf.nn.conv3d(x, k, [1] * 5, "SAME"),
        "float32": lambda x, k: tf.nn.conv3d(
            tf.cast(x, "float32"), tf.cast(k, "float32"), [1] * 5, "SAME"
        ),
        "transposed": lambda x, k: tf.nn.conv3d_transpose(
            x, tf.transpose(k, [0, 1, 2, 4, 3]), [tf.shape(x)[0], 8, 8, 4, 2], 2, "SAME"
        ),
        "MaxPool3D": lambda x, k: tf.nn.max_pool3d(tf.cast(x, "float32"), 2, 2, "SAME"),
        "AvgPool3D": lambda x, k: tf.nn.avg_pool3d(tf.cast(x, "float32"), 2, 2, "SAME"),
        "ExtractVolumePatches": lambda x, k: tf.extract_volume_patches(
            x, [1, 2, 2, 1, 1], [1] * 5, "VALID"
        ),
    }
    operands = Operands(generator(0), (1, 1)).sharded([4, 4, 2, 3], 0, unit)
    made = check(
        operands.whole([2, 2, 1, 3, 2]), functions, derivatives=1, tolerance=1e-5
    )
    assert not made.fallbacks, made.fallbacks
    signals = {
        "FFT": lambda x: tf.math.real(tf.signal.fft(tf.cast(x, tf.complex128))),
        "IFFT": lambda x: tf.math.abs(tf.signal.ifft(tf.cast(x, tf.complex128))),
        "RFFT": lambda x: tf.math.abs(tf.signal.rfft(x)),
        "IRFFT": lambda x: tf.signal.irfft(tf.signal.rfft(x)),
        "FFT2D": lambda x: tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex128))),
        "RFFT2D": lambda x: tf.signal.irfft2d(tf.signal.rfft2d(x)),
        "FFT3D": lambda x: tf.math.real(
            tf.signal.fft3d(tf.cast(x[:, None], tf.complex128))
        ),
        "stft": lambda x: tf.math.abs(tf.signal.stft(tf.cast(x, "float32"), 4, 2)),
        "frame": lambda x: tf.signal.frame(x, 3, 2),
        "conv1d": lambda x: tf.nn.conv1d(x, tf.ones([2, 4, 3], x.dtype), 1, "SAME"),
        "causal": lambda x: tf.nn.conv1d(
            tf.pad(tf.stop_gradient(x), [[0, 0], [2, 0], [0, 0]]),
            tf.ones([2, 4, 3], x.dtype),
            1,
            "VALID",
            dilations=2,
        ),
    }
    made = check(
        Operands(generator(1), (1, 2)).sharded([6, 4]),
        signals,
        derivatives=1,
        tolerance=1e-5,
    )
    assert not made.fallbacks, made.fallbacks


def _positive(x: tf.Tensor) -> tf.Tensor:
    return tf.matmul(x, x, transpose_b=True) + 2 * tf.eye(3, dtype=x.dtype)


def test_matrices() -> None:
    functions = {
        "Cholesky": lambda x, y: tf.linalg.cholesky(_positive(x)),
        "MatrixInverse": lambda x, y: tf.linalg.inv(_positive(x)),
        "MatrixDeterminant": lambda x, y: tf.linalg.det(_positive(x)),
        "LogMatrixDeterminant": lambda x, y: tf.linalg.slogdet(_positive(x)),
        "Qr": lambda x, y: tf.linalg.qr(_positive(x)),
        "singular values": lambda x, y: tf.linalg.svd(x, compute_uv=False),
        "eigenvalues": lambda x, y: tf.linalg.eigvalsh(_positive(x)),
        "Lu": lambda x, y: tf.linalg.lu(_positive(x))[0],
        "MatrixSquareRoot": lambda x, y: tf.linalg.sqrtm(_positive(x)),
        "expm": lambda x, y: tf.linalg.expm(x * 0.1),
        "MatrixSolve": lambda x, y: tf.linalg.solve(_positive(x), y),
        "MatrixTriangularSolve": lambda x, y: tf.linalg.triangular_solve(
            _positive(x), y
        ),
        "lstsq": lambda x, y: tf.linalg.lstsq(_positive(x), y),
        "TridiagonalSolve": lambda x, y: tf.linalg.tridiagonal_solve(
            _positive(x), y, diagonals_format="compact"
        ),
        "MatrixBandPart": lambda x, y: tf.linalg.band_part(x, 1, 0),
        "MatrixDiagV3": lambda x, y: tf.linalg.diag(x),
        "MatrixDiagPartV3": lambda x, y: tf.linalg.diag_part(x),
        "MatrixSetDiagV3": lambda x, y: tf.linalg.set_diag(x, y[:, :, 0]),
        "trace": lambda x, y: tf.linalg.trace(x),
        "cross": lambda x, y: tf.linalg.cross(x, x + 1),
        "pinv": lambda x, y: tf.linalg.pinv(_positive(x)),
    }
    operands = Operands(generator(0), (1, 2)).sharded([3, 3]).sharded([3, 2])
    made = check(operands, functions, derivatives=1, tolerance=1e-8)
    assert not made.fallbacks, made.fallbacks


@pytest.mark.parametrize("is_static", [False, True])
def test_systems_that_broadcast_and_several_diagonals(is_static: bool) -> None:
    def banded(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.BandedTriangularSolve(matrix=tf.abs(x[:, :2]) + 1, rhs=y)

    functions = {
        "bands": lambda x, y, a, b: banded(x, y),
        "one matrix of bands": lambda x, y, a, b: banded(a, y),
        "one side of bands": lambda x, y, a, b: banded(x, b),
        "one matrix": lambda x, y, a, b: tf.linalg.triangular_solve(_positive(a), y),
        "one side": lambda x, y, a, b: tf.linalg.triangular_solve(_positive(x), b),
        "two diagonals": lambda x, y, a, b: tf.linalg.diag(x[:, :2], k=(-1, 0)),
        "three diagonals": lambda x, y, a, b: tf.linalg.diag(x, k=(0, 2)),
        "moments": lambda x, y, a, b: [tf.shape(t) for t in tf.nn.moments(y, [0])],
    }
    if is_static:  # TensorFlow itself refuses it where it is not
        functions["set"] = lambda x, y, a, b: tf.linalg.set_diag(x, x[:, 1:], k=(0, 1))
    operands = Operands(generator(is_static), (1, 2)).sharded([3, 3]).sharded([3, 2])
    operands = operands.whole([1, 3, 3]).whole([1, 3, 2])
    made = check(operands, functions, tolerance=1e-9, is_static=is_static)
    assert made.replicas > 1
    assert not made.fallbacks, made.fallbacks


def test_norms_transforms_and_boxes() -> None:
    def norm(x: tf.Tensor, training: bool) -> Any:
        ones = tf.ones(3)
        return raw(
            "FusedBatchNormV3",
            tf.cast(x, "float32"),
            ones * 2,
            ones,
            ones * (not training),
            ones * (not training),
            is_training=training,
        )[0]

    functions = {
        "given statistics": lambda x, t: norm(x, False),
        "own statistics": lambda x, t: norm(x, True),
        "ImageProjectiveTransform": lambda x, t: tf.raw_ops.ImageProjectiveTransformV3(
            images=tf.cast(x, "float32"),
            transforms=tf.concat(
                [tf.cast(t, "float32"), tf.zeros_like(t, "float32")[:, :2]], 1
            ),
            output_shape=[5, 5],
            fill_value=0.0,
            interpolation="BILINEAR",
        ),
        "all by one": lambda x, t: tf.raw_ops.ImageProjectiveTransformV3(
            images=tf.cast(x, "float32"),
            transforms=[[1.0, 0.1, 0, 0.2, 1, 0, 0, 0]],
            output_shape=[5, 5],
            fill_value=0.0,
            interpolation="NEAREST",
        ),
        "CropAndResize": lambda x, t: tf.image.crop_and_resize(
            x, tf.cast(t[:, :4], "float32"), tf.range(tf.shape(x)[0]), [3, 3]
        ),
    }
    operands = Operands(generator(0)).sharded([6, 6, 3], 0, unit).sharded([6], 0, unit)
    check(operands, functions, tolerance=1e-5)


@pytest.mark.parametrize("blocks", [left_out((1,)), (1, 2), left_out((1, 1))])
def test_spaces_and_batches(blocks: tuple[int, ...]) -> None:
    def there(x: tf.Tensor) -> tf.Tensor:
        return tf.space_to_batch(x, [2, 2], [[0, 0], [2, 0]])

    functions = {
        "SpaceToBatchND": there,
        "and back": lambda x: tf.batch_to_space(
            there(x) * 2.0, [2, 2], [[0, 0], [2, 0]]
        ),
        "dilated convolution": lambda x: tf.nn.convolution(
            x, tf.ones([2, 2, 3, 2], x.dtype), 1, "SAME", dilations=[2, 3]
        ),
        "back alone": lambda x: tf.batch_to_space(
            tf.concat([x, x, x + 1, x], 0), [2, 2], [[0, 1], [0, 0]]
        ),
    }
    operands = Operands(generator(1), blocks).sharded([4, 6, 3], 0, unit)
    made = check(operands, functions, derivatives=1)
    assert not made.fallbacks, made.fallbacks


def test_regions_that_follow_from_a_seed() -> None:
    def pooled(pool: Any, x: tf.Tensor) -> Any:
        return list(pool(x, [1, 1.4, 1.6, 1], seed=3))

    with tf.device("CPU"):
        for derivatives, pool in enumerate(  # TensorFlow has no gradient of averages
            (tf.nn.fractional_avg_pool, tf.nn.fractional_max_pool)
        ):
            operands = Operands(generator(3), (1, 2)).sharded([7, 8, 2])
            functions = {"pool": lambda x, pool=pool: pooled(pool, x)}
            made = check(operands, functions, derivatives=derivatives)
            assert not made.fallbacks


def test_boxes_of_own_rows() -> None:
    def crops(x: tf.Tensor, t: tf.Tensor, numbers: Any) -> tf.Tensor:
        boxes = tf.cast(tf.concat([t[:, :2] * 0.5, t[:, 2:]], 1), "float32")
        return tf.image.crop_and_resize(tf.cast(x, "float32"), boxes, numbers, [3, 3])

    def count(x: tf.Tensor) -> Any:
        return tf.shape(x)[0]

    own = {"own": lambda x, t: crops(x, t, tf.range(count(x)))}
    operands = Operands(generator(0)).sharded([6, 6, 3], 0, unit).sharded([4], 0, unit)
    made = check(operands, own, derivatives=1, tolerance=1e-5)
    assert not made.fallbacks, made.fallbacks
    others = {
        "backwards": lambda x, t: crops(x, t, tf.range(count(x))[::-1]),
        "one": lambda x, t: crops(x, t, tf.zeros([count(x)], tf.int32)),
        "another batch": lambda x, t: crops(x[:1], t[:1], tf.range(1)),
    }
    check(operands, others, derivatives=1, tolerance=1e-5)


def test_largest_places_and_rounded_numbers() -> None:
    def largest(x: tf.Tensor, **more: Any) -> tf.Tensor:
        return tf.nn.max_pool_with_argmax(tf.cast(x, "float32"), 2, 2, "SAME", **more)

    def rounded(x: tf.Tensor, **more: Any) -> tf.Tensor:
        low, high = (tf.constant(bound, x.dtype) for bound in (-0.5, 0.6))
        quantize = tf.quantization.quantize_and_dequantize_v2
        return quantize(x, low, high, range_given=True, **more)

    functions = {
        "largest": largest,
        "rounded": rounded,
        "narrow": lambda x: rounded(x, narrow_range=True, round_mode="HALF_UP"),
    }
    operands = Operands(generator(1)).sharded([4, 5, 2])
    made = check(operands, functions, derivatives=1, tolerance=1e-6)
    assert not made.fallbacks, made.fallbacks
    others = {
        "in the batch": lambda x: largest(x, include_batch_in_index=True),
        "own range": lambda x: tf.quantization.quantize_and_dequantize_v2(x, 0.0, 0.0),
    }
    check(operands, others, derivatives=1, tolerance=1e-6)
