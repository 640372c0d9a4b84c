"""The house rules that a reader relies on: imports point one way, heavy modules come late."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore

PACKAGE = Path(ckptstore.__file__).parent

# Low to high; a module may import from its own layer and from lower ones.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "errnos"),
    ("model",),
    (
        "environment",
        "backend",
        "arrays",
        "forms",
        "dtensors",
        "shards",
        "ranks",
        "pool",
        "memory",
        "cycles",
        "signals",
    ),
    ("manifest",),
    ("tier",),
    ("load", "save"),
    ("verify",),
    ("gc",),
    ("replicate",),
    (
        "catalog",
        "config",
        "tiers",
        "policies",
        "replication",
        "collecting",
        "refs",
        "arguments",
        "torch",
        "pending",
        "checkpoint",
        "testing",
    ),
    ("events", "metrics"),
    (
        "run_view",
        "run_notes",
        "run_retention",
        "run_advice",
        "run_ranks",
        "run_resume",
        "run_cadence",
        "preemption",
        "run_sessions",
        "run_capture",
        "run_average",
        "run",
    ),
    ("store_view", "store_upkeep", "store"),
    ("doctor", "transfer", "inspect", "integrations"),
    ("", "demo"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _imports(path: Path) -> list[str]:
    """Modules of this package that `path` imports when it runs (not for type checkers alone)."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module == "ckptstore":
                found += [f"ckptstore.{alias.name}" for alias in node.names]
            else:
                found.append(module)
    return [name for name in found if name == "ckptstore" or name.startswith(("ckptstore.", "ckptstore_"))]


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_imports_upward(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    own = "" if relative.name == "__init__.py" and len(relative.parts) == 1 else relative.parts[0]
    own = own.removesuffix(".py")
    assert own in RANK, f"give {own!r} a layer"
    for name in _imports(path):
        assert not name.startswith("ckptstore_"), f"{relative} imports the backend {name} by name"
        layer = _layer_of(name)
        if layer not in RANK:  # a public name of the package, as `from ckptstore import Store`
            assert layer in ckptstore.__all__, f"{relative} imports {name}"
            layer = ""
        assert RANK[layer] <= RANK[own], f"{relative} ({own}) imports {name} from a higher layer"


def test_sql_is_only_in_the_manifest() -> None:
    for path in _modules():
        if path.relative_to(PACKAGE).parts[0] in ("manifest", "doctor"):
            continue
        assert "sqlite3" not in path.read_text(), f"{path} speaks SQL"


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, ckptstore; heavy = ('torch', 'boto3', 'fsspec', 'click', 'sqlite_utils', 'pytest'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_public_surface_is_deliberate() -> None:
    assert sorted(ckptstore.__all__) == sorted(
        [
            "LOAD",
            "Checkpoint",
            "CkptstoreError",
            "Keep",
            "LocalShard",
            "Opaque",
            "PendingSave",
            "PerRank",
            "PerRankValues",
            "Policy",
            "RestoreReport",
            "Run",
            "Store",
            "TensorSpec",
            "TrainState",
            "__version__",
            "init",
            "open",
        ]
    )
    for name in ckptstore.__all__:
        assert getattr(ckptstore, name) is not None


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_says_what_it_is_for(path: Path) -> None:
    if path.read_text().strip():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
