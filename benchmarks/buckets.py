"""Which bucket size trains fastest: what the default of ``--bucket-bytes`` rests on.

    python -m collective.launch -np 2 python benchmarks/buckets.py cnn --steps 200
    horovodrun -np 2 python benchmarks/buckets.py cnn --steps 200 --backend horovod
    python -m tests.hosts.lab --hosts 2 --slots 1 --rate 1gbit \
        python benchmarks/buckets.py resnet50 --rows 16

``whole`` sums all gradients as one group, once the last is there. With buckets, the sums
of the first run while the rest is computed. The sizes take turns; printed are the median
of the steps of all rounds, and the lowest and highest median of a round.
"""

import sys

import common
import numpy as np

from collective import backends
from collective.backends.quiet import quiet


def main() -> None:
    """Runs the rounds and prints a line for each size."""
    parser = common.parser(__doc__)
    parser.add_argument("model", choices=("cnn", "resnet50"))
    parser.add_argument("--backend", choices=("native", "horovod"), default="native")
    parser.add_argument("--rows", type=int, default=32, help="of each rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="whole,262144,1048576,4194304,16777216")
    options = parser.parse_args()
    with quiet():
        # With buckets: TensorFlow's threads are shared out once.
        ranks = backends.get(options.backend, backends.Options(bucket_bytes=1))
        import keras

        from collective import training

    shape = common.SHAPES[options.model]
    batch = ranks.size * options.rows
    data = common.random_rows(4 * batch, shape)

    def step_ms(size: str) -> np.ndarray:
        wanted = sys.maxsize if size == "whole" else int(size)
        chosen = backends.Options(bucket_bytes=wanted)
        result = training.fit(
            lambda: common.compiled(options.model, keras.optimizers.SGD(1e-3), shape),
            data, backend=backends.get(options.backend, chosen),
            global_batch_size=batch, steps=options.steps + 1, verbose=0,
        )  # fmt: skip
        keras.backend.clear_session()
        return 1000 * result.timing.seconds()

    sizes = {size: lambda size=size: step_ms(size) for size in options.sizes.split(",")}
    found = common.take_turns(sizes, options.rounds)
    if ranks.rank == 0:
        print(f"{'bucket bytes':>12} {'ms a step':>10} {'lowest':>8} {'highest':>8}")
        for size, times in found.items():
            rounds = [float(np.median(t)) for t in times]
            middle = float(np.median(np.concatenate(times)))
            print(f"{size:>12} {middle:10.4g} {min(rounds):8.4g} {max(rounds):8.4g}")


if __name__ == "__main__":
    main()
