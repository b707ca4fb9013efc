"""Gated linear attention in Triton kernels, for CUDA devices: what ``chunked.py`` computes, in six parts.

One rank's tokens are cut into chunks of 64, and the chunks into segments, as many as fill the device; a program goes
through one segment of one head with the state in registers. Between segments runs the scan that runs between ranks
too. The state that comes from the other ranks enters where a program begins its segment, so that it costs no pass over
the tokens, nor over the segments.

    prepare              q, k, v, g -> the state before each segment, and what else the parts go on from (``kept``)
    chunk_pairs          the attention matrices inside of chunks: the work that needs no other rank's state
    read_out             -> o; in training also the state before each chunk
    prepare_backward     q, do -> the gradient of the state after each segment
    chunk_pairs_backward the gradients of those matrices
    read_out_backward    -> dv and the gradient of the state after each chunk; then, all chunks side by side, dq, dk, dg

These kernels are bound by the bytes they move and by the instructions that move them. A gate per channel is worth two
scaled operands, written once in the products' dtype and read by every later part (``triton_channel.py``); a gate per
head, or none, is not (``triton_head.py``). The matrices inside of chunks are made where they are needed, and are in
memory only on request (``everywhere``), or where a gate is too strong for the operands.

Products are in bf16 where q, k and v are bf16; else in three tf32 products, as accurate as float32 (fp16 has not the
range that the operands need). States and sums are
float32. Nothing waits for the device or depends on values from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeco_compile.kernels import triton_channel as channel
from zeco_compile.kernels import triton_head as head
from zeco_compile.kernels.shapes import Sizes, check_sizes, check_state
from zeco_compile.kernels.triton_shared import pairs_backward, scan_segments

CHUNK = 64
_LEVELS = CHUNK.bit_length() - 1
# The most chunks that one program looks through for strong channels.
_GROUP = 16
# How far, in log2, a gate's sum may lie from the chunk's middle: 2^86 squared still fits the range of bf16 and
# float32, while for float32 inputs the rounding error of such a sum (1e-7 of it) has to stay small.
_LIMIT_BF16, _LIMIT_FP32 = 86.0, 30.0
# The same inside of a block of a strong tile, whose operands meet no state: with gates of -20 in natural units blocks
# of 8 tokens. Keys and queries may then be as large as 2^23, and as small.
_BLOCK_LIMITS = {_LIMIT_BF16: 104.0, _LIMIT_FP32: 30.0}
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


@dataclass(frozen=True)
class _Plan:
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
    started: dict[Any, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)

    def start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Starts a kernel: the first time through Triton, which compiles it for what it finds of the arguments (dtypes,
        alignment, sizes of strides); after that as it was compiled, which takes half the time."""
        seen = [(x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else x for x in arguments]
        key = (id(kernel), *seen, *constants.values())
        known = self.started.get(key)
        if known is None:
            compiled = kernel[grid](*arguments, **constants)
            if compiled is not None:  # as it is from the interpreter
                if len(self.started) >= _MOST_STARTED:
                    self.started.clear()
                names = kernel.arg_names[len(arguments) :]
                self.started[key] = compiled, tuple(constants[name] for name in names)
            return
        compiled, rest = known
        compiled[*grid, 1, 1](*arguments, *rest)

    @property
    def rows(self) -> int:
        return self.sizes.batch * self.sizes.heads

    @property
    def every_chunk(self) -> int:
        """Chunks of all sequences and heads."""
        return self.rows * self.chunks

    def by_segment(self, name: str) -> tuple[int, int, int]:
        """One program a (batch and head, segment, tile of the state)."""
        launch = self.launches[name]
        tiles = triton.cdiv(self.width, launch.key) * triton.cdiv(self.sizes.value, launch.value)
        return self.rows, self.segments, tiles

    def by_chunk(self, name: str) -> tuple[int]:
        """One program a (chunk, tile of key channels); the tiles of a chunk, which read the same values, in turn."""
        return (self.every_chunk * self._key_tiles(name),)

    def by_group(self, name: str, *, tiles: bool = False) -> tuple[tuple[int], int]:
        """One program a group of chunks, or with ``tiles`` a (group, tile of key channels); and how many a group has:
        where there are more than run at a time, about three a processor, several, since most find nothing to do."""
        across = self._key_tiles(name) if tiles else 1
        count = min(_GROUP, triton.cdiv(self.every_chunk * across, 3 * self.processors))
        return (triton.cdiv(self.every_chunk, count) * across,), count

    def _key_tiles(self, name: str) -> int:
        return triton.cdiv(self.width, self.launches[name].key)

    def tokens(self) -> tuple[int, int, int, int]:
        return self.sizes.tokens, self.chunks, self.per_segment, self.sizes.heads

    def all_chunks(self) -> tuple[int, int, int]:
        return self.sizes.tokens, self.chunks, self.sizes.heads

    def tiles(self, name: str, *names: str) -> dict[str, Any]:
        """The constants of a kernel; ``names`` are those of K, V, BK and BV that it takes, by default all."""
        launch = self.launches[name]
        sizes = {"K": self.sizes.key, "V": self.sizes.value, "BK": launch.key, "BV": launch.value}
        return {
            **{name: sizes[name] for name in names or sizes},
            "CHUNK": CHUNK,
            "DOT": self.dot,
            "PRECISION": self.precision,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
            **({} if launch.registers is None else {"maxnreg": launch.registers}),
        }


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: few programs, but more than one segment
    return torch.cuda.get_device_properties(device).multi_processor_count


def _precision(device: torch.device, *tensors: Tensor) -> tuple[Any, str, float]:
    dtypes = {x.dtype for x in tensors}
    if device.type != "cuda":
        return tl.float32, "ieee", _LIMIT_FP32
    if dtypes == {torch.bfloat16}:
        return tl.bfloat16, "tf32", _LIMIT_BF16
    # One tf32 product would do for 16 bits, but Triton 3.6 gets those wrong in pipelined loops where the operand was
    # fp16 in memory: right with one stage, or as three products.
    return tl.float32, "tf32x3", _LIMIT_BF16 if dtypes <= {torch.bfloat16, torch.float16} else _LIMIT_FP32


def _storage(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """Of what the products take, where it is kept."""
    dot, _, _ = _precision(q.device, q, k, v)
    return torch.bfloat16 if dot == tl.bfloat16 else torch.float32


def _width(key: int) -> int:
    return max(16, triton.next_power_of_2(key))


def _warps(width: int, columns: int, wide: bool) -> int:
    """Of a program that holds a state of these key and value channels in registers."""
    return 4 if width * columns <= 8192 and (width <= 128 or wide) else 8


def _launches(width: int, value: int, wide: bool) -> dict[str, Launch]:
    """What was fastest on an H200 (K = V = 128, bf16); ``wide`` for operands of four bytes, which take twice the
    shared memory."""
    value = max(16, triton.next_power_of_2(value))
    columns = min(value, max(32, (8192 if wide else 16384) // width), 128 if wide else 256)
    saving = min(columns, max(64, 8192 // width))
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
        "read_out": Launch(width, columns, _warps(width, columns, wide), fewer if wide or width > 128 else 3),
        "read_out_saving": Launch(width, saving, _warps(width, saving, wide), fewer),
        "pairs_backward": Launch(0, across, 4, 2),
        "operands_backward": Launch(narrow if wide else half, min(across, half), 4, 2 if wide else 3),
        "strong_operands_backward": Launch(narrow, min(across, narrow), 4, 1),
    }


def _most_segments(rows: int, width: int, value: int, wide: bool, device: torch.device) -> int:
    """As many as fill the device; of the sizes of one token only, so that it may be asked with symbols."""
    tiles = triton.cdiv(value, _launches(width, value, wide)["read_out"].value)
    return torch.sym_max(1, _processors(device) // (rows * tiles))


def _plan(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> _Plan:
    gate = None if g is None else (g.shape, g.dtype)
    key = (q.shape, k.shape, v.shape, gate, q.dtype, k.dtype, v.dtype, q.device)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(check_sizes(q, k, v, g), q.device, *_precision(q.device, q, k, v))
    return plan


_plans: dict[Any, _Plan] = {}
"""Kept, since one takes as long to make as three kernels do to start."""

_MOST_PLANS = 256


def _make_plan(sizes: Sizes, device: torch.device, dot: Any, precision: str, limit: float) -> _Plan:
    width = _width(sizes.key)
    chunks = triton.cdiv(sizes.tokens, CHUNK)
    wide = dot != tl.bfloat16
    most = _most_segments(sizes.batch * sizes.heads, width, sizes.value, wide, device)
    per_segment = triton.cdiv(chunks, min(most, chunks))
    segments = triton.cdiv(chunks, per_segment)
    launches = _launches(width, sizes.value, wide)
    return _Plan(
        sizes, chunks, per_segment, segments, width, _processors(device), dot, precision, limit, launches
    )


def _per_channel(g: Tensor | None) -> bool:
    return g is not None and g.dim() == 4


# ----- what is handed from part to part; of symbolic sizes too, for the ops' fakes


def _segments(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> list[Tensor]:
    """For each segment the state before it if nothing enters before all, and how much of what does is left there."""
    batch, _, heads, key = q.shape
    rows, value = batch * heads, v.shape[3]
    wide = _storage(q, k, v) != torch.bfloat16
    most = _most_segments(rows, _width(key), value, wide, q.device)
    states = q.new_empty((rows, most, key, value), dtype=torch.float32)
    return [states, q.new_empty((rows, most, key if _per_channel(g) else 1), dtype=torch.float32)]


def empty_kept(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> list[Tensor]:
    """Not yet written: by the kind of gate, then the states before segments and what is left there.

    Per channel: the two operands [B*H, chunks * 64, width], each chunk's totals, which channels are strong, and the
    weights of their gates. Per head: in each chunk the sums of the gates to each token, after each, of all, and whether
    they are large.
    """
    batch, tokens, heads, key = q.shape
    rows, chunks = batch * heads, (tokens + CHUNK - 1) // CHUNK
    if _per_channel(g):
        storage = _storage(q, k, v)
        operand, total = (rows, chunks * CHUNK, _width(key)), (rows, chunks, _width(key))
        operands = [q.new_empty(operand, dtype=storage) for _ in range(2)]
        first = [*operands, q.new_empty(total, dtype=torch.float32), q.new_empty(total, dtype=torch.int8)]
        first.append(q.new_empty((2 * _LEVELS + 3, CHUNK, CHUNK), dtype=torch.bfloat16))
    elif g is not None:
        sums = [q.new_empty((rows, chunks, CHUNK), dtype=torch.float32) for _ in range(2)]
        each = (rows, chunks)
        first = [*sums, q.new_empty(each, dtype=torch.float32), q.new_empty(each, dtype=torch.int8)]
    else:
        first = []
    return [*first, *_segments(q, k, v, g)]


def empty_dkept(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> list[Tensor]:
    """Not yet written: the gradients of the states after segments, and what is left there of one that enters."""
    return _segments(q, k, v, g)


def _empty_by_chunk(shape: Sequence[int], q: Tensor, k: Tensor, v: Tensor, wanted: bool) -> Tensor:
    batch, tokens, heads, _ = q.shape
    chunks = (tokens + CHUNK - 1) // CHUNK
    return q.new_empty((batch * heads, chunks, *shape) if wanted else (0,), dtype=_storage(q, k, v))


def empty_pairs(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, everywhere: bool) -> Tensor:
    """Not yet written: the attention matrix of each chunk [B*H, chunks, 64, 64], or nothing."""
    return _empty_by_chunk((CHUNK, CHUNK), q, k, v, everywhere or _per_channel(g))


def empty_dpairs(q: Tensor, k: Tensor, v: Tensor, everywhere: bool) -> Tensor:
    """Not yet written: the gradient of each chunk's attention matrix, or nothing."""
    return _empty_by_chunk((CHUNK, CHUNK), q, k, v, everywhere)


def empty_saved(q: Tensor, k: Tensor, v: Tensor, save: bool) -> Tensor:
    """Not yet written: each chunk's incoming state [B*H, chunks, K, V], or nothing."""
    return _empty_by_chunk((q.shape[3], v.shape[3]), q, k, v, save)


# ----- forward

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _on_its_device(part: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """With the tensors' device as the current one: that is where Triton starts a kernel, whatever it is given."""

    @functools.wraps(part)
    def guarded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        device = next(x.device for x in args if isinstance(x, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return part(*args, **kwargs)
        with torch.cuda.device(device):
            return part(*args, **kwargs)

    return guarded


def _strides(x: Tensor | None, dims: int = 4) -> tuple[int, ...]:
    return (0,) * dims if x is None else tuple(x.stride()[:dims])


def _sums(kept: list[Tensor]) -> list[Tensor | None]:
    """The four sums of a gate per head; of none there are none."""
    return list(kept[:4]) if len(kept) > 2 else [None] * 4


def _scan(
    plan: _Plan, states: Tensor, decays: Tensor, before: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Makes of what each segment made the state at its beginning (reverse: end), and ``before``; -> the state after all
    of them, and the decay of all."""
    sizes = plan.sizes
    end = states.new_empty((sizes.batch, sizes.heads, sizes.key, sizes.value))
    width = decays.shape[2]
    whole = states.new_empty((sizes.batch, sizes.heads, width))
    rows, columns = min(plan.width, 32), min(64, triton.next_power_of_2(sizes.value))
    grid = (plan.rows, triton.cdiv(sizes.key, rows), triton.cdiv(sizes.value, columns))
    plan.start(
        scan_segments, grid,
        states, decays, before, end, whole, plan.segments,
        K=sizes.key, V=sizes.value, WIDTH=width, BK=rows, BV=columns, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return end, whole


@_on_its_device
def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, whole: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What these tokens make of a state, as ``chunked.rank_state``, if the ``whole`` is wanted and not only what each
    segment makes (else both are empty); and ``kept``, see ``empty_kept``."""
    plan = _plan(q, k, v, g)
    kept = empty_kept(q, k, v, g)
    states, before = kept[-2:]
    decays = torch.empty_like(before)
    if _per_channel(g):
        queries, keys, totals, strong, weights = kept[:5]
        plan.start(
            channel.operands, plan.by_chunk("operands"),
            q, k, g, queries, keys, totals, strong, weights, scale,
            *_strides(q), *_strides(k), *_strides(g), *plan.all_chunks(),
            **plan.tiles("operands", "K", "BK"), WIDTH=plan.width, LEVELS=_LEVELS, LIMIT=plan.limit,
            BLOCK_LIMIT=_BLOCK_LIMITS[plan.limit],
        )  # fmt: skip
        _channel_states(plan, keys, v, totals, strong, states, decays, reverse=False)
    else:
        if g is not None:
            to, after, totals, large = kept[:4]
            plan.start(
                head.gate_sums, (plan.rows, triton.cdiv(plan.chunks, 16)),
                g, to, after, totals, large, *_strides(g, 3), *plan.all_chunks(),
                CHUNKS=16, CHUNK=CHUNK, LIMIT=_LIMIT_FP32, num_warps=4,
            )  # fmt: skip
        _head_states(plan, k, v, kept, states, decays, 1.0, reverse=False)
    state, log_decay = _scan(plan, states, decays, before, reverse=False)
    if not whole:
        return q.new_empty((0,), dtype=torch.float32), q.new_empty((0,), dtype=torch.float32), kept
    return state, log_decay, kept


def _channel_states(
    plan: _Plan,
    operand: Tensor,
    values: Tensor,
    totals: Tensor,
    strong: Tensor,
    states: Tensor,
    decays: Tensor,
    *,
    reverse: bool,
) -> None:
    plan.start(
        channel.segment_states, plan.by_segment("segment_states"),
        operand, values, totals, strong, states, decays, *_strides(values), *plan.tokens(),
        **plan.tiles("segment_states"), REVERSE=reverse,
    )  # fmt: skip


def _head_states(
    plan: _Plan,
    operand: Tensor,
    values: Tensor,
    kept: list[Tensor],
    states: Tensor,
    decays: Tensor,
    scale: float,
    *,
    reverse: bool,
) -> None:
    to, after, totals, _ = _sums(kept)
    plan.start(
        head.segment_states, plan.by_segment("segment_states"),
        operand, values, to if reverse else after, totals, states, decays, scale,
        *_strides(operand), *_strides(values), *plan.tokens(),
        **plan.tiles("segment_states"), REVERSE=reverse, GATED=totals is not None,
    )  # fmt: skip


@_on_its_device
def chunk_pairs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float, kept: list[Tensor], everywhere: bool
) -> Tensor:
    """The attention matrices, see ``empty_pairs``: of all chunks, or of those with strong channels only."""
    pairs = empty_pairs(q, k, v, g, everywhere)
    plan = _plan(q, k, v, g)
    if _per_channel(g):
        grid, count = plan.by_group("chunk_pairs")
        plan.start(
            channel.chunk_pairs, grid,
            q, k, g, *kept[:2], *kept[3:5], pairs, scale,
            *_strides(q), *_strides(k), *_strides(g), *plan.all_chunks(), plan.every_chunk, count,
            **plan.tiles("chunk_pairs", "K", "BK"), WIDTH=plan.width, CHUNKS=_GROUP, LEVELS=_LEVELS, ALL=everywhere,
        )  # fmt: skip
    elif everywhere:
        to, _, _, large = _sums(kept)
        plan.start(
            head.chunk_pairs, (plan.every_chunk,),
            q, k, g, to, large, pairs,
            *_strides(q), *_strides(k), *_strides(g, 3), *plan.all_chunks(),
            **plan.tiles("chunk_pairs", "K", "BK"), GATED=g is not None,
        )  # fmt: skip
    return pairs


@_on_its_device
def read_out(
    pairs: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    state_in: Tensor | None,
    scale: float,
    everywhere: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] in q's dtype; with ``save`` the state before each chunk, else nothing."""
    plan = _plan(q, k, v, g)
    if state_in is not None:
        check_state("state_in", state_in, plan.sizes)
    o = q.new_empty(v.shape)
    saved = empty_saved(q, k, v, save)
    _read(
        plan,
        q,
        k,
        v,
        g,
        pairs,
        kept,
        kept[-2:],
        state_in,
        o,
        saved,
        scale,
        reverse=False,
        pairs_given=everywhere,
    )
    return o, saved


def _read(
    plan: _Plan,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    g: Tensor | None,
    pairs: Tensor,
    kept: list[Tensor],
    segments: list[Tensor],
    entering: Tensor | None,
    out: Tensor,
    saved: Tensor,
    scale: float,
    *,
    reverse: bool,
    pairs_given: bool,
) -> None:
    """o from values v; reverse: dv from the gradient of o."""
    name = "read_out_saving" if saved.numel() > 0 else "read_out"
    how = {
        "REVERSE": reverse,
        "SAVE": saved.numel() > 0,
        "PAIRS": pairs_given,
        "ENTERING": entering is not None,
    }
    how |= plan.tiles(name)
    if entering is not None:
        entering = entering.contiguous()
    if _per_channel(g):
        queries, keys, totals, strong = kept[:4]
        reader, writer = (keys, queries) if reverse else (queries, keys)
        plan.start(
            channel.read_out, plan.by_segment(name),
            reader, writer, values, totals, strong, pairs, *segments, entering, out, saved,
            *_strides(values), *_strides(out, 3), *plan.tokens(), **how,
        )  # fmt: skip
        return
    reader, writer = (k, q) if reverse else (q, k)
    plan.start(
        head.read_out, plan.by_segment(name),
        reader, writer, values, g, *_sums(kept), pairs, *segments, entering, out, saved, scale,
        *_strides(reader), *_strides(writer), *_strides(values), *_strides(g, 3), *_strides(out, 3), *plan.tokens(),
        **how, GATED=g is not None,
    )  # fmt: skip


# ----- backward


@_on_its_device
def prepare_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    kept: list[Tensor],
    whole: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The gradient that these tokens' outputs give the state before them, as ``chunked.rank_dstate``, if the ``whole``
    is wanted (else it is empty); and what ``read_out_backward`` goes on from, see ``empty_dkept``."""
    plan = _plan(q, k, v, g)
    states, before = dkept = empty_dkept(q, k, v, g)
    decays = torch.empty_like(before)
    if _per_channel(g):
        queries, _, totals, strong = kept[:4]
        _channel_states(plan, queries, do, totals, strong, states, decays, reverse=True)
    else:
        _head_states(plan, q, do, kept, states, decays, scale, reverse=True)
    dstate, _ = _scan(plan, states, decays, before, reverse=True)
    return dstate if whole else q.new_empty((0,), dtype=torch.float32), dkept


@_on_its_device
def chunk_pairs_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, do: Tensor, everywhere: bool
) -> Tensor:
    """The gradients of all chunks' attention matrices [B*H, chunks, 64, 64]; nothing unless ``everywhere``."""
    dpairs = empty_dpairs(q, k, v, everywhere)
    if everywhere:
        plan = _plan(q, k, v, g)
        plan.start(
            pairs_backward, (plan.every_chunk,),
            v, do, dpairs, *_strides(v), *_strides(do), *plan.all_chunks(),
            **plan.tiles("pairs_backward", "V", "BV"),
        )  # fmt: skip
    return dpairs


@_on_its_device
def read_out_backward(
    pairs: Tensor,
    dpairs: Tensor,
    kept: list[Tensor],
    saved: Tensor,
    dkept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    do: Tensor,
    scale: float,
    dstate_out: Tensor | None,
    everywhere: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, dg in the dtypes of q, k, v, g. ``pairs``, ``kept``, ``saved``: from the forward."""
    plan = _plan(q, k, v, g)
    if dstate_out is not None:
        check_state("dstate_out", dstate_out, plan.sizes)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dg = None if g is None else g.new_empty(g.shape)
    leaving = torch.empty_like(saved)
    _read(
        plan,
        q,
        k,
        do,
        g,
        pairs,
        kept,
        dkept,
        dstate_out,
        dv,
        leaving,
        scale,
        reverse=True,
        pairs_given=everywhere,
    )
    if _per_channel(g):
        queries, keys, totals, strong, weights = kept[:5]
        plan.start(
            channel.operands_backward, plan.by_chunk("operands_backward"),
            queries, keys, v, g, do, dpairs, totals, strong, saved, leaving, dq, dk, dg, scale,
            *_strides(v), *_strides(g), *_strides(do), *_strides(dq, 3), *plan.all_chunks(),
            **plan.tiles("operands_backward"), WIDTH=plan.width, GIVEN=everywhere,
        )  # fmt: skip
        grid, count = plan.by_group("strong_operands_backward", tiles=True)
        plan.start(
            channel.strong_operands_backward, grid,
            q, k, v, g, do, dpairs, totals, strong, weights, saved, leaving, dq, dk, dg, scale,
            *_strides(q), *_strides(k), *_strides(v), *_strides(g), *_strides(do), *_strides(dq, 3),
            *plan.all_chunks(), plan.every_chunk, count,
            **plan.tiles("strong_operands_backward"), WIDTH=plan.width, CHUNKS=_GROUP, LEVELS=_LEVELS,
            GIVEN=everywhere,
        )  # fmt: skip
    else:
        plan.start(
            head.operands_backward, (plan.every_chunk,),
            q, k, v, g, *_sums(kept), do, dpairs, saved, leaving, dq, dk, dg, scale,
            *_strides(q), *_strides(k), *_strides(v), *_strides(g, 3), *_strides(do), *_strides(dq, 3),
            *_strides(dg, 3), *plan.all_chunks(),
            **plan.tiles("operands_backward"), GIVEN=everywhere, GATED=g is not None,
        )  # fmt: skip
    return dq, dk, dv, dg
