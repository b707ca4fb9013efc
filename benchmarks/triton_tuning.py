"""Which configurations Triton's autotuner tries of other people's kernels, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tune(
    *,
    configurations: Callable[[list[Any]], list[Any]] | None = None,
    do_bench: Callable[..., list[float]] | None = None,
) -> None:
    """For all autotuned kernels that are defined from here on, so it comes before their library is imported.

    ``configurations`` picks some of a kernel's own; ``do_bench(run, quantiles)`` times one of them.
    """
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.__init__

    def picked(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        if do_bench is not None:
            kwargs["do_bench"] = do_bench
        if configurations is not None:
            configs = configurations(configs)
        whole(self, fn, arg_names, configs, *args, **kwargs)

    Autotuner.__init__ = picked  # type: ignore[method-assign]
