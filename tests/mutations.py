"""Puts ten defects into a copy of the checkout, one at a time: tests must find each.

    python -m tests.mutations            # make mutations
    python -m tests.mutations root epoch # some of them

For each it prints the test that failed. Then it removes the defect and runs that test again,
which must pass: a test that always fails has not found anything. The exit code is 1 if a
defect stays hidden.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import checkout, launch

SECONDS = 600


@dataclass(frozen=True)
class Mutation:
    """A defect.

    Attributes:
        name: Its name on the command line.
        what: The error that it causes.
        old: The code; it must be found exactly once in the product's sources.
        new: The code that replaces it.
        tests: Arguments of pytest: the smallest selection that should find it.
        ranks: Number of ranks of the core that run pytest; 1: no ranks are started.
    """

    name: str
    what: str
    old: str
    new: str
    tests: Sequence[str]
    ranks: int = 1


MUTATIONS = (
    Mutation(
        "mean",
        "an all-reduce averages instead of summing",
        "batch_reduce_to(tf.distribute.ReduceOp.SUM,",
        "batch_reduce_to(tf.distribute.ReduceOp.MEAN,",
        ["tests/training/test_equivalence.py", "-k", "mirrored"],
    ),
    Mutation(
        "rule",
        "a rule forgets an all-reduce: a sum over some rows is taken for that of all",
        "return Plan([layout, WHOLE], [Partial(_KINDS[node.type])])",
        "return Plan([layout, WHOLE], [WHOLE])",
        ["tests/training/partition/test_reductions.py"],
    ),
    Mutation(
        "slice",
        "a rule slices the wrong rows out of what is whole",
        "begin = before + emission.first_row * block",
        "begin = before + emission.own_rows * block",
        ["tests/training/partition/test_slices.py"],
    ),
    Mutation(
        "divide",
        "a rule divides by the rows of a rank instead of those of the batch",
        "total / emission.scalar(count, wide)",
        "total / tf.cast(tf.size(values) // tf.size(total), wide)",
        ["tests/training/partition/test_reductions.py"],
    ),
    Mutation(
        "row",
        "the last row of an epoch is never read",
        "epochs, positions = np.divmod(numbers, self.rows)",
        "epochs, positions = numbers // self.rows, numbers % (self.rows - 1)",
        ["tests/training/input/test_inputs.py"],
    ),
    Mutation(
        "root",
        "a broadcast always sends what rank 0 holds",
        "        return root_rank\n",
        "        return 0\n",
        ["tests/collective/test_data_movement.py", "-k", "broadcast"],
        ranks=2,
    ),
    Mutation(
        "fence",
        "an all-reduce does not wait for the sums of the other ranks",
        "ranks_.AwaitStage(Communicator::kRead, chunk, member, r_.request);",
        "",
        ["tests/collective/test_allreduce.py"],
        ranks=2,
    ),
    Mutation(
        "resume",
        "a resumed training has the model, but an optimizer that starts afresh",
        "zip(all_variables(model), self.variables, strict=True)",
        "zip(model.variables, self.variables, strict=False)",
        ["tests/training/checkpoint/test_checkpoint.py"],
    ),
    Mutation(
        "epoch",
        "every epoch has the order of the first",
        "permute(positions, self.rows, (self.seed, epoch))",
        "permute(positions, self.rows, (self.seed, 0))",
        ["tests/training/input/test_inputs.py", "-k", "epoch"],
    ),
    Mutation(
        "order",
        "an all-gather puts the parts in another order",
        "ranks.PostedBy(member),",
        "ranks.PostedBy((member + 1) % n),",
        ["tests/collective/test_data_movement.py", "-k", "allgather"],
        ranks=2,
    ),
)


def place(root: Path, mutation: Mutation) -> Path:
    """Return the only file that has the code.

    Raises:
        SystemExit: If the code does not occur exactly once.
    """
    found = []
    for file in checkout.sources(root):
        found += [file] * file.read_text().count(mutation.old)
    if len(found) != 1:
        where = ", ".join(str(file.relative_to(root)) for file in found) or "nowhere"
        raise SystemExit(
            f"mutation {mutation.name}: its code must be there once, but is: {where}\n"
            f"HINT: in tests/mutations.py, give what has become of {mutation.old!r}"
        )
    return found[0]


def build(root: Path) -> None:
    """Build the native core of the copy: completely the first time."""
    target = root / "build" / "native"
    commands = [["cmake", "-S", str(root), "-B", str(target), "-G", "Ninja"]]
    if (target / "build.ninja").exists():
        commands.clear()
    commands.append(["cmake", "--build", str(target)])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-4000:]}{done.stderr}")


def failed_test(root: Path, tests: Sequence[str], ranks: int) -> str:
    """Run tests until one fails.

    Returns:
        Its name; empty if all passed.

    Raises:
        SystemExit: If no test ran.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no"]
    command += ["--color=no", "-p", "no:cacheprovider", *tests]
    if ranks > 1:
        start = [sys.executable, "-m", "collective.launch", "-np", str(ranks)]
        command = [*start, *command]
    env = launch.environment() | {"PYTHONPATH": str(root), "COLLECTIVE_TIMEOUT": "60"}
    try:
        done = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"(none ended within {SECONDS} s)"
    if found := re.search(r"(?:FAILED|ERROR) (\S+::.*?)(?: - |\n)", done.stdout):
        return found[1]
    if done.returncode == 0:
        return ""
    if "passed" in done.stdout or "died" in done.stderr:
        return "(a rank died)"
    raise SystemExit(f"no test ran: {done.stdout[-3000:]}{done.stderr[-3000:]}")


def caught(root: Path, mutation: Mutation) -> str:
    """Return the test that fails with a mutation only; empty if there is none."""
    file = place(root, mutation)
    text = file.read_text()
    native = file.suffix != ".py"
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        if native:
            build(root)
        name = failed_test(root, mutation.tests, mutation.ranks)
    finally:
        file.write_text(text)
        if native:
            build(root)
    again = [name] if "::" in name else mutation.tests
    if name and failed_test(root, again, mutation.ranks):
        raise SystemExit(f"{mutation.name}: {again} fails without it, too")
    return name


def main() -> int:
    """Apply the mutations; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no mutation {', '.join(sorted(unknown))}")
    unseen = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        checkout.copy(root)
        for library in (checkout.ROOT / "collective" / "native").glob("*.so"):
            shutil.copy2(library, root / "collective" / "native")
        wanted = [mutation for mutation in MUTATIONS if mutation.name in chosen]
        for mutation in wanted:
            # Find all of them before the first one takes its time.
            place(root, mutation)
        for mutation in wanted:
            name = caught(root, mutation)
            unseen += not name
            print(f"{mutation.name}: {mutation.what}")
            print(f"  {'caught by ' + name if name else 'NOT CAUGHT'}", flush=True)
    print(f"{len(wanted) - unseen} of {len(wanted)} caught")
    return int(unseen > 0)


if __name__ == "__main__":
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.exit(main())
