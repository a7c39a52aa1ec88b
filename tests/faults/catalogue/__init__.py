"""Every fault, in the order of the table."""

from tests.faults.catalogue import hosts, kept, killed, lacking, late, wrong

FAULTS = [
    *killed.FAULTS,
    *late.FAULTS,
    *lacking.FAULTS,
    *wrong.FAULTS,
    *kept.FAULTS,
    *hosts.FAULTS,
]
