"""`zeco_compile.errors` holds every error there is."""

import importlib
import pkgutil

import pytest
import torch

import zeco_compile
import zeco_compile.errors
import zeco_compile.kernels
import zeco_compile.lowering
import zeco_compile.passes
from zeco_compile.errors import DebugFolderUnusable, InvalidOption, ZecoError
from zeco_compile.settings import Settings


def modules_of(package):
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not info.ispkg and not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


@pytest.mark.parametrize(
    "package",
    [zeco_compile, zeco_compile.passes, zeco_compile.lowering, zeco_compile.kernels],
    ids=lambda package: package.__name__,
)
def test_every_error_class_is_exported(package):
    declared = {
        value.__name__
        for module in modules_of(package)
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, ZecoError)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    }
    missing = declared - set(zeco_compile.errors.__all__)
    assert not missing, f"import these in zeco_compile/errors.py and list them in its __all__: {missing}"


def test_everything_exported_is_an_error_with_a_docstring():
    assert zeco_compile.errors.__all__ == sorted(zeco_compile.errors.__all__)
    for name in zeco_compile.errors.__all__:
        error = getattr(zeco_compile.errors, name)
        assert issubclass(error, ZecoError), name
        assert error.__doc__, name


def test_a_bad_option_reaches_the_caller_of_the_compiled_model():
    def backend(gm, example_inputs, options=None):
        Settings.parse(options)
        return gm.forward

    torch._dynamo.reset()
    model = torch.compile(lambda x: x + 1, backend=backend, options={"overlapp": True})
    with pytest.raises(InvalidOption, match="Did you mean 'overlap'"):
        model(torch.ones(1))
    torch._dynamo.reset()


def test_unusable_folder_says_which_and_why():
    error = DebugFolderUnusable("/x/y", PermissionError(13, "Permission denied"))
    assert str(error).startswith(
        "the debug folder /x/y cannot be written to: Permission denied.\n  what to do:"
    )
