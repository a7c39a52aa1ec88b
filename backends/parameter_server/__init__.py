"""``tf-parameter-server``: a chief, asynchronous workers, and servers of variables."""
