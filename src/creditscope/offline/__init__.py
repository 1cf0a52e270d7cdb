"""Rollouts that another system sampled: read from its files, batch by batch, and put into a record."""
