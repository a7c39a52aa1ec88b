"""``python -m collective.launch``, also ``collectiverun``: starts the ranks of a job."""
