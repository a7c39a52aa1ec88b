"""Many independent models: ``collective.fit_many`` and ``train.py --sweep``.

``runner`` schedules them, ``worker`` is one of them in processes of its own, and
``command`` reads the file and prints the table.
"""
