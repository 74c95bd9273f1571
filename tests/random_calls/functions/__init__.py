"""Random calls with functions of the user's: own kernels, score modifications, ``keeps``, learned
biases. Some must be right; others, whose function reads what is learned or changes between forward
and backward, must be refused, or right all the same.

``python -m random_calls.functions --help`` (with ``tests`` on the import path).
"""
