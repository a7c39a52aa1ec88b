"""``python -m collective.doctor``: the faults of a machine or a job, and remedies.

``machine`` examines one machine; ``multi_host`` has every host of a list examine itself
and connect back to this one; ``findings`` lists the faults, and ``report`` prints them.
"""
