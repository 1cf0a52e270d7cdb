"""The coverage-guided fuzzer is a program for people who have atheris, no test."""

from __future__ import annotations

collect_ignore = ["coverage_guided.py"]
