"""What importing costs, what it leaves alone; public names mean the same after any
import."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata

import pytest
import torch
from helpers.processes import run_python

import quorum_attention as qa

# What somebody who imports this package has not asked for; some are not even installed.
ABSENT = (
    "triton", "matplotlib", "rich", "rich.progress", "transformers", "liger_kernel", "trl", "ray",
    "safetensors", "IPython", "quorum_attention.pictures", "quorum_attention.cli",
    "quorum_attention.bench", "quorum_attention.integrations", "torch._dynamo", "torch._inductor",
    "torch.nn.attention.flex_attention", "torch.distributed.tensor", "sympy",
)  # fmt: skip
STEPS = {
    "the package": "import quorum_attention as qa",
    "every public name": "import quorum_attention as qa; [getattr(qa, n) for n in qa.__all__]",
    "a call": (
        "import quorum_attention as qa; q = torch.randn(1, 2, 200, "
        "16);qa.attention(q, q, q); qa.attention(q, q, q, depth=1); qa.estimate(4096, "
        "device='cpu'); qa.attention(q, q, q, qa.Mask(documents=torch.arange(200)));"
        "q.requires_grad_(); qa.attention(q, q, q).sum().backward()"
    ),
}
CODE = """
import json, sys, time
import torch
before = set(sys.modules)
began = time.thread_time()
{step}
spent = time.thread_time() - began
print(json.dumps({{"seconds": spent, "modules": sorted(set(sys.modules) - before)}}))
"""


@pytest.mark.parametrize("step", STEPS)
def test_what_is_not_used_is_not_loaded(step: str) -> None:
    """And the package costs a tenth of a second of this thread's own time at most;
    usually a millisecond, because names are loaded when they are first used."""
    done = run_python(CODE.format(step=STEPS[step]))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in ABSENT if name in found["modules"]] == []
    assert step != "the package" or found["seconds"] < 0.1


def test_models_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    for name in [
        n for n in sys.modules if n.startswith("quorum_attention.integrations.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r'pip install "\.\[transformers\]"'):
        importlib.import_module("quorum_attention.integrations.transformers")


def test_the_native_kernel_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from quorum_attention.kernels.native import kernel as native

    monkeypatch.setattr(native, "interpreted", lambda: True)  # as if a GPU were there
    monkeypatch.setattr(native, "triton_available", lambda: False)
    q = torch.randn(1, 2, 200, 16)
    with pytest.raises(NotImplementedError, match="Triton, which is not installed"):
        qa.attention(q, q, q, kernel="native")
    assert qa.attention(q, q, q, depth=1).shape == q.shape


# One process, torch loaded once: the library alone is forgotten and imported anew for
# every order.
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


@pytest.mark.slow
def test_no_import_changes_what_a_public_name_is() -> None:
    ran = run_python(ORDERS)
    assert ran.returncode == 0, ran.stderr
    alike, usual, wrong = json.loads(ran.stdout.splitlines()[-1])
    assert {"quorum_attention.kernels", "quorum_attention.planner.plan"} <= set(alike)
    assert all(usual)
    assert wrong == []
