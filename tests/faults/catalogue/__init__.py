"""Every fault, in the order of the page; each module is a section of it."""

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
# By the title of the section: what the module's docstring says.
SECTIONS = {str(m.__doc__).split(".\n")[0].rstrip("."): m.FAULTS for m in _MODULES}
FAULTS = [fault for faults in SECTIONS.values() for fault in faults]
# Of processes that stand still, or of a launcher that ends them: there each rank is to
# be the very process that the launcher has started, as to a user.
OF_PROCESSES = [
    fault for module in (launchers, hanging, suspended, late) for fault in module.FAULTS
]
