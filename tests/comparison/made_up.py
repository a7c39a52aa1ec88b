"""Results that a comparison could have."""

from collective.comparison.equality import Verdict
from collective.comparison.results import EqualityProof, Results
from collective.comparison.speed import Timed

EQUAL = Verdict(True, (1e-12, 1e-12), 2e-16, 1e-14, "a/kernel")
WRONG = Verdict(False, (1e-12, 1e-12), 1e-3, 0.2, "a/kernel", 4, "b/bias")


def timed(*rates):
    parts = {"input": 1e-4, "compute": 4e-3, "wait": 1e-4}
    parts |= {"all_reduce": 2e-3, "update": 5e-4}
    return Timed(list(rates), parts, 400 << 20)


def results(*, wrong=False, **rates):
    """Return results of two backends; ``native=(1.0, 2.0, 3.0)`` gives its rounds."""
    found = Results({"command": "compare.py -np 2", "train": []})
    losses = {"single": [2.0, 1.5], "mpi": [2.0, 1.5], "native": [2.0, 1.5 + 1e-15]}
    for precision in ("float64", "float32"):
        verdicts = {"mpi": EQUAL, "native": WRONG if wrong else EQUAL}
        found.equal[precision] = EqualityProof("single", verdicts, {}, losses)
    rounds = {
        "single": (900.0, 910.0, 905.0),
        "one share": (500.0, 505.0, 510.0),
        "mpi": (800.0, 810.0, 790.0),
        "native": (990.0, 980.0, 985.0),
    } | rates
    for count in ("1", "2"):
        found.fast[count] = {name: timed(*of) for name, of in rounds.items()}
    found.left_out["tf-mirrored"] = "<b>no</b> device"
    found.finished = True
    return found
