"""Further work that a training can do: each observer is attached to the loop if asked for.

``checkpoint`` saves and resumes, ``elastic`` continues after a rank's death, ``ledger``
proves which rows were used, ``timeline`` and ``timing`` show where time went, ``desync``
compares the ranks' weights, ``layout_report`` says what ranks hold in parts.
"""
