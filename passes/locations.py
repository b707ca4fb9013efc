"""Where in the user's source an FX node comes from.

Dynamo stores on every node the Python stack that produced it, as text in the format of ``traceback``:
outermost frame first, through the user's modules into ``torch.nn`` and, where a rewritten call is inlined,
into this package. The place to show to a user is the innermost frame that is neither.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sysconfig
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_SHORT_FRAME = re.compile(r"^(?P<code>.*)  # (?P<file>.+):(?P<line>\d+) in (?P<function>.*)$", re.DOTALL)
_CARETS = re.compile(r"^[\s~^]+$")


@dataclass(frozen=True)
class Location:
    """A line of source. ``file`` is empty and ``line`` 0 where it is not known."""

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""

    @property
    def known(self) -> bool:
        return bool(self.file)

    def __str__(self) -> str:
        """``file:line``, which editors and terminals turn into a link."""
        return f"{self.file}:{self.line}" if self.known else "unknown (the graph names no source line)"

    def describe(self) -> str:
        """``file:line, in function`` and the source line below it, indented, for error messages."""
        text = str(self)
        if self.function:
            text += f", in {self.function}"
        if self.code:
            text += f"\n    {self.code}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


UNKNOWN = Location()


def user_location(node: fx.Node | None) -> Location:
    """The innermost line of user code in the node's stack trace.

    User code is what lies outside PyTorch, this package, Python's standard library, generated code, and
    libraries that rearrange tensors (einops); a model library (transformers, fla) counts as user code. Where no
    frame is user code, the innermost frame is given instead, and ``UNKNOWN`` where the node carries no stack
    trace. Never raises.
    """
    return innermost_user_frame(getattr(node, "stack_trace", None))


def expression(node: fx.Node | None, otherwise: str) -> str:
    """What a node of the user's graph is in the user's source: the line's code, and where it is; `otherwise` where that
    is not known."""
    where = user_location(node)
    return f"`{where.code}` at {where}" if where.known and where.code else f"`{otherwise}`"


_HELD = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")
_LOCAL = re.compile(r"^L\['([^']*)'\]")


def source_expression(name: str) -> str:
    """Dynamo's name of where an input comes from, as one would write it: `L['self']._modules['a']._buffers['m']` is
    `self.a.m`."""
    return _HELD.sub(lambda m: f"[{m[1]}]" if m[1].isdigit() else f".{m[1]}", _LOCAL.sub(r"\1", name))


def innermost_user_frame(stack_trace: str | None) -> Location:
    """As `user_location`, from the text of a stack trace."""
    fallback = UNKNOWN
    for frame in reversed(parse_stack_trace(stack_trace)):
        if frame.file.startswith("<frozen") or frame.file.startswith("<eval_with_key>"):
            continue
        if not _is_library(frame.file):
            return frame
        if not fallback.known:
            fallback = frame
    return fallback


def parse_stack_trace(stack_trace: str | None) -> list[Location]:
    """The frames of a formatted stack trace, outermost first. Lines in no known format are passed over."""
    if not isinstance(stack_trace, str):
        return []
    frames: list[Location] = []
    lines = stack_trace.splitlines()
    for index, text in enumerate(lines):
        match = _FRAME.match(text)
        if match is None:
            continue
        file, line = match["file"], int(match["line"])
        following = lines[index + 1] if index + 1 < len(lines) else ""
        if following.startswith("    ") and not _CARETS.match(following):
            code = following.strip()
        else:
            code = linecache.getline(file, line).strip()
        frames.append(Location(file, line, match["function"] or "", code))
    return frames


def of_short_frame(text: str) -> Location:
    """The location in the short form in which PyTorch keeps that of a guard: "code  # file:line in function".

    There the part of the path is left out that the file has in common with the folder PyTorch is installed in; where
    that is the root of the file system, one character more. The file is the one that has this code at this line.
    """
    match = _SHORT_FRAME.match(text)
    if match is None:
        return UNKNOWN
    code, short, line = match["code"].strip(), match["file"], int(match["line"])
    installed = Path(torch.__file__).resolve().parent
    found = [str(folder / short) for folder in (installed, *installed.parents)] + [short]
    first, _, rest = short.partition("/")
    root = Path(installed.anchor)
    with contextlib.suppress(OSError):  # a root that cannot be listed holds no file to be found
        found += [str(each / rest) for each in root.iterdir() if each.name[1:] == first]
    for file in found:
        if os.path.isfile(file) and linecache.getline(file, line).strip() == code:
            return Location(file, line, match["function"], code)
    return UNKNOWN


@cache
def _library_folders() -> tuple[str, ...]:
    """Folders whose code is not the user's: PyTorch, this package's four, the standard library."""
    package = Path(__file__).resolve().parent
    folders = [Path(torch.__file__).resolve().parent, package]
    # The package's folders lie beside this one, both in a checkout (passes/ beside zeco_compile/) and
    # installed (zeco_compile/passes/ inside zeco_compile/).
    installed = package.parent.name == "zeco_compile"
    if installed:
        folders.append(package.parent)
    else:
        folders += [package.parent / name for name in ("zeco_compile", "lowering", "kernels")]
    folders += [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    return tuple(dict.fromkeys(f"{folder}{os.sep}" for folder in folders))


_REARRANGING = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:einops|opt_einsum)[/\\]")
"""Installed libraries whose calls stand for an op of PyTorch's."""


@cache
def _is_library(file: str) -> bool:
    resolved = os.path.realpath(file)
    if _REARRANGING.search(resolved):
        return True
    # Third-party packages are installed below the standard library's folder, but are not part of it.
    third_party = f"{os.sep}site-packages{os.sep}" in resolved or f"{os.sep}dist-packages{os.sep}" in resolved
    for folder in _library_folders():
        if resolved.startswith(folder):
            below = resolved[len(folder) :]
            if third_party and ("site-packages" in below or "dist-packages" in below):
                continue
            return True
    return False
