"""Public names mean the same thing, whatever was imported before them."""

from __future__ import annotations

import json

from helpers_processes import run_python

# One process, torch loaded once: the library alone is forgotten and imported anew for every order.
ORDERS = """
import importlib, json, pathlib, sys
import quorum_attention
names, root = quorum_attention.__all__, pathlib.Path(quorum_attention.__file__).parent
files = [path.relative_to(root.parent).with_suffix("") for path in root.rglob("*.py")]
modules = {".".join(file.parts).removesuffix(".__init__") for file in files}
# Python binds a module in its package by the module's name: these could take a public name's place.
alike = sorted(module for module in modules if module.rpartition(".")[2] in names)

def kinds(package):
    values = {name: getattr(package, name) for name in names}
    return {n: "class" if isinstance(v, type) else callable(v) for n, v in values.items()}

wrong, usual = [], kinds(quorum_attention)
for first in [*alike, "quorum_attention.cli", *(module.rpartition(".")[2] for module in alike)]:
    for name in [n for n in sys.modules if n.split(".")[0] == "quorum_attention"]:
        del sys.modules[name]
    qa = importlib.import_module("quorum_attention")
    getattr(qa, first) if first in names else importlib.import_module(first)
    # Twice: a later import may put something over a name that was right.
    for _ in range(2):
        wrong += [first] if kinds(qa) != usual or "dense" not in qa.kernels() else []
        importlib.import_module("quorum_attention.cli")
    import quorum_attention.kernels as package
    wrong += [] if hasattr(package, "get_kernel") else [first]
print(json.dumps([alike, list(usual.values()), wrong]))
"""


def test_no_import_changes_what_a_public_name_is() -> None:
    ran = run_python(ORDERS)
    assert ran.returncode == 0, ran.stderr
    alike, usual, wrong = json.loads(ran.stdout.splitlines()[-1])
    assert {"quorum_attention.kernels", "quorum_attention.planner.plan"} <= set(alike)
    assert all(usual)
    assert wrong == []
