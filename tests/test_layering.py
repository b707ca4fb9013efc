"""The arrows between the folders point one way, and what is installed is what stands here.

``zeco_compile`` may use ``passes``, ``lowering`` and ``kernels``; each of these only what comes after it.
Imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("kernels", "lowering", "passes", "zeco_compile")

# What each folder may import besides the standard library and itself; a name allows all below it.
ALLOWED = {
    "kernels": {"torch", "triton"},
    "lowering": {"torch", "triton", "zeco_compile.kernels"},
    "passes": {
        "torch",
        "sympy",
        "networkx",
        "zeco_compile.lowering",
        # The base of all errors lives in the lowest folder; the recurrence is what a candidate must equal.
        "zeco_compile.kernels.errors",
        "zeco_compile.kernels.recurrence",
    },
    "zeco_compile": {
        "torch",
        "numpy",
        "rich",
        "cloudpickle",
        "zeco_compile.passes",
        "zeco_compile.lowering",
        "zeco_compile.kernels",
    },
}


def package_name(folder: str) -> str:
    return folder if folder == "zeco_compile" else f"zeco_compile.{folder}"


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that the file imports, with the line; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(folder: str, path: Path) -> Iterator[str]:
    lower = {package_name(other) for other in FOLDERS if other not in ("zeco_compile", folder)}
    for line, name in imports(path):
        if name.partition(".")[0] in sys.stdlib_module_names:
            continue
        itself = within(name, package_name(folder)) and not any(within(name, other) for other in lower)
        if not itself and not any(within(name, allowed) for allowed in ALLOWED[folder]):
            yield f"{folder}/{path.name}:{line} must not import {name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down(folder: str) -> None:
    assert sources(folder)
    found = [each for path in sources(folder) for each in violations(folder, path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("kernels", "from zeco_compile.lowering import attention"),
        ("kernels", "import numpy"),
        ("lowering", "from zeco_compile.passes.errors import CompileError"),
        ("lowering", "def f():\n    import zeco_compile"),
        ("lowering", "from zeco_compile import settings"),
        ("passes", "from zeco_compile.kernels.chunked import backward"),
        ("passes", "from zeco_compile.errors import ZecoError"),
        ("zeco_compile", "import transformers"),
    ],
)
def test_an_arrow_the_wrong_way_is_seen(folder: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(line)
    assert len(list(violations(folder, path))) == 1


def test_every_folder_with_code_is_installed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    expected = set()
    for folder in FOLDERS:
        for path in sources(folder):
            inner = path.parent.relative_to(ROOT / folder).parts
            expected.add(".".join((package_name(folder), *inner)))
    assert set(setuptools["packages"]) == expected
    assert setuptools["package-dir"] == {package_name(folder): folder for folder in FOLDERS}
