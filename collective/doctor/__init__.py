"""``python -m collective.doctor``: what is installed, what works, and what to type if not.

``machine`` examines one machine, ``multi_host`` has every host of a list do so and connect
back to this one; ``findings`` says what is wrong, ``report`` prints it.
"""
