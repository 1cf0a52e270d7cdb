"""Experiments on top of the lab: localising errors, ProcessBench, sweeps."""
