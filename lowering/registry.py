"""The library of custom ops ``zeco``, and how an op enters it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

LIBRARY = torch.library.Library("zeco", "FRAGMENT")

LOCAL_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)


def define(
    schema: str, meaning: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag]
) -> None:
    """Define the op of ``schema``: ``meaning`` runs it below autograd, ``fake`` gives its results' shapes."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, meaning, "CompositeExplicitAutograd")
    torch.library.register_fake(f"zeco::{name}", fake, lib=LIBRARY)
