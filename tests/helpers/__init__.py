"""Shared parts of tests: one subject a file."""
