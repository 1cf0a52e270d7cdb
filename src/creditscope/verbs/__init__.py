"""One module a verb of the command line: a dataclass that tyro turns into flags, with a `run` that does the work."""
