"""Faults of a run from its trainer's log and settings: `read` makes a Log, each of `rules` a Finding. No torch."""
