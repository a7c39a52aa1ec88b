"""What a training reports: the step's report vector, progress, summary, timeline.

Begin with ``report``, the vector that a step returns. ``progress`` and ``summary`` show
it; ``timing`` and ``timeline`` show where time went.
"""
