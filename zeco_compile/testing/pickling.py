"""What travels between the processes of a pool: functions by value, with the file that they stand in.

cloudpickle 3.1.3 and later write ``<dynamic-code>`` where a code object's file name belongs. Here the name goes
along, so that a traceback or an error that quotes a source line reads the same on a rank.
"""

from __future__ import annotations

import importlib
import inspect
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import CodeType, ModuleType
from typing import Any

import cloudpickle


def dumps(value: Any) -> bytes:
    """As ``cloudpickle.dumps``; code objects keep their file name."""
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def dumps_by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """``(function, args)``, with the modules of all callables in it: a rank cannot import a test file by name."""
    within = [value for arg in args if is_dataclass(arg) for value in vars(arg).values()]
    with _by_value([function, *args, *within]):
        return dumps((function, args))


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            build, arguments = self.dispatch_table[CodeType](obj)[:2]
            return _named, (obj.co_filename, build, arguments)
        if (
            isinstance(obj, ModuleType)
            and type(obj) is not ModuleType
            and sys.modules.get(obj.__name__) is obj
        ):
            # `torch.ops`, which cloudpickle takes for an object
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _named(filename: str, build: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return build(*arguments).replace(co_filename=filename)


@contextmanager
def _by_value(objects: Sequence[Any]) -> Iterator[None]:
    fields = [field for each in objects if is_dataclass(each) for field in vars(each).values()]
    modules = {inspect.getmodule(inspect.unwrap(each)) for each in [*objects, *fields] if callable(each)}
    registered = []
    for module in modules:
        if module is None or module.__name__ == "__main__" or not getattr(module, "__file__", None):
            continue
        if module.__name__.partition(".")[0] in ("zeco_compile", "torch") or "site-packages" in str(
            module.__file__
        ):
            continue
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
