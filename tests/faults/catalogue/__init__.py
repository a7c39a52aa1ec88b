"""Every fault, in the order of the table."""

from tests.faults.catalogue import hosts, kept, killed, lacking, late, survived, wrong

FAULTS = [
    *killed.FAULTS,
    *survived.FAULTS,
    *late.FAULTS,
    *lacking.FAULTS,
    *wrong.FAULTS,
    *kept.FAULTS,
    *hosts.FAULTS,
]
