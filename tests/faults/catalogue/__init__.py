"""Every fault, in the order of the page; each module is a section of the page."""

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

_MODULES = (
    killed,
    launchers,
    survived,
    members,
    late,
    hanging,
    suspended,
    lacking,
    wrong,
    kept,
    hosts,
)
# By the title of the section, which is the module's docstring.
SECTIONS = {str(m.__doc__).split(".\n")[0].rstrip("."): m.FAULTS for m in _MODULES}
FAULTS = [fault for faults in SECTIONS.values() for fault in faults]
# Faults in which processes stand still, or the launcher ends: there each rank must be the
# process that the launcher itself has started, as it is for a user.
OF_PROCESSES = [
    fault for module in (launchers, hanging, suspended, late) for fault in module.FAULTS
]
