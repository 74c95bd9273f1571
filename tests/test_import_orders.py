"""Public names mean the same thing, whatever was imported before them."""

from __future__ import annotations

import json
from pathlib import Path

from helpers_processes import run_python

# One process, torch loaded once: the library alone is forgotten and imported anew for every order.
ORDERS = """
import importlib, json, pkgutil, sys
import quorum_attention
# Once compiled is enough.
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]
names = quorum_attention.__all__
# What lies deeper binds no name up here.
modules = [m.name for m in pkgutil.iter_modules(quorum_attention.__path__, "quorum_attention.")]
modules += ["quorum_attention.kernels.native", "quorum_attention.planner.calibration"]

def kinds(package):
    values = {name: getattr(package, name) for name in names}
    return {n: "class" if isinstance(v, type) else callable(v) for n, v in values.items()}

wrong, usual = [], kinds(quorum_attention)
for first in [*modules, *names]:
    for name in [n for n in sys.modules if n.split(".")[0] == "quorum_attention"]:
        del sys.modules[name]
    qa = importlib.import_module("quorum_attention")
    try:
        getattr(qa, first) if first in names else importlib.import_module(first)
    except ImportError as error:
        if "quorum_attention" in str(error):
            raise
        continue  # an optional package is not here
    # Twice: a later import may put something over a name that was right.
    for _ in range(2):
        wrong += [first] if kinds(qa) != usual or "dense" not in qa.kernels() else []
        importlib.import_module("quorum_attention.cli")
    import quorum_attention.kernels as package
    wrong += [] if hasattr(package, "get_kernel") else [first]
print(json.dumps([len(modules) + len(names), list(usual.values()), wrong]))
"""


def test_no_import_changes_what_a_public_name_is(tmp_path: Path) -> None:
    """Every module up here as the first one imported, every public name as the first one used."""
    ran = run_python(ORDERS, tmp_path)
    assert ran.returncode == 0, ran.stderr
    orders, usual, wrong = json.loads(ran.stdout.splitlines()[-1])
    assert orders > 40
    assert all(usual)
    assert wrong == []
