"""The passes of a call, forward and backward: decided, run and reported."""
