"""A step on a device that computes in parallel with the cores, as a GPU does.

    python -m tests.hosts.lab --hosts 2 --slots 1 --rate 1gbit \
        python benchmarks/emulated_device.py --gigabits 1

Each layer sleeps. Back-propagation makes the gradients one after another, each after a sleep;
the backend sums them, by default as it would in a training. The output is the median step,
and the larger of the times for computing and for the wire: no step can be shorter.
"""

from __future__ import annotations

import statistics
import time

import tensorflow as tf
import workloads

from collective import backends
from collective.backends import Options

WARM_UP = 2


def main() -> None:
    """Measure and print the times."""
    p = workloads.parser(__doc__)
    p.add_argument("--backend", default="native")
    p.add_argument("--bytes", type=int, default=94 << 20, help="of all gradients")
    p.add_argument("--layers", type=int, default=50)
    p.add_argument("--compute", type=float, default=0.5, help="seconds")
    p.add_argument("--gigabits", type=float, default=1.0, help="of each host's link")
    p.add_argument("--bucket-bytes", type=int)
    p.add_argument("--steps", type=int, default=8)
    args = p.parse_args()
    backend = backends.get(args.backend, Options(bucket_bytes=args.bucket_bytes))
    shape = [args.bytes // args.layers // 4]
    weights = [tf.Variable(tf.ones(shape)) for _ in range(args.layers)]

    def layer(before: object) -> object:
        time.sleep(args.compute / args.layers)
        return before

    @tf.function(autograph=False)
    def step() -> list[tf.Tensor]:
        done, gradients = tf.zeros([]), []
        for weight in weights:
            done = tf.numpy_function(layer, [done], tf.float32)
            done.set_shape([])
            gradients.append(weight + done)
        return [total[0] for total in backend.all_reduce(gradients[::-1])]

    seconds = []
    for _ in range(args.steps + WARM_UP):
        backend.barrier()
        begin = time.perf_counter()
        for total in step():
            total.numpy()
        seconds.append(time.perf_counter() - begin)
    if backend.rank:
        return
    share = 2 * (backend.size - 1) / backend.size
    wire = share * args.bytes * 8 / (args.gigabits * 1e9)
    median, bound = statistics.median(seconds[WARM_UP:]), max(args.compute, wire)
    print(
        f"{args.backend}, {backend.size} ranks: {median * 1e3:.0f} ms a step; computing "
        f"{args.compute * 1e3:.0f}, wire {wire * 1e3:.0f}: {median / bound:.2f} times the larger"
    )


if __name__ == "__main__":
    main()
