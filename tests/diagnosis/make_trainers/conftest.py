"""The scripts here import the trainers, which are not in the test environment."""

collect_ignore_glob = ["of_*.py"]
