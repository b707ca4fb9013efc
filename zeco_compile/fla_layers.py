"""What flash-linear-attention's fused layers mean in plain PyTorch: norms, short convolution, gated units.

Contract: each function computes what the library function of that name in ``fla.modules`` computes on one device
(fla-core 0.6.0), for the arguments that it takes; what it does not take is refused before it is called
(zeco_compile/substitutes.py). fla's kernels compute in float32 and round once, at the end; so do these (in
float64 for float64). All are local to a position, but for the convolution, which Dynamo then shows to the
compiler as the padding and convolution that it is.

Dynamo traces these functions in place of the library's, so they are plain PyTorch, without closures.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("swish", "silu", "sigmoid")


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """Norm of x + residual over the last dimension, in ``num_groups`` groups; weight, bias [channels] or None.

    Returns y in x's dtype, or (y, x + residual) with ``prenorm``, the sum in the residual's dtype.
    """
    total = _wide(x) if residual is None else _wide(x) + _wide(residual)
    y = _norm(total, weight, bias, eps, is_rms_norm, num_groups).to(x.dtype)
    return (y, _sum(x, total, residual, residual_in_fp32)) if prenorm else y


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """`layer_norm` without subtracting the mean (Zhang and Sennrich, 2019, equation 4)."""
    return layer_norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """`layer_norm`, then a linear layer in the norm's dtype (autocast's where that is on)."""
    total = _wide(x) if residual is None else _wide(x) + _wide(residual)
    y = _norm(total, norm_weight, norm_bias, eps, is_rms_norm, num_groups).to(x.dtype)
    out = _linear(y, linear_weight, linear_bias)
    return (out, _sum(x, total, residual, residual_in_fp32)) if prenorm else out


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """`layer_norm_linear` without subtracting the mean."""
    return layer_norm_linear(
        x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm, residual_in_fp32, True
    )


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    """`layer_norm` times swish(g) or sigmoid(g); g has x's shape."""
    return _gated_norm(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps, False)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    """`layer_norm_gated` without subtracting the mean."""
    return _gated_norm(x, g, weight, bias, activation, residual, prenorm, residual_in_fp32, eps, True)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x ** 2) + eps) over the last dimension."""
    wide = _wide(x)
    y = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return y.to(x.dtype if output_dtype is None else output_dtype)


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """log(sigmoid(x)) / temperature."""
    return (F.logsigmoid(_wide(x)) / temperature).to(x.dtype)


# The library's other units are `apply` of an autograd.Function, which Dynamo traces; what it cannot trace are the
# kernels that those call, forward and backward.


def swish_fwd(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(_wide(x)).to(x.dtype)


def swish_bwd(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `swish_fwd` for that of its result."""
    wide = _wide(x)
    s = torch.sigmoid(wide)
    return (_wide(dy) * s * (1 + wide * (1 - s))).to(x.dtype)


def sigmoid_fwd(x: Tensor) -> Tensor:
    return torch.sigmoid(_wide(x)).to(x.dtype)


def sigmoid_bwd(x: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `sigmoid_fwd` for that of its result."""
    s = torch.sigmoid(_wide(x))
    return (_wide(dy) * s * (1 - s)).to(x.dtype)


def swiglu_fwd(x: Tensor, y: Tensor) -> Tensor:
    """swish(x) * y."""
    return (F.silu(_wide(x)) * _wide(y)).to(x.dtype)


def swiglu_fwdbwd(x: Tensor, y: Tensor, g: Tensor, use_weight: bool = False) -> tuple[Tensor, ...]:
    """The gradients of x and y for g, that of `swiglu_fwd`'s result; and with ``use_weight`` that result too."""
    wide, wide_y, wide_g = _wide(x), _wide(y), _wide(g)
    s = torch.sigmoid(wide)
    dx = (wide_g * wide_y * s * (1 + wide * (1 - s))).to(x.dtype)
    dy = (wide_g * wide * s).to(y.dtype)
    return (dx, dy, (wide * s * wide_y).to(x.dtype)) if use_weight else (dx, dy)


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of swish(x) * y."""
    return F.linear((F.silu(_wide(x)) * _wide(y)).to(x.dtype), weight, bias)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, None]:
    """Depthwise convolution of x [B, T, D] with weight [D, W] over this and the W - 1 positions before.

    Then the activation (None, "silu" or "swish"), then the residual. Returns (y in x's dtype, None).
    """
    channels, width = weight.shape
    padded = _wide(F.pad(x.transpose(1, 2), (width - 1, 0)))
    bias = None if bias is None else bias.to(padded.dtype)
    y = F.conv1d(padded, weight.to(padded.dtype).unsqueeze(1), bias, groups=channels).transpose(1, 2)
    if activation is not None:
        y = F.silu(y)
    if residual is not None:
        y = y + residual
    return y.to(x.dtype), None


def token_shift(x: Tensor) -> Tensor:
    """The row before minus the row itself; nothing stands before the first. x [B, T, D]."""
    return F.pad(x[:, :-1], (0, 0, 1, 0)) - x


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The first 2 R channels of x [B, T, H, D], in pairs, turned by each row's angles; cos, sin [T or more, R].

    Pairs are (c, c + R), or neighbours where ``interleaved`` (Su et al., RoFormer, equation 34).
    """
    turned = 2 * cos.shape[1]
    c, s = (_wide(t[: x.shape[1], None]) for t in (cos, sin))
    y = _wide(x[..., :turned])
    a, b = y.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else y.chunk(2, -1)
    pair = (a * c - b * s, a * s + b * c)
    y = (torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype)
    return y if turned == x.shape[3] else torch.cat((y, x[..., turned:]), -1)


def _gated_norm(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    prenorm: bool,
    residual_in_fp32: bool,
    eps: float,
    is_rms_norm: bool,
) -> Any:
    total = _wide(x) if residual is None else _wide(x) + _wide(residual)
    y = _norm(total, weight, bias, eps, is_rms_norm, 1)
    gate = _wide(g)
    y = y * (torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate))
    y = y.to(x.dtype)
    return (y, _sum(x, total, residual, residual_in_fp32)) if prenorm else y


def _norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_rms_norm: bool, num_groups: int
) -> Tensor:
    shape = x.shape
    if num_groups > 1:
        x = x.unflatten(-1, (num_groups, shape[-1] // num_groups))
    if not is_rms_norm:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if num_groups > 1:
        y = y.flatten(-2)
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _sum(x: Tensor, total: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> Tensor:
    """What the next layer gets as its residual: x itself unless something was added or a dtype asked for."""
    if residual is not None:
        return total.to(residual.dtype)
    return x.to(torch.float32) if residual_in_fp32 else x


def _linear(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(y, weight.to(y.dtype), None if bias is None else bias.to(y.dtype))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)
