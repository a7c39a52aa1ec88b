"""Variables that are not simply trained: layer state, frozen layers, outside variables.

``compared`` lists the variables that make two ranks the same. ``layer_state`` combines
what layers assign on each replica. ``outside_variables`` finds those that the step reads
and the model does not have.
"""
