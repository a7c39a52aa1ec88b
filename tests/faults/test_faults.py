"""Every fault of the catalogue: the job ends as promised, in the promised time, and leaves nothing.

make test-faults
python -m pytest tests/faults -k "launcher and mpi"
python -m pytest tests/faults --table docs/reference/reliability.md    # writes the measurements
"""

from __future__ import annotations

import re

import pytest

from collective.backends.horovod import installed
from tests import launch
from tests.faults import table
from tests.faults.catalogue import FAULTS, OF_PROCESSES
from tests.faults.fault import Fault
from tests.faults.job import running
from tests.faults.table import Measured

pytestmark = launch.NEEDS_CORE
# The time limit in multiples of the promise: the machine may be busy, and some times count
# from the start of the job, with the import of TensorFlow.
BUSY = 6
# Faults whose jobs wait for most of their time.
WAIT = re.compile(r".*(--rank-timeout|for ever, COLLECTIVE_TIMEOUT)")


# Another fault shows the same: one in which rank 0 does the same as rank 1, or at another
# time of a step, which makes no difference for the waiting ranks; or one that does not
# depend on this backend or launcher; or a silent rank that is found in the same way.
REPEATED = re.compile(
    r"kill -9 of rank 0 in (input|forward|update)\b"
    r"|kill -9 of rank 1 in (forward|update|checkpoint)\b"
    r"|kill -9 of rank 1 in all-reduce, tf-multiworker by mpirun"
    r"|kill -9 of rank 1 in all-reduce, --min-np 2, native by collectiverun$"
    r"|kill -9 of every process at once, .*, mpi"
    r"|SIGTERM to the launcher, mpi"
    r"|(/dev/shm is full|one rank's data ends|NaN in|a bit of a weight) .*, mpi"
    r"|the clock jumps back"
    r"|(SIGTERM to|kill -9 of) all ranks of a host .*, mpi"
    r"|the clock jumps .*, tf-multiworker"
    r"|SIGSTOP to a rank, SIGCONT .*, (mpi|tf-multiworker)"
    r"|(/dev/shm is full|one rank's data ends|NaN in|a bit of a weight) .*, tf-multiworker"
    r"|SIGSTOP to a rank, for ever, --min-np"
    r"|a rank hangs in its own code, .*, mpi"
    r"|a rank never releases|all processes of a host stand still|a process forked in fit"
)


def on(fault: Fault):
    """Return a parameter set; only for make test-all if another shows the same."""
    marks = [pytest.mark.matrix] if REPEATED.match(fault.id) else []
    marks += [pytest.mark.waits] if WAIT.match(fault.id) else []
    return pytest.param(fault, id=fault.id, marks=marks)


@pytest.mark.parametrize("fault", [on(fault) for fault in FAULTS])
def test_fault(fault: Fault, tmp_path, measured: list[Measured], request):
    why_not = fault.needs()
    if fault.backend == "horovod":
        why_not = why_not or installed.misfit()
    if why_not:
        measured.append(Measured(fault, not_run=why_not))
        pytest.skip(why_not)
    hosts = request.getfixturevalue("hosts") if fault.on_hosts else None
    variables = {"FAULT": fault.inside} if fault.inside else {}
    measures = request.config.getoption("--table") is not None
    fault.before(tmp_path, hosts)
    with running(
        fault.command(tmp_path, hosts),
        tmp_path,
        {**fault.variables, **variables},
        shm=fault.shm,
        disk=fault.disk,
        hosts=hosts,
        forked=not measures and fault not in OF_PROCESSES,
    ) as job:
        fault.strike(job)
        code, ended = job.wait()
        printed = job.text
        assert code is not None and not job.processes(), f"it hangs:\n{printed}"
        assert code == fault.code, f"{code}\n{printed}"
        for pattern in fault.messages:
            assert re.search(pattern, printed), f"not printed: {pattern}\n{printed}"
        assert [n for n in job.left() if not re.fullmatch(fault.leaves, n)] == []
        fault.holds(job)
        seconds = None
        if fault.seconds is not None:
            seconds = ended - job.fault_at
            assert seconds < BUSY * fault.seconds, printed
    measured.append(Measured(fault, seconds))


def test_tests_that_the_page_names_exist():
    page = (launch.ROOT / "docs" / "reference" / "reliability.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", page)
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (launch.ROOT / file).read_text(), (file, name)


def test_the_table_has_every_fault():
    known = table.known(launch.ROOT / "docs" / "reference" / "reliability.md")
    keys = [table.key(fault) for fault in FAULTS]
    assert list(known) == keys, "make test-faults TABLE=docs/reference/reliability.md"
    assert len(set(keys)) == len(keys)
