"""How fast would a training be on a cluster that is not there?

``simulator`` runs the core's own all-reduce algorithms on up to thousands of ranks in a
simulated network, ``models`` knows the gradients of a model and when back-propagation
makes them, ``step`` puts both together for each backend. ``command`` is
``compare.py --predict``; ``scaling`` writes the tables of docs/explanation/scaling.md
(``make simulate``). Begin reading at ``step``.
"""
