"""What the passes use of Inductor's private API still is where it was and does what it did."""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

from zeco_compile.passes.torch_private import GraphPass, passes_in_order, pin_nodes


class _Named(GraphPass):
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __call__(self, graph: fx.Graph) -> None:
        self.log.append(self.name)

    def uuid(self) -> str:
        return self.name


def test_pinned_nodes_keep_their_name_value_and_keyword_arguments():
    gm = make_fx(lambda x: (x.cos(), torch.ops.aten.sum.dim_IntList(x, [0], keepdim=True)))(torch.ones(3))
    first, second = (node for node in gm.graph.nodes if node.op == "call_function")
    name = second.name
    pin_nodes(gm.graph, {second: [first]})
    gm.graph.lint()
    (pinned,) = [node for node in gm.graph.nodes if node.name == name]
    assert pinned.args[0] == (first,)
    assert pinned.meta["val"].shape == (1,)
    # torch 2.11 runs such a node within Inductor only; what it wraps runs anywhere
    assert gm.get_submodule(pinned.args[1].target)(torch.ones(3)).shape == (1,)


def test_inductor_generates_code_in_the_pinned_order():
    order: list[str] = []

    class Pin(_Named):
        def __call__(self, graph: fx.Graph) -> None:
            early, late = (n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
            pin_nodes(graph, {early: [late]})
            late.append(next(n for n in graph.nodes if n.name == early.name))
            super().__call__(graph)

    def function(a, b):
        return a.mm(b), b.mm(a)

    torch._dynamo.reset()
    a, b = torch.randn(2, 7), torch.randn(7, 2)
    with torch._inductor.config.patch(post_grad_custom_post_pass=Pin("pin", order), fx_graph_cache=False):
        compiled = torch.compile(function)
        got, code = torch._inductor.utils.run_and_get_code(compiled, a, b)
    torch._dynamo.reset()
    assert order == ["pin"]
    torch.testing.assert_close(got, function(a, b))
    assert code[0].index("(7, 7)") < code[0].index("(2, 2)"), "the 7x7 product was pinned first"


def test_passes_run_in_order_and_their_identity_is_made_of_theirs():
    log: list[str] = []
    first, second = _Named("first", log), _Named("second", log)
    assert passes_in_order(None, first) is first
    both = passes_in_order([first], second)
    both(fx.Graph())
    assert log == ["first", "second"]
    assert isinstance(both, CustomGraphPass)
    assert both.uuid() == ("first", "second")


def test_a_pass_that_cannot_be_cached_makes_the_whole_uncacheable():
    log: list[str] = []
    mixed = passes_in_order(lambda graph: log.append("function"), _Named("second", log))
    mixed(fx.Graph())
    assert log == ["function", "second"]
    assert mixed.uuid() is None


def test_passes_that_are_told_of_inference_still_are():
    aware = getattr(torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware is None:  # torch 2.11 has only passes that are not told
        return
    log: list[str] = []

    class Told(aware):  # type: ignore[misc, valid-type]
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:
            log.append(f"inference {is_inference}")

        def uuid(self) -> str:
            return "told"

    both = passes_in_order(Told(), _Named("second", log))
    assert isinstance(both, aware)
    both(fx.Graph(), is_inference=True)
    assert log == ["inference True", "second"]
    assert both.uuid() == ("told", "second")
