"""What connects the ranks of a group: on which hosts they are, and what a message costs; equal on every rank.

Once per group, through the key-value store over which the group found itself: every rank says which host it is on,
and rank 0 adds what `python -m zeco_compile.tune` has measured and writes one answer for all. So decisions that rest
on it are the same everywhere, even where the files differ. The store needs no order among threads or ranks: the
first use has to come on every rank of the group, and waits for the others.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeco_compile.lowering import torch_private
from zeco_compile.lowering.cost_model import DEFAULTS, LinkCost, LinkCosts
from zeco_compile.lowering.errors import CommunicatorUnavailable, InvalidLinkCosts

CPU = "cpu"


@dataclass(frozen=True)
class GroupLinks:
    """``hosts[p]`` numbers the host of group rank p; ``costs`` by wire, the defaults where nothing was measured."""

    hosts: tuple[int, ...]
    costs: Mapping[str, LinkCosts] = field(default_factory=lambda: DEFAULTS)


def of_group(group: str) -> GroupLinks:
    """The links of the process group of that name. Every rank of it has to come here once.

    Raises CommunicatorUnavailable when a rank does not come within the group's timeout, InvalidLinkCosts on every
    rank when rank 0's file cannot be read.
    """
    parent = torch_private.resolve_process_group(group)
    with _lock:
        known = _known.get(group)
        if known is not None and known[0] is parent:
            return known[1]
        count = 0 if known is None else known[2] + 1
        links = _agree(group, parent, count)
        _known[group] = (parent, links, count)
        return links


def assumed(world_size: int, ranks_per_host: int | None = None) -> GroupLinks:
    """For a report without other ranks: this process's file, and hosts filled one after the other.

    ``ranks_per_host`` None: ``LOCAL_WORLD_SIZE``, which torchrun sets, else all on one host. Raises InvalidLinkCosts.
    """
    each = ranks_per_host or int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return GroupLinks(tuple(rank // each for rank in range(world_size)), _costs(measured_costs(world_size)))


def cache_file() -> Path:
    """Where measured costs are kept: ``$XDG_CACHE_HOME/zeco_compile/links.json``, by default in ``~/.cache``."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(folder) if folder else Path.home() / ".cache") / "zeco_compile" / "links.json"


def device_name(wire: str) -> str:
    """What the costs of a wire belong to: the GPU's name, for gloo the CPU's kind."""
    if wire == "gloo":
        return f"{CPU} {platform.machine()}, {os.cpu_count()} cores"
    return torch.cuda.get_device_name()


def key(wire: str, world_size: int) -> str:
    """Under which measured costs are kept: device, wire, number of ranks, version of torch."""
    return f"{device_name(wire)} | {wire} | {world_size} ranks | torch {torch.__version__}"


def save(wire: str, world_size: int, intra: LinkCost | None, inter: LinkCost | None) -> Path:
    """Add what was measured to the file, replacing what is there under the same key; None was not measured.

    Returns the file. Raises InvalidLinkCosts for a file that is there and cannot be read, OSError.
    """
    path = cache_file()
    entries = _read(path)
    entries[key(wire, world_size)] = {
        name: None if cost is None else asdict(cost) for name, cost in (("intra", intra), ("inter", inter))
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    # whoever reads meanwhile sees the old file or the new one
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(entries, indent=1) + "\n")
    draft.replace(path)
    return path


def measured_costs(world_size: int) -> dict[str, dict[str, Any]]:
    """What this process's file has for this device and number of ranks: {wire: {"intra": ..., "inter": ...}}."""
    entries = _read(cache_file())
    if not entries:
        return {}
    wires = [wire for wire in DEFAULTS if wire == "gloo" or torch.cuda.is_available()]
    found = {wire: entries.get(key(wire, world_size)) for wire in wires}
    return {wire: entry for wire, entry in found.items() if entry is not None}


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())
        for entry in entries.values():
            _link_costs(entry, DEFAULTS["gloo"])
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        raise InvalidLinkCosts(
            f"{path} should hold the costs of links that `python -m zeco_compile.tune` has measured, and cannot be "
            f"read: {type(error).__name__}: {error}. Delete it, and measure again."
        ) from error
    return entries


def _costs(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, LinkCosts]:
    return {wire: _link_costs(measured.get(wire, {}), default) for wire, default in DEFAULTS.items()}


def _link_costs(entry: Mapping[str, Any], default: LinkCosts) -> LinkCosts:
    found = {name: LinkCost(**entry[name]) for name in ("intra", "inter") if entry.get(name) is not None}
    return LinkCosts(found.get("intra", default.intra), found.get("inter", default.inter))


_lock = threading.Lock()
_known: dict[str, tuple[dist.ProcessGroup, GroupLinks, int]] = {}
"""By group: the group that it is true for, what is true, and how many groups of that name there were before."""


def _agree(group: str, parent: dist.ProcessGroup, count: int) -> GroupLinks:
    rank, world_size = parent.rank(), parent.size()
    store = dist.PrefixStore(f"zeco_compile/links/{group}/{count}", torch_private.default_store())
    timeout = torch_private.group_timeout(parent)
    try:
        store.set(f"host/{rank}", _host())
        if rank == 0:
            store.set("answer", json.dumps(_answer(store, world_size, timeout)))
        store.wait(["answer"], timeout)
        answer = json.loads(store.get("answer"))
    except RuntimeError as error:
        raise CommunicatorUnavailable(
            f"Could not connect the {world_size} ranks of the process group {group!r}: they could not tell each "
            f"other on which hosts they are (this is group rank {rank}). Every rank of the group has to call the "
            "compiled model; one of them "
            f"probably ended, or never got here within the group's timeout of {timeout.total_seconds():g} s. "
            f"PyTorch said: {str(error).strip().splitlines()[0]}"
        ) from error
    if "error" in answer:
        raise InvalidLinkCosts(f"on rank 0 of the process group {group!r}: {answer['error']}")
    return GroupLinks(tuple(answer["hosts"]), _costs(answer["measured"]))


def _answer(store: dist.Store, world_size: int, timeout: Any) -> dict[str, Any]:
    keys = [f"host/{rank}" for rank in range(world_size)]
    store.wait(keys, timeout)
    names = [store.get(each) for each in keys]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    try:
        measured = measured_costs(world_size)
    except InvalidLinkCosts as error:  # the others wait for an answer: this is theirs too
        return {"error": str(error)}
    return {"hosts": [order[name] for name in names], "measured": measured}


def _host() -> str:
    """Equal for two processes exactly if they run on one host; NCCL tells hosts apart by the same."""
    given = os.environ.get("NCCL_HOSTID", "")
    boot = Path("/proc/sys/kernel/random/boot_id")
    return given or f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
