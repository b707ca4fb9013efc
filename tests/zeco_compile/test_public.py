"""The names of `zeco_compile` itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zeco_compile

CODE = """
import importlib, types, zeco_compile
for name in zeco_compile.__all__:
    importlib.import_module(zeco_compile._WHERE[name])
print([name for name in zeco_compile.__all__ if isinstance(getattr(zeco_compile, name), types.ModuleType)])
"""


def test_no_function_is_hidden_by_a_module_of_its_name() -> None:
    """Importing a module binds it in its package, whatever has that name there."""
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "['errors', 'testing']"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        zeco_compile.nothing  # noqa: B018


def test_all_is_what_dir_shows() -> None:
    assert dir(zeco_compile) == sorted(zeco_compile._WHERE)
