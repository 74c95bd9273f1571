"""Runs a plan: slots, transfers, guardrail, report."""
