"""Runs a decision: routes, the machine of a pass, devices, report."""
