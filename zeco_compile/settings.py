"""The user's ``options``, read once, checked, and kept as one typed value.

Contract: `Settings.parse` returns settings that are valid in themselves, or raises `InvalidOption` naming the
option, what was given, what is accepted, and, for a name that does not exist, the nearest one that does. No
other part of the package reads the raw dict, and no part has defaults of its own.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from zeco_compile.errors import InvalidOption
from zeco_compile.lowering.groups import InvalidGroup, SameGroup, members, refuse_other_order, resolve_group
from zeco_compile.passes.errors import as_compile_error

Schedule = Literal["auto", "all_scan", "all_scan_tree", "two_level", "lasp1", "lasp2"]
OnUnsupported = Literal["error", "gather"]
GraphBreaks = Literal["error", "allow"]
Codegen = Literal["inductor", "aot_eager"]

DEBUG_VARIABLE = "ZECO_DEBUG"


@dataclass(frozen=True)
class Settings:
    """What ``torch.compile(..., backend="zeco", options={...})`` was asked for.

    group           name of the process group that shares the sequence, "" for one rank. As an option: a
                    ``ProcessGroup``, a one-dimensional ``DeviceMesh``, or None (all ranks if
                    ``torch.distributed`` is initialised, else one rank).
    seq_dim         the sequence dimension of the inputs, counted from the front.
    schedule        how the states travel between the ranks; "auto" picks by cost (lowering/cost_model.py).
    blocks          pipeline blocks of "all_scan" and "two_level"; None picks by cost.
    overlap         whether the exchange of states runs beside the computation.
    on_unsupported  "error", or "gather": compute what cannot be split on the whole sequence, everywhere.
    graph_breaks    "error", or "allow": the code between the graphs is said to mix no positions.
    codegen         "inductor", or "aot_eager": the same graphs without code generation.
    debug_dir       where graphs and reports are written, None for nowhere. ``ZECO_DEBUG`` where the option is
                    None.
    """

    group: str = ""
    seq_dim: int = 1
    schedule: Schedule = "auto"
    blocks: int | None = None
    overlap: bool = True
    on_unsupported: OnUnsupported = "error"
    graph_breaks: GraphBreaks = "error"
    codegen: Codegen = "inductor"
    debug_dir: Path | None = None

    world_size: int = field(default=1, metadata={"derived": True})
    rank: int = field(default=0, metadata={"derived": True})

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None) -> Settings:
        """Settings from the dict that the user gave, or the defaults from None.

        Raises `InvalidOption` for an unknown name or a value of the wrong kind, and ``InvalidGroup`` for a
        group that this rank cannot share a sequence with. Looks up the default process group and
        ``ZECO_DEBUG`` now.
        """
        given = _checked_names(options)
        values = {name: check(name, given[name]) for name, check in _CHECKS.items() if name in given}
        try:
            group = resolve_group(given.get("group"))
            refuse_other_order(given.get("group"))
        except InvalidGroup as error:
            raise as_compile_error(error) from None
        values["debug_dir"] = values.get("debug_dir") or _debug_dir_of_environment()
        place = members(group)
        return cls(group=group, world_size=place.world_size, rank=place.rank, **values)

    def to_dict(self) -> dict[str, Any]:
        """The options as plain values for a report; the group by its name, size and ranks."""
        shown = {name: getattr(self, name) for name in option_names()}
        shown["group"] = self._describe_group()
        shown["debug_dir"] = None if self.debug_dir is None else str(self.debug_dir)
        return shown

    def _describe_group(self) -> str:
        if not self.group:
            return "one rank"
        return f"{self.group!r}, ranks {list(members(self.group).global_ranks)}"

    def identity(self) -> str:
        """A text that is equal exactly for settings which compile a graph alike, in any process.

        For cache keys: it holds the options that shape the compiled program, and the group's name, size and
        this rank's place in it, since a rank's place in the sequence may be a constant in its graph. Where
        the dumps go is not part of it.
        """
        shaping = {name: getattr(self, name) for name in option_names() if name != "debug_dir"}
        return json.dumps(shaping | {"world_size": self.world_size, "rank": self.rank}, sort_keys=True)


def same_group(options: Mapping[str, Any] | None) -> SameGroup:
    """Whether the process group that ``options`` ask for is still what it is now; for options that `Settings.parse` has
    accepted."""
    return SameGroup(_checked_names(options).get("group"))


def option_names() -> list[str]:
    """The options that exist, in the order of the documentation."""
    return [option.name for option in fields(Settings) if not option.metadata.get("derived")]


def _checked_names(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise InvalidOption(
            "options",
            options,
            "a dict",
            hint=f"the options are: {', '.join(option_names())}",
        )
    for name in options:
        if name not in option_names():
            raise InvalidOption.unknown(name, option_names())
    return dict(options)


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"did you mean {close[0]!r}?" if close else ""
            raise InvalidOption(name, value, " or ".join(repr(choice) for choice in choices), hint=hint)
        return value

    return check


def _integer(name: str, value: Any, least: int, accepted: str) -> int:
    # bool is an int to Python, but True as a dimension or a count is a slip.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidOption(name, value, accepted)
    return value


def _check_seq_dim(name: str, value: Any) -> int:
    accepted = "a dimension counted from the front (0, 1, ...)"
    if isinstance(value, int) and value < 0:
        hint = (
            "inputs have different numbers of dimensions, so one counted from the back means different "
            "things for each; use zeco_compile.mark_sequence(tensor, dim) for single inputs"
        )
        raise InvalidOption(name, value, accepted, hint=hint)
    return _integer(name, value, 0, accepted)


def _check_blocks(name: str, value: Any) -> int | None:
    return None if value is None else _integer(name, value, 1, "None or a whole number of at least 1")


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOption(name, value, "True or False")
    return value


def _check_debug_dir(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InvalidOption(name, value, "None or the path of a folder")
    return _absolute(os.fspath(value))


def _debug_dir_of_environment() -> Path | None:
    value = os.environ.get(DEBUG_VARIABLE, "")
    return _absolute(value) if value else None


def _absolute(path: str | bytes) -> Path:
    # The folder is meant relative to where the program is when it compiles, not where it has gone since.
    return Path(os.fsdecode(path)).expanduser().absolute()


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "seq_dim": _check_seq_dim,
    "schedule": _choice(*get_args(Schedule)),
    "blocks": _check_blocks,
    "overlap": _check_flag,
    "on_unsupported": _choice("error", "gather"),
    "graph_breaks": _choice("error", "allow"),
    "codegen": _choice("inductor", "aot_eager"),
    "debug_dir": _check_debug_dir,
}
