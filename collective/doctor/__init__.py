"""``python -m collective.doctor``: what is here, what works, and what to type if not."""
