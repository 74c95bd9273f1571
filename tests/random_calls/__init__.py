"""Random calls against float64: ``draw`` makes a case of a seed, ``check`` runs it and
judges it.

``python -m random_calls --help`` (with ``tests`` on the import path) runs many.
"""
