"""Tests one device, and prints a line at a time; ``device.py WHAT``.

    draws      random numbers: the same bits as on the host, and in any pieces
    orders     operations whose bits differ in a second run, or on two ranks
    recurrent  cuDNN's LSTM and GRU by rows, including a replica without rows
    noise      the distance between two trainings of one program by stock Keras
    memory     peak of the partitioned step, and of stock Keras

Without a GPU each runs on the CPU: this shows only that it runs.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

GPUS = tf.config.list_physical_devices("GPU")
for _gpu in GPUS:
    tf.config.experimental.set_memory_growth(_gpu, True)
PLACE = "GPU:0" if GPUS else "CPU:0"
AGAIN = 8
SEED = [5, 7]


def say(text: str) -> None:
    print(text, flush=True)


def draws() -> int:
    """Check that Philox counts equally on all devices, as the rules of draws assume."""
    wrong = 0
    count = 1 << 17  # more than a GPU has threads
    floats = ("float16", "bfloat16", "float32", "float64")
    kinds: dict[str, Callable[..., tf.Tensor]] = {
        f"{name.__name__} {dtype}": lambda n, name=name, dtype=dtype: name(
            [n], SEED, dtype=dtype
        )
        for name in (
            tf.random.stateless_uniform,
            tf.random.stateless_normal,
            tf.random.stateless_truncated_normal,
        )
        for dtype in floats
    }
    for dtype in ("int32", "int64", "uint32", "uint64"):
        kinds[f"full {dtype}"] = lambda n, dtype=dtype: tf.random.stateless_uniform(
            [n], SEED, None, None, dtype
        )
    for name, draw in kinds.items():
        found = []
        for device in (PLACE, "CPU:0"):
            with tf.device(device):
                found.append([draw(n).numpy() for n in (count, count - 5)])
        (ours, fewer), (host, _) = found
        wide = [np.asarray(a, "float64") for a in (ours, host)]
        apart = np.abs(wide[0] - wide[1]).max() / np.abs(wide[1]).max()
        is_prefix = bool((ours[:-5] == fewer).all())
        # Logarithms and sines may round differently; another order would differ widely.
        is_right = is_prefix and apart < (1e-2 if "float16" in name else 1e-5)
        wrong += not is_right
        say(f"{name}: {apart:.1e} from the host{'' if is_right else ' WRONG ORDER'}")
    return wrong


def operations(rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    """Return by type an operation on numbers for which its order matters."""

    def normal(*shape: int) -> tf.Tensor:
        return tf.constant(rng.normal(size=shape), tf.float32)

    rows, width = 1 << 15, 64
    x, few = normal(rows, width), tf.constant(rng.integers(0, 9, rows))
    images, kernel = normal(32, 32, 32, 16), normal(3, 3, 16, 16)
    deep, deep_kernel = normal(4, 8, 16, 16, 8), normal(3, 3, 3, 8, 8)
    thin, labels = normal(3, 3, 16, 1), tf.constant(rng.integers(0, width, rows))
    ones, same = [1] * 4, {"strides": [1] * 4, "padding": "SAME"}
    pool = {"ksize": [1, 3, 3, 1], **same}
    raw = tf.raw_ops
    boxes = tf.constant(rng.uniform(0, 1, (64, 4)), tf.float32)
    of_box = tf.constant(rng.integers(0, 32, 64), tf.int32)
    sizes = tf.shape(images)
    places = tf.stack([tf.range(rows, dtype=tf.int64) % 7, few], 1)
    table = tf.Variable(tf.zeros([9, width]))

    def scattered() -> tf.Tensor:
        table.assign(tf.zeros_like(table))
        table.scatter_add(tf.IndexedSlices(x, few))
        return table.read_value()

    def scattered_by_place() -> tf.Tensor:
        table.assign(tf.zeros_like(table))
        table.scatter_nd_add(few[:, None], x)
        return table.read_value()

    return {
        "UnsortedSegmentSum": lambda: tf.math.unsorted_segment_sum(x, few, 9),
        "UnsortedSegmentProd": lambda: tf.math.unsorted_segment_prod(
            1 + x * 1e-3, few, 9
        ),
        "SegmentSum": lambda: tf.math.segment_sum(x, tf.sort(few)),
        "SegmentMean": lambda: tf.math.segment_mean(x, tf.sort(few)),
        "ScatterNd": lambda: tf.scatter_nd(few[:, None], x, [9, width]),
        "TensorScatterAdd": lambda: tf.tensor_scatter_nd_add(
            tf.zeros([9, width]), few[:, None], x
        ),
        "ResourceScatterAdd": scattered,
        "ResourceScatterNdAdd": scattered_by_place,
        "DenseBincount": lambda: tf.math.bincount(
            tf.cast(few, tf.int32), x[:, 0], minlength=9
        ),
        "SparseTensorDenseMatMul": lambda: tf.sparse.sparse_dense_matmul(
            tf.sparse.reorder(tf.SparseTensor(places, x[:, 0], [7, 9])), x[:9]
        ),
        "Conv2D": lambda: tf.nn.conv2d(images, kernel, 1, "SAME"),
        "Conv2DBackpropFilter": lambda: raw.Conv2DBackpropFilter(
            input=images, filter_sizes=kernel.shape, out_backprop=images, **same
        ),
        "Conv2DBackpropInput": lambda: raw.Conv2DBackpropInput(
            input_sizes=sizes, filter=kernel, out_backprop=images, **same
        ),
        "Conv3DBackpropFilterV2": lambda: raw.Conv3DBackpropFilterV2(
            input=deep,
            filter_sizes=deep_kernel.shape,
            out_backprop=deep,
            strides=[1] * 5,
            padding="SAME",
        ),
        "DepthwiseConv2dNativeBackpropFilter": lambda: (
            raw.DepthwiseConv2dNativeBackpropFilter(
                input=images, filter_sizes=thin.shape, out_backprop=images, **same
            )
        ),
        "DepthwiseConv2dNativeBackpropInput": lambda: (
            raw.DepthwiseConv2dNativeBackpropInput(
                input_sizes=sizes, filter=thin, out_backprop=images, **same
            )
        ),
        "Dilation2DBackpropFilter": lambda: raw.Dilation2DBackpropFilter(
            input=images,
            filter=kernel[..., 0],
            out_backprop=images,
            rates=ones,
            **same,
        ),
        "MaxPoolGrad": lambda: raw.MaxPoolGrad(
            orig_input=images,
            orig_output=raw.MaxPool(input=images, **pool),
            grad=images,
            **pool,
        ),
        "AvgPoolGrad": lambda: raw.AvgPoolGrad(
            orig_input_shape=sizes, grad=images, **pool
        ),
        "BiasAddGrad": lambda: raw.BiasAddGrad(out_backprop=images),
        "ResizeBilinearGrad": lambda: raw.ResizeBilinearGrad(
            grads=images, original_image=images[:, :9, :9]
        ),
        "ResizeNearestNeighborGrad": lambda: raw.ResizeNearestNeighborGrad(
            grads=images, size=[9, 9]
        ),
        "CropAndResizeGradImage": lambda: raw.CropAndResizeGradImage(
            grads=tf.ones([64, 8, 8, 16]),
            boxes=boxes,
            box_ind=of_box,
            image_size=sizes,
            T=tf.float32,
        ),
        "SoftmaxCrossEntropyWithLogits": lambda: raw.SoftmaxCrossEntropyWithLogits(
            features=x, labels=tf.nn.softmax(x)
        ),
        "SparseSoftmaxCrossEntropyWithLogits": lambda: (
            raw.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=labels)
        ),
        "FusedBatchNormGradV3": lambda: norm_gradient(images),
        "MatMul": lambda: tf.matmul(x, x, transpose_a=True),
        "BatchMatMulV2": lambda: tf.matmul(images, images, transpose_a=True),
        "Einsum": lambda: tf.einsum("bhwc,bhwd->cd", images, images),
        "Sum": lambda: [tf.reduce_sum(x), tf.reduce_sum(x, 0), tf.reduce_sum(x, 1)],
        "Mean": lambda: [tf.reduce_mean(x), tf.reduce_mean(images, [0, 1, 2])],
        "L2Loss": lambda: tf.nn.l2_loss(x),
        "Softmax": lambda: tf.nn.softmax(x),
        "Cumsum": lambda: tf.cumsum(x),
        "SparseSegmentSum": lambda: tf.sparse.segment_sum(x, few, tf.sort(few)),
        "SparseSegmentSumGrad": lambda: raw.SparseSegmentSumGrad(
            grad=x, indices=few, segment_ids=tf.range(rows), output_dim0=9
        ),
        "TopKV2": lambda: tf.math.top_k(tf.round(x), 9),
        "GatherV2": lambda: tf.gather(x, few),
    }


def norm_gradient(images: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(images)
        ones = tf.ones(images.shape[-1])
        made, *_ = tf.compat.v1.nn.fused_batch_norm(images, ones, ones)
        score = tf.reduce_sum(tf.sin(made))
    return tape.gradient(score, images)


def orders(file: str) -> int:
    """Write the bits of each operation's result to a file, for another rank to compare."""
    from collective.training.partition import atomics

    listed = atomics._CHEAP | atomics._DEAR
    found: dict[str, list[str]] = {}
    wrong = 0
    with tf.device(PLACE):
        for name, run in operations(np.random.default_rng(0)).items():
            try:
                bits = [digest(run()) for _ in range(AGAIN)]
            except (tf.errors.OpError, ValueError) as error:
                say(f"{name}: {str(error).splitlines()[0][:90]}")
                continue
            found[name] = sorted(set(bits))
            is_wrong = len(found[name]) > 1 and name not in listed
            wrong += is_wrong
            known = "listed" if name in listed else "NOT LISTED" if is_wrong else ""
            if len(found[name]) > 1:
                say(f"{name}: {len(found[name])} results of {AGAIN}, {known}")
    say(f"{len(found)} operations, {AGAIN} times each")
    with open(file, "w") as out:
        json.dump(found, out)
    return wrong


def digest(value: Any) -> str:
    parts = [np.ascontiguousarray(t).tobytes() for t in tf.nest.flatten(value)]
    return hashlib.sha1(b"".join(parts)).hexdigest()


def recurrent() -> int:
    """Check cuDNN's kernels; on the CPU Keras uses a loop, which needs no rule."""
    from tests.training.partition.partitioned import Partitioned, assert_same

    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5, 3)).astype("float32")
    lengths = rng.integers(1, 6, 6)
    for kind in (keras.layers.LSTM, keras.layers.GRU):
        layer = kind(8, return_sequences=True)
        layer.build((None, 5, 3))

        def function(x: tf.Tensor, n: tf.Tensor, layer: Any = layer) -> list[tf.Tensor]:
            with tf.GradientTape() as tape:
                made = layer(x, mask=tf.sequence_mask(n, 5))
                loss = tf.reduce_sum(made**2) + tf.reduce_sum(layer(x) ** 3)
            weights = [w.value for w in layer.weights]
            return [made, loss, *tape.gradient(loss, weights)]

        made = Partitioned(function, [x, lengths], [True, True], replicas=3)
        if GPUS:
            assert "CudnnRNNV3" in made.types and not made.fallbacks, made.fallbacks
        for counts in ([2, 2, 2], [6, 0, 0], [0, 1, 5]):
            want, got = made.whole([x, lengths]), made(counts, [x, lengths])
            assert_same(want, got, [str(i) for i in range(len(want))], 2e-5)
            say(f"{kind.__name__} {counts}: equal")
    return 0


def noise(*names: str) -> int:
    """Print the noise of stock Keras, below which no comparison can be exact."""
    from tests.training.unedited.keras_programs import arrays_of, load

    keras.config.set_floatx("float64")
    found: dict[str, list[Any]] = {name: [] for name in names}
    for round_ in range(4):
        if round_ == 2:  # for the rest of this process
            tf.config.experimental.enable_op_determinism()
        for name in names:
            keras.utils.clear_session()
            sys.argv = [f"{name}.py"]
            try:
                found[name].append(arrays_of(load(name)["main"]()))
            except tf.errors.OpError as error:  # an operation without a fixed order
                say(f"{name}: {str(error).splitlines()[0]}")
    pairs = {
        "two trainings": (0, 1),
        "with determinism": (2, 3),
        "one with, one without": (1, 2),
    }
    for name, runs in found.items():
        for how, (a, b) in pairs.items():
            if b < len(runs):
                say(f"stock {name}, {how}: {apart(runs[a], runs[b])}")
    return 0


def apart(a: dict[str, Any], b: dict[str, Any]) -> str:
    worst = max(
        (np.abs(x - y).max(initial=0) / (np.abs(x).max(initial=0) or 1.0), path)
        for (path, x), y in zip(a.items(), b.values(), strict=True)
        if x.dtype.kind == "f"
    )
    return f"{worst[0]:.1e} of the largest entry of {worst[1]}"


def memory(*names: str) -> int:
    """Print the peaks of the device's allocator, in a step of a single process."""
    import collective
    from collective import backends
    from collective.training.calls import models

    backend = backends.get("single")
    shapes = {"resnet50": (64, 64, 3), "cnn": (28, 28, 1)}
    for name in names:
        rows = 64 if GPUS else 4
        x = np.random.default_rng(0).normal(size=(rows, *shapes[name]))
        x, y = x.astype("float32"), np.zeros(rows, "int32")
        peaks = []
        for fit in (keras.Model.fit, collective.fit):
            keras.utils.clear_session()
            model = models.build(name, input_shape=shapes[name], classes=10)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss, jit_compile=False)
            more = {} if fit is keras.Model.fit else {"backend": backend}
            if GPUS:
                tf.config.experimental.reset_memory_stats(PLACE)
            fit(model, x, y, batch_size=rows, epochs=3, verbose=0, **more)
            if GPUS:
                peaks.append(tf.config.experimental.get_memory_info(PLACE)["peak"])
        text = " and ".join(f"{p / 2**20:.0f} MiB" for p in peaks) or "no GPU"
        say(f"{name}, {rows} rows, stock Keras and the partitioned step: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(min(1, globals()[sys.argv[1]](*sys.argv[2:])))
