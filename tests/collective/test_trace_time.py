"""No function that builds graphs reads rank or size in Python.

A ``tf.function`` is traced once and runs for as long as the job: a number that is read
during the trace stays in the graph when ranks leave or join. Instead,
``collective.tensorflow_ops.ranks`` has ops. This test reads the source; the results of the
graphs when a job grows are tested in ``test_horovod_growing.py``.
"""

import ast
from pathlib import Path

import collective

PACKAGE = Path(collective.__file__).parent
NUMBERS = {"rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"}
NUMBERS |= {"included", "members", "launch_info", "detect"}
# Modules whose functions of these names concern tensors, or are ops.
OTHERS = {"tf", "np", "ranks"}

FIXED = "the members of a process set do not change; one of a former job is refused"
CHECK = "a check of the caller's arguments, which puts nothing into the graph"
EAGER = "runs in Python, between steps"
ALLOWED = {
    "tensorflow_ops.broadcast": FIXED,
    "tensorflow.collectives.broadcast": CHECK,
    "tensorflow.gradients.GradientReduction.__call__": FIXED,
    "tensorflow.keras_optimizer._agrees_on_overflow.everywhere": FIXED,
    "tensorflow.functions.broadcast_object": EAGER,
    "tensorflow.elastic.State.check_host_updates": EAGER,
    "tensorflow.elastic.State._end_generation": EAGER,
    "tensorflow.elastic.State._resume_generation": EAGER,
    "tensorflow.elastic._reconfigure": EAGER,
    "tensorflow.elastic._lost": EAGER,
    "tensorflow.keras.callbacks.LearningRateWarmupCallback.__init__.multiplier": (
        EAGER
    ),
    "tensorflow.keras.callbacks.LearningRateWarmupCallback.on_epoch_end": EAGER,
    # Functions for users in Python, with Horovod's names; there are ops, too.
    **{
        f"tensorflow.basics.{name}": EAGER
        for name in ("rank", "size", "local_rank", "local_size")
    },
    "tensorflow.basics._compare_hosts": EAGER,
    "tensorflow.basics._everyone": EAGER,
    "tensorflow.basics.mpi_threads_supported": EAGER,
    "tensorflow.basics.start_timeline": EAGER,
    "tensorflow.basics.stop_timeline": EAGER,
    "tensorflow.process_sets.ProcessSet.__init__": EAGER,
    "tensorflow.process_sets.ProcessSet.size": EAGER,
    "tensorflow.process_sets.ProcessSet.rank": EAGER,
    "tensorflow.process_sets.ProcessSet.included": EAGER,
    "tensorflow.process_sets.ProcessSet.__str__": EAGER,
    "tensorflow.process_sets._Everyone.ranks": EAGER,
    "tensorflow.process_sets.add_process_set": EAGER,
    "tensorflow.process_sets._of_all_ranks": EAGER,
}


class Readers(ast.NodeVisitor):
    """Functions, by their full names, that read rank or size."""

    def __init__(self, module):
        self.path, self.found = [module], set()

    def _within(self, node):
        self.path.append(node.name)
        self.generic_visit(node)
        self.path.pop()

    visit_FunctionDef = visit_ClassDef = _within

    def visit_Call(self, node):
        called = node.func
        if isinstance(called, ast.Name) and called.id.removeprefix("_") in NUMBERS:
            self.found.add(".".join(self.path))
        if isinstance(called, ast.Attribute) and called.attr in NUMBERS:
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            if owner not in OTHERS:
                self.found.add(".".join(self.path))
        self.generic_visit(node)

    def visit_Attribute(self, node):
        if node.attr == "ranks":
            self.found.add(".".join(self.path))
        self.generic_visit(node)


def readers(source, module):
    """Return the functions of a module that read rank or size."""
    visitor = Readers(module)
    visitor.visit(ast.parse(source))
    return visitor.found


def test_only_these_functions_read_rank_or_size_in_python():
    files = [*PACKAGE.glob("tensorflow_ops*/*.py"), *PACKAGE.glob("tensorflow_*.py")]
    files += (PACKAGE / "tensorflow").rglob("*.py")
    assert len(files) > 20
    found = set()
    for file in files:
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        found |= readers(file.read_text(), module)
    assert found - set(ALLOWED) == set(), "use collective.tensorflow_ops.ranks"
    assert set(ALLOWED) - found == set(), "these do not, any more"


def test_the_reader_finds_them():
    source = """
class A:
    def f(self):
        return session.size() + tf.size(x) + ranks.rank()
def g(s):
    def inner():
        return [s.rank() for _ in s.ranks]
    return tf.rank(x), np.size(x), rank_info(s)
def h(place):
    return _size(place), local_rank()
"""
    assert readers(source, "m") == {"m.A.f", "m.g.inner", "m.h"}
