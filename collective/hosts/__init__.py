"""The hosts of a job: reads every dialect of hostfile, places the ranks.

``reading`` turns a hostfile or ``-H`` into ``Host`` objects, ``allocation`` finds the hosts
that a batch system has allocated, ``placement`` decides how many ranks run on each host, and
``writing`` writes the lists that launchers read.
"""

from collective.hosts.allocation import Allocation as Allocation
from collective.hosts.allocation import find_allocation as find_allocation
from collective.hosts.host import Host as Host
from collective.hosts.host import HostError as HostError
from collective.hosts.host import is_local as is_local
from collective.hosts.placement import place as place
from collective.hosts.placement import slots_of as slots_of
from collective.hosts.reading import parse as parse
from collective.hosts.reading import parse_list as parse_list
from collective.hosts.reading import read as read
from collective.hosts.writing import write as write
