"""A soak that anyone can repeat: random calls of all kinds for minutes or hours, each held against
float64 or a closed form, and once a minute what the process holds.

``python -m tests.soak --minutes 60 --seed 1`` from the project's root.
"""
