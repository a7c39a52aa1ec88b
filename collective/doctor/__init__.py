"""``python -m collective.doctor``: what is installed, what works, and what to type if not.

``machine`` examines one machine; ``multi_host`` has every host of a list examine itself
and connect back to this one; ``findings`` lists the faults, and ``report`` prints them.
"""
