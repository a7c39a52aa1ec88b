"""Every fault, in the order of the table."""

from tests.faults.catalogue import (
    hosts,
    kept,
    killed,
    lacking,
    late,
    launchers,
    survived,
    wrong,
)

FAULTS = [
    *killed.FAULTS,
    *launchers.FAULTS,
    *survived.FAULTS,
    *late.FAULTS,
    *lacking.FAULTS,
    *wrong.FAULTS,
    *kept.FAULTS,
    *hosts.FAULTS,
]
