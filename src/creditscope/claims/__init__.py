"""Statements of the papers, and ours, as tests that can fail."""
