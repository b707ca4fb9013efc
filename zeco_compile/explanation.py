"""`explain`: what the backend would do with a model, without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from zeco_compile import guards, rewrite, substitutes
from zeco_compile.debug import DebugDump
from zeco_compile.lowering import links
from zeco_compile.lowering.communicator import wire_of
from zeco_compile.passes.branches import assumptions
from zeco_compile.passes.errors import CompileError, refusing
from zeco_compile.passes.inputs import first_device, graph_inputs
from zeco_compile.passes.length import request_constant_length, request_symbolic_length
from zeco_compile.passes.plans import Ranks
from zeco_compile.passes.report import Report
from zeco_compile.settings import Settings

_ASSUMED_RANKS = 2


class _Explained(CompileError):
    """Ends the compilation once the report is complete: the model is not run."""

    def __init__(self) -> None:
        super().__init__("the graph has been explained, and will not be run.")


def explain(
    model: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Report:
    """A report of what was recognised in `model`, where, what each rank would send, and what would be refused.

    `args` and `kwargs` are inputs of the model as one rank would get them: its slice of the sequence. `options`
    are those of the backend. Without an initialised process group the report is made as for two ranks. Nothing is
    run, and no rank is talked to: what a message costs is taken from this process's file or the defaults, and the
    ranks fill the hosts as torchrun's do. The first graph is explained; a model that is refused has the refusal in
    ``report.error``. Raises `InvalidOption` for options that are none.
    """
    settings = Settings.parse(options)
    ranks = rewrite.ranks_of(settings)
    if ranks.world_size == 1:
        ranks = Ranks("", 0, _ASSUMED_RANKS)
    made: list[Report] = []
    substitutes.install()

    def explaining(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        with refusing("the explanation of a graph"):
            inputs = graph_inputs(gm, example_inputs, settings.seq_dim)
            request_symbolic_length(gm, inputs, example_inputs)
            request_constant_length(gm, inputs, example_inputs)
            assumed = assumptions(gm, inputs, example_inputs)
            report = Report(settings=settings.to_dict())
            made.append(report)
            dump = DebugDump(settings, ranks.rank, 0)
            try:
                with dump.compiling(report, gm):
                    guards.refuse_graph_break(gm, settings)
                    dump.graph("user_graph", gm)
                    rewrite.rewrite(gm, example_inputs, settings, ranks, report, dump, assumed)
                    wire = wire_of(ranks.group, first_device(example_inputs))
                    known = links.assumed(ranks.world_size)
                    rewrite.report_scans(report, settings, ranks, known, wire)
            except CompileError as refused:
                report.error = report.error or str(refused)
            raise _Explained()

    compiled = torch.compile(model, backend=explaining)
    with contextlib.suppress(_Explained):
        try:
            compiled(*args, **kwargs)
        except substitutes.UnsupportedArgument as refused:  # while Dynamo traced: there is no graph yet
            made.append(Report(settings=settings.to_dict(), error=str(refused)))
    if not made:
        raise CompileError(
            "Dynamo did not hand over any graph of this model.",
            why="it gave up on the whole function, or there is no tensor operation in it.",
            hints=["compile it with torch.compile(model, fullgraph=True) to see Dynamo's reason"],
        )
    return made[-1]
