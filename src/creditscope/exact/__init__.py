"""Closed forms and enumeration: the claims that need no run."""
