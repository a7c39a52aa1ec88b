"""Measures what a rank holds of a model that is laid out over ranks, beside one process.

    python benchmarks/mesh_memory.py -np 4
    python benchmarks/mesh_memory.py -np 2 --layers 12 --width 1448 model shard_weights

A script that nothing of ours is in trains three steps with Adam: by Python alone, then by
``collectiverun --keras`` with a layout map (``model``), or with the option ``shard_weights``
or ``shard_optimizer``. The output has the resident memory of the largest rank beyond that
of TensorFlow alone: what it holds after the steps, and the peak since the model was made,
steps included. Memory that is freed goes back to the operating system at once, so that what
is resident is what is held: large blocks are mapped alone (``MALLOC_MMAP_THRESHOLD_``), and
oneDNN is off, with which TensorFlow has an allocator that keeps what it once had.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import workloads

MB, ROWS, STEPS = 1e6, 8, 3
KINDS = ("model", "shard_weights", "shard_optimizer")


def main() -> None:
    """Start one process, then the ranks of each kind; print a line for each."""
    p = workloads.parser(__doc__)
    p.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; by default all")
    p.add_argument("-np", type=int, default=4)
    p.add_argument("--layers", type=int, default=48, help="dense layers")
    p.add_argument("--width", type=int, default=2048, help="units of each")
    p.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        train(args.child[0], Path(args.child[1]), args.layers, args.width)
        return
    alone = measured("alone", args)
    weights = args.layers * args.width * (args.width + 1) * 4
    print(
        f"{weights / MB:.0f} MB of weights, {3 * weights / MB:.0f} MB with Adam's slots"
    )
    print(f"one process: {alone[0]:.0f} MB held, {alone[1]:.0f} MB at the peak")
    for kind in args.kinds or KINDS:
        held, peak = measured(kind, args)
        print(
            f"{args.np} ranks, {kind}: {held:.0f} MB held ({held / alone[0]:.2f}), "
            f"{peak:.0f} MB at the peak ({peak / alone[1]:.2f})",
            flush=True,
        )


def measured(kind: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return what the largest rank holds, and its peak, in MB."""
    launch: list[str] = [sys.executable]
    if kind != "alone":
        launch += ["-m", "collective.launch", "-np", str(args.np), "--keras"]
        launch += [] if kind == "model" else ["--set", f"{kind}=True"]
    allocator = {"MALLOC_MMAP_THRESHOLD_": "1000000", "TF_ENABLE_ONEDNN_OPTS": "0"}
    environment = {**os.environ, **allocator}
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--layers", str(args.layers), "--width", str(args.width)]
        command = [*launch, __file__, *sizes, "--child", kind, folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    return max(held for held, _ in found), max(peak for _, peak in found)


def train(kind: str, folder: Path, layers: int, width: int) -> None:
    """Train, as a script of a user; write what this rank holds."""
    import keras
    import numpy as np

    names = keras.distribution
    if kind == "model":
        devices = names.list_devices()
        mesh = names.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
        layout_map = names.LayoutMap(mesh)
        layout_map[".*even.*/kernel"] = (None, "model")
        layout_map[".*even.*/bias"] = ("model",)
        layout_map[".*odd.*/kernel"] = ("model", None)
        names.set_distribution(names.ModelParallel(layout_map=layout_map))
    rows = np.random.default_rng(0).normal(size=(ROWS, width)).astype("float32")
    small = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    small.compile("adam", "mse")
    small.fit(rows[:, :4], rows[:, :4], verbose=0)  # all of TensorFlow is loaded
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    model = keras.Sequential(
        [
            keras.Input((width,)),
            *(
                keras.layers.Dense(width, "tanh", name=f"{('even', 'odd')[i % 2]}_{i}")
                for i in range(layers)
            ),
        ]
    )
    model.compile("adam", "mse")
    model.fit(rows, rows, epochs=STEPS, verbose=0)
    gc.collect()
    found = resident("VmRSS") - before, resident("VmHWM") - before
    rank = os.environ.get("COLLECTIVE_RANK", "0")
    (folder / f"{rank}.json").write_text(json.dumps(found))


def resident(name: str) -> float:
    """Return a line of this process' memory in MB: ``VmRSS``, or its peak ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(x.split()[1]) for x in lines if x.startswith(name)) * 1024 / MB


if __name__ == "__main__":
    main()
