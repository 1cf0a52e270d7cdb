"""Untrusted files of a trainer -> rows and settings. Lines, rows and documents are bounded; no pickle, no eval."""
