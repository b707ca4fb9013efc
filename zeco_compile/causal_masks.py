"""What `nn.Transformer` asks of its masks, as Dynamo traces it where several ranks share the sequence."""

from __future__ import annotations

from torch import Tensor


def detect_is_causal_mask(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Whether the hint stands for the mask [L, L]: where the caller says so. PyTorch compares the mask's values where
    he says nothing, to save time; the mask is used as it is here, which comes to the same."""
    return is_causal is True
