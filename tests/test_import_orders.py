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


def forget():
    for name in [n for n in sys.modules if n.split(".")[0] == "quorum_attention"]:
        del sys.modules[name]


def kind(value):
    return "class" if isinstance(value, type) else "function" if callable(value) else "neither"


wrong = []
usual = {name: kind(getattr(quorum_attention, name)) for name in names}
for first in [*modules, *names]:
    forget()
    qa = importlib.import_module("quorum_attention")
    if first in names:
        getattr(qa, first)
    else:
        try:
            importlib.import_module(first)
        except ImportError as error:
            if "quorum_attention" in str(error):
                raise
            continue  # an optional package is not here
    # Twice: a later import may put something over a name that was right.
    for _ in range(2):
        for name in names:
            if kind(getattr(qa, name)) != usual[name]:
                wrong.append((first, name))
        importlib.import_module("quorum_attention.cli")
    if "dense" not in qa.kernels():
        wrong.append((first, "kernels()"))
    import quorum_attention.kernels as package
    if not hasattr(package, "get_kernel"):
        wrong.append((first, "import quorum_attention.kernels as ..."))
print(json.dumps({"wrong": wrong, "orders": len(modules) + len(names), "usual": usual}))
"""


def test_no_import_changes_what_a_public_name_is(tmp_path: Path) -> None:
    """Every module up here as the first one imported, every public name as the first one used."""
    ran = run_python(ORDERS, tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["orders"] > 40
    assert "neither" not in found["usual"].values()
    assert found["wrong"] == []
