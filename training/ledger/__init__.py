"""The ledger: which rows each step used, and the proof that each was used once.

Each replica reports what it read (``receipts``) in the step's all-reduce, rank 0 writes
it (``writer``), and ``verify`` checks a file against the plan.
"""
