"""How a problem is cut for the Triton kernels, and how each of them is started: tiles, warps, loads in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from zeco_compile.kernels.shapes import Sizes, check_sizes

CHUNK = 64
LEVELS = CHUNK.bit_length() - 1
# The most chunks that one program looks through for strong channels.
GROUP = 16
# How far, in log2, a gate's sum may lie from the chunk's middle: 2^86 squared still fits the range of bf16 and
# float32, while for float32 inputs the rounding error of such a sum (1e-7 of it) has to stay small.
LIMIT_BF16, LIMIT_FP32 = 86.0, 30.0
# The same inside of a block of a strong tile, whose operands meet no state: with gates of -20 in natural units blocks
# of 8 tokens. Keys and queries may then be as large as 2^23, and as small.
BLOCK_LIMITS = {LIMIT_BF16: 104.0, LIMIT_FP32: 30.0}
# What a plan remembers to have started; more come only with other strides and scales.
_MOST_STARTED = 256


@dataclass(frozen=True)
class Launch:
    """How one kernel is started: its tiles of key and value channels, warps, loads in flight (stages), and the most
    registers a thread (None: as many as it takes)."""

    key: int
    value: int
    warps: int
    stages: int
    registers: int | None = None


class Started:
    """A compiled kernel, and the constants that it was compiled with.

    Triton's own way to start it again (``compiled[grid](...)``) asks for the device and makes a function each time;
    this is what that function does, on the device that is the current one.
    """

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        self._compiled, self._constants = compiled, constants
        self._stream_of = driver.active.get_current_stream
        self._device = driver.active.get_current_device()

    def again(
        self, grid: tuple[int, ...], tensors: Sequence[Tensor | None], numbers: tuple[float, ...]
    ) -> None:
        compiled, across, stream = self._compiled, (*grid, 1, 1)[:3], self._stream_of(self._device)
        arguments = (*tensors, *numbers, *self._constants)
        entered, left = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        described = None if entered is None else compiled.launch_metadata(across, stream, *arguments)
        compiled.run(
            *across, stream, compiled.function, compiled.packed_metadata, described, entered, left, *arguments
        )


@dataclass(frozen=True)
class Plan:
    """How a problem is cut, and in what it computes. ``width`` is the key channels, filled up to a power of two."""

    sizes: Sizes
    chunks: int
    per_segment: int
    segments: int
    width: int
    processors: int
    dot: Any
    precision: str
    limit: float
    launches: dict[str, Launch]
    started: dict[Any, Started] = field(default_factory=dict)
    _tiles: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)

    def start(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        numbers: tuple[float, ...],
        **constants: Any,
    ) -> None:
        """Starts a kernel: the first time through Triton, which compiles it for what it finds of the arguments (dtypes,
        alignment, sizes of strides); after that as it was compiled, without Triton's lookups."""
        dtypes = [None if x is None else x.dtype for x in tensors]
        addresses = [0 if x is None else x.data_ptr() % 16 for x in tensors]
        key = (id(kernel), numbers, *dtypes, *constants.values(), *(addresses if any(addresses) else ()))
        known = self.started.get(key)
        if known is None:
            compiled = kernel[grid](*tensors, *numbers, **constants)
            if compiled is not None:  # as it is from the interpreter
                if len(self.started) >= _MOST_STARTED:
                    self.started.clear()
                names = kernel.arg_names[len(tensors) + len(numbers) :]
                self.started[key] = Started(compiled, tuple(constants[name] for name in names))
            return
        known.again(grid, tensors, numbers)

    @property
    def rows(self) -> int:
        return self.sizes.batch * self.sizes.heads

    @property
    def every_chunk(self) -> int:
        """Chunks of all sequences and heads."""
        return self.rows * self.chunks

    def by_segment(self, name: str) -> tuple[int, int, int]:
        """One program a (batch and head, segment, tile of the state)."""
        return self.rows, self.segments, cdiv(self.sizes.value, self.launches[name].value)

    def by_chunk(self, name: str) -> tuple[int]:
        """One program a (chunk, tile of key channels); the tiles of a chunk, which read the same values, in turn."""
        return (self.every_chunk * self._key_tiles(name),)

    def by_group(self, name: str, *, tiles: bool = False) -> tuple[tuple[int], int]:
        """One program a group of chunks, or with ``tiles`` a (group, tile of key channels); and how many a group has:
        where there are more than run at a time, about three a processor, several, since most find nothing to do."""
        across = self._key_tiles(name) if tiles else 1
        count = min(GROUP, cdiv(self.every_chunk * across, 3 * self.processors))
        return (cdiv(self.every_chunk, count) * across,), count

    def _key_tiles(self, name: str) -> int:
        return cdiv(self.width, self.launches[name].key)

    def tokens(self) -> tuple[int, int, int, int]:
        return self.sizes.tokens, self.chunks, self.per_segment, self.sizes.heads

    def all_chunks(self) -> tuple[int, int, int]:
        return self.sizes.tokens, self.chunks, self.sizes.heads

    def tiles(self, name: str, *names: str) -> dict[str, Any]:
        """The constants of a kernel; ``names`` are those of K, V, BK and BV that it takes, by default all."""
        known = self._tiles.get((name, *names))
        if known is not None:
            return known
        launch = self.launches[name]
        sizes = {"K": self.sizes.key, "V": self.sizes.value, "BK": launch.key, "BV": launch.value}
        tiles = self._tiles[name, *names] = {
            **{name: sizes[name] for name in names or sizes},
            "CHUNK": CHUNK,
            "DOT": self.dot,
            "PRECISION": self.precision,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            **({} if launch.registers is None else {"maxnreg": launch.registers}),
        }
        return tiles


def cdiv(a: int, b: int) -> int:
    return (a + b - 1) // b


def power_of_2(n: int) -> int:
    """The next one that is not less."""
    return 1 << (int(n) - 1).bit_length()


@cache
def processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: few programs, but more than one segment
    return torch.cuda.get_device_properties(device).multi_processor_count


def _is_roomy(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"] >= 227 << 10


def precision_of(device: torch.device, *tensors: Tensor) -> tuple[Any, str, float]:
    dtypes = {x.dtype for x in tensors}
    if device.type != "cuda":
        return tl.float32, "ieee", LIMIT_FP32
    if storage(*tensors) == torch.bfloat16:
        return tl.bfloat16, "tf32", LIMIT_BF16
    # One tf32 product would do for 16 bits, but Triton 3.6 gets those wrong in pipelined loops where the operand was
    # fp16 in memory: right with one stage, or as three products.
    return tl.float32, "tf32x3", LIMIT_BF16 if dtypes <= {torch.bfloat16, torch.float16} else LIMIT_FP32


def storage(*tensors: Tensor) -> torch.dtype:
    """Of what the products take, where it is kept."""
    narrow = all(x.device.type == "cuda" and x.dtype == torch.bfloat16 for x in tensors)
    return torch.bfloat16 if narrow else torch.float32


def width_of(key: int) -> int:
    return max(16, power_of_2(key))


def _warps(width: int, columns: int, wide: bool) -> int:
    """Of a program that holds a state of these key and value channels in registers."""
    return 4 if width * columns <= 8192 and (width <= 128 or wide) else 8


@cache
def _launches(width: int, value: int, wide: bool, roomy: bool) -> dict[str, Launch]:
    """What was fastest on an H200 (K = V = 128, bf16); ``wide`` for operands of four bytes, which take twice the
    shared memory; ``roomy`` where a program has 227 KiB of that, as from sm_90 on."""
    value = max(16, power_of_2(value))
    columns = min(value, max(32, (8192 if wide else 16384) // width), 128 if wide else 256)
    reading = min(columns, 64)  # rows of a state that four warps share, so that two programs fit a processor
    warps = _warps(width, reading, wide)
    reader_warps = 8 if wide and width == 128 else warps
    half, narrow = min(64, width), min(32, width)
    across = min(value, 32 if wide else 64)
    fewer = 1 if wide and width > 128 else 2  # two rows of 256 float32 a token, twice, are more than there is
    # Two limits are of Triton 3.6, which for sm_90 in bf16 otherwise makes what is wrong on some shapes, or ends in an
    # illegal access: products that sum over value channels take no more of them at once than key channels, and a state
    # of 256 key channels takes 8 warps (in float32, 4).
    return {
        # strong tiles would take more registers, and then fewer ordinary ones run at a time
        "operands": Launch(narrow if wide else half, 0, 4, 1, None if wide else 128),
        "chunk_pairs": Launch(narrow if wide else half, 0, 4, 1, None if wide else 168),
        "segment_states": Launch(width, columns, _warps(width, columns, wide), 2 if wide else 3),
        "read_out": Launch(width, reading, reader_warps, fewer if wide or (width > 128 and not roomy) else 3),
        "read_out_of_pairs": Launch(width, reading, reader_warps, fewer if wide or width > 128 else 3),
        # what weighs tokens on the way leaves no room for two of a wide state on a processor, nor for its loads
        "read_out_per_head": (
            Launch(width, columns, _warps(width, columns, wide), 3)
            if width == 128 and not wide
            else Launch(width, reading, warps, fewer if wide or width > 128 else 4)
        ),
        "pairs_backward": Launch(0, across, 4, 2),
        "operands_backward": Launch(narrow if wide else half, min(across, half), 4, 2 if wide else 3),
        "strong_operands_backward": Launch(narrow, min(across, narrow), 4, 1),
    }


def most_segments(rows: int, width: int, value: int, wide: bool, device: torch.device) -> int:
    """As many as fill the device; of the sizes of one token only, so that it may be asked with symbols."""
    tiles = cdiv(value, _launches(width, int(value), wide, False)["segment_states"].value)
    fill = processors_of(device) // (rows * tiles)
    return max(1, fill) if isinstance(fill, int) else torch.sym_max(1, fill)


def plan_for(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> Plan:
    gate = None if g is None else (g.shape, g.dtype)
    key = (q.shape, k.shape, v.shape, gate, q.dtype, k.dtype, v.dtype, q.device)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(check_sizes(q, k, v, g), q.device, *precision_of(q.device, q, k, v))
    return plan


_plans: dict[Any, Plan] = {}
"""Kept, since one takes as long to make as three kernels do to start."""

_MOST_PLANS = 256


def _make_plan(sizes: Sizes, device: torch.device, dot: Any, precision: str, limit: float) -> Plan:
    width = width_of(sizes.key)
    chunks = cdiv(sizes.tokens, CHUNK)
    wide = dot != tl.bfloat16
    most = most_segments(sizes.batch * sizes.heads, width, sizes.value, wide, device)
    per_segment = cdiv(chunks, min(most, chunks))
    segments = cdiv(chunks, per_segment)
    launches = _launches(width, sizes.value, wide, _is_roomy(device))
    return Plan(
        sizes, chunks, per_segment, segments, width, processors_of(device), dot, precision, limit, launches
    )
