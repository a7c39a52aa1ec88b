"""The ledger: the rows that each step used, and the proof that each was used once.

Each replica reports its rows in the step's all-reduce, rank 0 writes them
(``observer``, ``writer``), and ``verify`` checks a file against the plan.
"""
