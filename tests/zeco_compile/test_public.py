"""The names of `zeco_compile` itself."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import zeco_compile


@pytest.mark.parametrize("name", zeco_compile.__all__)
def test_every_public_name_is_there_in_whatever_order_modules_are_imported(name: str) -> None:
    """Importing a module binds it in its package: a function of the same name would be gone."""
    home = zeco_compile._WHERE[name]
    code = f"import importlib, zeco_compile; importlib.import_module({home!r}); print(zeco_compile.{name}.__class__)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == str(type(getattr(zeco_compile, name)))
    assert isinstance(getattr(zeco_compile, name), ModuleType) == (name in ("errors", "testing"))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        zeco_compile.nothing  # noqa: B018


def test_all_is_what_dir_shows() -> None:
    assert dir(zeco_compile) == sorted(zeco_compile._WHERE)
