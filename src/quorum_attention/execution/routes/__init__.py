"""The routes, i.e. the ways to run a pass: one file for each."""
