"""How a pass runs: one file for each way."""
