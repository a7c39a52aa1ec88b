"""Every fault, in the order of the table."""

from tests.faults.catalogue import (
    hanging,
    hosts,
    kept,
    killed,
    lacking,
    late,
    launchers,
    members,
    survived,
    suspended,
    wrong,
)

FAULTS = [
    *killed.FAULTS,
    *launchers.FAULTS,
    *survived.FAULTS,
    *members.FAULTS,
    *late.FAULTS,
    *hanging.FAULTS,
    *suspended.FAULTS,
    *lacking.FAULTS,
    *wrong.FAULTS,
    *kept.FAULTS,
    *hosts.FAULTS,
]
