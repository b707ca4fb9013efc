"""`torch.compile(model, backend="zeco")`: the whole pipeline on one page.

    the user's graph, traced by Dynamo on this rank's slice of the sequence
      -> settings            what the user asked for, checked                            settings.py
      -> refusals            graph breaks, the last recompilation before eager           guards.py
      -> symbolic length     a second trace, in which the length is no constant          passes/length.py
                             of one token a rank: a trace of a few, made for one        one_token.py
      -> rewrite             regions become one operator, other ops get what they need   rewrite.py
      -> second look         is it the same program for a longer sequence?               second_look.py
      -> agreement           all ranks found and decided the same                        lowering/agreement.py
      -> code                AOTAutograd, order against the exchange, Inductor           codegen.py
      -> checked call        at every call: slices of equal length, marks as compiled    guards.py

Anything that goes wrong is an error with the user's source line; nothing falls back to eager, which on a slice of
the sequence would be a wrong number.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from zeco_compile import guards, one_token, rewrite, substitutes
from zeco_compile.codegen import generate
from zeco_compile.debug import DebugDump
from zeco_compile.frames import roomy
from zeco_compile.garbage import seldom_collected
from zeco_compile.kernels.errors import ZecoError
from zeco_compile.lowering import links
from zeco_compile.lowering.agreement import all_agree, check_agreement
from zeco_compile.lowering.communicator import wire_of
from zeco_compile.passes.branches import assumptions
from zeco_compile.passes.errors import refusing
from zeco_compile.passes.inputs import first_device, graph_inputs
from zeco_compile.passes.length import (
    fix_length,
    request_constant_length,
    request_constant_sizes,
    request_symbolic_length,
)
from zeco_compile.passes.report import Report
from zeco_compile.report_log import keep
from zeco_compile.settings import Settings, same_group
from zeco_compile.slices import refuse_kept_slices

_graph_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_agreed: defaultdict[str, int] = defaultdict(int)
"""Per group, how many graphs its ranks have compiled alike. A compilation that failed is not among them: it may have
been one rank's alone, which got a slice of another length."""

substitutes.install()  # imported when torch.compile() looks the backend up, before anything is traced


@roomy
def zeco(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles one graph of Dynamo's for this rank's slice of the sequence. Called by `torch.compile`.

    Returns a callable of the graph's inputs. Raises a `ZecoError` for everything that cannot be compiled.
    """
    with refusing("the reading of the options"):
        settings, group = Settings.parse(options), same_group(options)
    with refusing("the compilation of a graph"), guards.announced(settings.group), seldom_collected():
        guards.refuse_graph_break(gm, settings)
        guards.refuse_last_recompilation()
        guards.refuse_unknown_intermediates(gm, example_inputs, settings)
        inputs = graph_inputs(gm, example_inputs, settings.seq_dim)
        if settings.world_size > 1:
            refuse_kept_slices(inputs, example_inputs)
            request_symbolic_length(gm, inputs, example_inputs)
            request_constant_length(gm, inputs, example_inputs)
        assumed = assumptions(gm, inputs, example_inputs)

        number = next(_graph_numbers[settings.group])
        report = Report(graph=number, settings=settings.to_dict())
        dump = DebugDump(settings, settings.rank, number)
        with dump.compiling(report, gm):
            dump.graph("user_graph", gm)
            ranks = rewrite.ranks_of(settings)
            operations = rewrite.operations(gm)
            how = partial(rewrite.rewrite, settings=settings, ranks=ranks, report=report, dump=dump)
            decided_on = None
            try:
                if settings.world_size > 1 and one_token.is_one_token(inputs, example_inputs):
                    decided_on = one_token.decide(gm, inputs, example_inputs, settings, how)
                    rewritten, assumed = decided_on.rewritten, decided_on.assumed
                    one_token.correct(report)
                else:
                    rewritten = how(gm, example_inputs, assumed=assumed)
            except (ZecoError, RecursionError):
                request_constant_sizes(gm, inputs, example_inputs)
                raise
            lengths = guards.lengths(inputs, example_inputs)
            assumed.refuse_broken(max(lengths, default=0) * settings.world_size)
            key = f"graph {_agreed[settings.group]}"
            decided = rewrite.decided(report, operations) | {"given": guards.given(inputs, example_inputs)}
            check_agreement(settings.group, key, decided, lengths)
            _agreed[settings.group] += 1
            if ranks.world_size > 1 and report.regions:
                wire = wire_of(settings.group, first_device(example_inputs))
                rewrite.report_scans(report, settings, ranks, links.of_group(settings.group), wire)
            if decided_on is not None:
                fixed, kept = decided_on.gm, decided_on.kept
                left = [example_inputs[index] for index in kept]
            else:
                fixed, kept, left = fix_length(gm, inputs, example_inputs, partial(all_agree, settings.group))
            compiled = generate(fixed, left, settings)
        keep(report)
        return guards.checked(
            compiled, kept, inputs, rewritten, assumed, example_inputs, settings, key, group
        )
