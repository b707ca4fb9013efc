"""The code is for one length until a second one comes, as `torch.compile` has it, or the user asks for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zeco_compile.testing import run_on_ranks


def _compiled_for(lengths: list[int], asked: str) -> dict[str, Any]:
    """What each call gave and what the code of each compilation is for: constants, or symbols too."""
    import torch.distributed as dist

    from zeco_compile import backend, gated_linear_attention, mark_sequence

    def model(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g = (x @ w).unflatten(-1, (4, 2, 4)).unbind(2)
        o = gated_linear_attention(q, k, v, -g.sigmoid())
        rows = x.shape[0] * x.shape[1]
        return o + o.sum(1, keepdim=True) / x.shape[1], o.reshape(rows, -1)[:, :3].sin().view(
            x.shape[0], -1, 3
        )

    def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(length)
        x = torch.randn(
            2 if asked != "batch" else length, length * dist.get_world_size(), 3, generator=generator
        )
        return x, torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def own(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]

    def grads(results: Any, w: torch.Tensor, reduce: bool) -> torch.Tensor:
        (grad,) = torch.autograd.grad(sum(r.square().sum() for r in results), [w])
        if reduce:
            dist.all_reduce(grad)
        return grad

    made: list[str] = []
    generate = backend.generate

    def noted(gm: Any, example_inputs: Any, settings: Any) -> Any:
        made.append(
            "constant" if all(isinstance(each, torch.Tensor) for each in example_inputs) else "symbol"
        )
        return generate(gm, example_inputs, settings)

    torch._dynamo.reset()
    backend.generate = noted  # type: ignore[assignment]
    worst = 0.0
    try:
        compiled = torch.compile(
            model,
            backend="zeco",
            fullgraph=True,
            dynamic=True if asked == "dynamic" else None,
            options={"codegen": "aot_eager"},
        )
        for length in lengths:
            x, w = inputs(length)
            mark_sequence(w, None)
            mine = own(x).clone()
            if asked == "mark later":
                compiled(mine, w)
                torch._dynamo.reset()
            if asked.startswith("mark"):
                torch._dynamo.mark_dynamic(mine, 1)
            got, expected = compiled(mine, w), model(x, w)
            pairs = [(one, own(other)) for one, other in zip(got, expected, strict=True)]
            pairs.append((grads(got, w, True), grads(expected, w, False)))
            worst = max(worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    finally:
        backend.generate = generate
        torch._dynamo.reset()
    return {"made": made, "worst": worst}


@pytest.mark.parametrize(
    ("asked", "lengths", "made"),
    [
        ("nothing", [6, 6, 9, 5, 6], ["constant", "symbol"]),
        ("dynamic", [6, 9, 5], ["symbol"]),
        ("mark", [6, 9, 5], ["symbol"]),
        ("mark later", [6], ["constant", "symbol"]),
        ("batch", [6, 9, 5], ["constant", "symbol"]),
    ],
)
def test_code_is_for_one_length_until_another_comes(asked: str, lengths: list[int], made: list[str]) -> None:
    for result in run_on_ranks(_compiled_for, lengths, asked, world_size=2):
        assert result["made"] == made
        assert result["worst"] < 1e-5


def _batches(dynamic: bool | None, mark: bool) -> float:
    """The largest difference of a loss over batches of other sizes, whose rows are folded with the sequence."""
    import torch.distributed as dist
    import torch.nn.functional as F

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 5), torch.nn.Linear(5, 11))

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids)[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1))

    compiled = torch.compile(
        loss, backend="zeco", fullgraph=True, dynamic=dynamic, options={"codegen": "aot_eager"}
    )
    worst = 0.0
    for batch in (2, 3, 2):
        ids, labels = (torch.randint(11, (batch, 12)) for _ in range(2))
        mine = [each.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone() for each in (ids, labels)]
        if mark:
            torch._dynamo.mark_dynamic(mine[0], 1)
        worst = max(worst, abs(float(compiled(*mine)) / float(loss(ids, labels)) - 1))
    torch._dynamo.reset()
    return worst


@pytest.mark.parametrize(("dynamic", "mark"), [(None, False), (True, False), (None, True)])
def test_batches_of_other_sizes_and_one_marked_input_of_two(dynamic: bool | None, mark: bool) -> None:
    assert max(run_on_ranks(_batches, dynamic, mark, world_size=2)) < 1e-5


def _loop_over_batches(dynamic: bool | None) -> float:
    """The largest difference of a loop over the tokens, called with batches and lengths of other sizes."""
    import torch.distributed as dist

    torch._dynamo.reset()

    def loop(x: torch.Tensor) -> torch.Tensor:
        state, out = torch.zeros_like(x[:, 0, :3, None]), []
        for t in range(x.shape[1]):
            k, v, q, a = x[:, t].split(3, dim=-1)
            state = state * a.sigmoid()[..., None] + k[..., None] * v[:, None]
            out.append(torch.einsum("bk,bkv->bv", q, state))
        return torch.stack(out, 1)

    compiled = torch.compile(
        loop, backend="zeco", fullgraph=True, dynamic=dynamic, options={"codegen": "aot_eager"}
    )
    worst = 0.0
    for batch, length in ((3, 8), (2, 8), (5, 8), (5, 12)):
        whole = torch.randn(batch, length, 12, generator=torch.Generator().manual_seed(batch)).double()
        own = [each.clone() for each in whole.chunk(dist.get_world_size(), 1)][dist.get_rank()]
        wanted = loop(whole).chunk(dist.get_world_size(), 1)[dist.get_rank()]
        worst = max(worst, float((compiled(own) - wanted).abs().max()))
    torch._dynamo.reset()
    return worst


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_loop_takes_batches_of_other_sizes(dynamic: bool | None) -> None:
    assert max(run_on_ranks(_loop_over_batches, dynamic, world_size=2)) < 1e-12


def _loop_with_a_float(dynamic: bool | None) -> list[float]:
    """The differences of a loop whose decay is a Python number of the model's, one for each value of that number."""
    import torch.distributed as dist

    class Average(torch.nn.Module):
        decay = 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, out = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                h = self.decay * h + (1 - self.decay) * x[:, t]
                out.append(h)
            return torch.stack(out, 1)

    torch._dynamo.reset()
    model, found = Average(), []
    compiled = torch.compile(
        model, backend="zeco", fullgraph=True, dynamic=dynamic, options={"codegen": "aot_eager"}
    )
    whole = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)).double()
    for decay in (0.5, 0.75, 0.9):
        model.decay = decay
        own, wanted = (x.chunk(dist.get_world_size(), 1)[dist.get_rank()] for x in (whole, model(whole)))
        found.append(float((compiled(own.clone()) - wanted).abs().max()))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_loop_takes_a_float_that_changes(dynamic: bool | None) -> None:
    for found in run_on_ranks(_loop_with_a_float, dynamic, world_size=2):
        assert max(found) < 1e-12


def _positions_of_a_square(dynamic: bool | None) -> float:
    """The difference of a model with as many channels as a rank has tokens."""
    import torch.distributed as dist

    def model(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[1] - 1, -1, -1)[:, None]

    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend="zeco", fullgraph=True, dynamic=dynamic, options={"codegen": "aot_eager"}
    )
    x = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(0))
    own, wanted = (each.chunk(dist.get_world_size(), 1)[dist.get_rank()] for each in (x, model(x)))
    difference = float((compiled(own.clone()) - wanted).abs().max())
    torch._dynamo.reset()
    return difference


@pytest.mark.parametrize("dynamic", [None, True])
def test_channels_as_many_as_tokens_do_not_fix_the_length(dynamic: bool | None) -> None:
    assert max(run_on_ranks(_positions_of_a_square, dynamic, world_size=2)) == 0.0
