"""Variables of which each rank has a part, and how code sees them whole.

Begin with ``placing``: it lays out the variables that are made, by a layout map or by an
option. ``held`` has a variable's part, and what stands for the variable in a trace;
``mesh_ranks`` has the groups of ranks on a mesh, and ``alone`` what rank 0 uses of parts while
the others wait. ``training.partition.rules.owned`` has the rules of the step for pieces.
"""
