"""The ledger: which rows each step used, and the proof that each was used once.

Each replica reports what it read in the step's all-reduce, rank 0 writes it
(``observer``, ``writer``), and ``verify`` checks a file against the plan.
"""
