"""Calls from files to files, in parts that stay done when the process is killed (docs/files.md)."""
