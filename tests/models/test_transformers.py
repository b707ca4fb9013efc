"""Unmodified models of Hugging Face transformers, with their pure-PyTorch code, equal themselves unsharded.

``ZECO_MODELS=all`` in the environment runs every model, without it one of each kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zeco_compile.passes.errors import UnsupportedFunction
from zeco_compile.testing import assert_equivalent, assert_refused

pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 4,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
ROUTER = {"num_local_experts": 3, "num_experts_per_tok": 2}
SSD = {"n_groups": 1, "chunk_size": 4, "use_cache": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL | {"sliding_window": 3},
    "mamba": {
        "vocab_size": 32,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 2,
        "use_cache": False,
    },
    "mamba2": SSD
    | {"vocab_size": 32, "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "num_hidden_layers": 2},
    "bamba": SMALL | MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": SMALL | MAMBA | {"mamba_d_ssm": 32},
    "zamba2": SMALL
    | SSD
    | {
        "mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 4, "num_mem_blocks": 1,
        "hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid"],
    },
    "nemotron_h": SMALL
    | SSD
    | {
        "num_hidden_layers": 3, "hybrid_override_pattern": "M*-", "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 4,
    },
    "mixtral": SMALL | ROUTER,
    "granitemoehybrid": SMALL
    | MAMBA
    | ROUTER
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "minimax": SMALL | ROUTER | {"block_size": 4, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "lru_width": 16, "attention_window_size": 4, "use_cache": False, "pad_token_id": 0,
    },
    "rwkv": {
        "vocab_size": 32, "context_length": 64, "hidden_size": 16, "attention_hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 2, "use_cache": False,
    },
    "xlstm": {
        "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "use_cache": False,
        "mode": "inference", "return_last_states": True,
    },
}  # fmt: skip

REGIONS = {
    "llama": 0, "mistral": 0, "mamba": 2, "mamba2": 2, "bamba": 1, "falcon_h1": 2, "zamba2": 2, "nemotron_h": 1,
    "mixtral": 0, "granitemoehybrid": 1, "minimax": 1, "recurrent_gemma": 2,
    "rwkv": 4, "xlstm": 4,
}  # fmt: skip
FAMILIES = {"mamba": "per channel", "minimax": "constant per head"}
ALWAYS = ("llama", "mamba2")


def _maker(name: str, config: dict[str, Any], with_labels: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import AutoConfig, AutoModelForCausalLM

        class LanguageModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **config)).train()

            def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
                out = self.model(input_ids=ids, labels=ids if with_labels else None, use_cache=False)
                return (out.loss, out.logits) if with_labels else (out.logits,)

        return LanguageModel()

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_model_equals_itself_unsharded(name: str) -> None:
    if name not in ALWAYS and os.environ.get("ZECO_MODELS") != "all":
        pytest.skip("of a kind that others stand for; ZECO_MODELS=all runs it")
    found = assert_equivalent(
        _maker(name, CONFIGS[name], with_labels=name != "bamba"),
        lambda: torch.randint(3, 32, (2, 12)),
        world_size=2,
        dtype=torch.float32,
        reference_dtype=torch.float32,
        rtol=1e-4,
        timeout=400.0,
    )
    family = FAMILIES.get(name, "per head and token")
    assert [region["family"] for region in found.regions] == [family] * REGIONS[name]


@pytest.mark.parametrize("name", ["mixtral", "granitemoehybrid", "minimax"])
def test_load_balancing_loss_is_that_of_all_tokens(name: str) -> None:
    if os.environ.get("ZECO_MODELS") != "all":
        pytest.skip("ZECO_MODELS=all runs it")
    config = CONFIGS[name] | {"output_router_logits": True, "router_aux_loss_coef": 1.0}

    def make() -> nn.Module:
        model = _maker(name, config, with_labels=True)()
        model(
            torch.randint(3, 32, (1, 4))
        )  # transformers registers hooks at the first call, which do not compile
        return model

    assert_equivalent(
        make,
        lambda: torch.randint(3, 32, (2, 12)),
        world_size=2,
        dtype=torch.float32,
        reference_dtype=torch.float32,
        rtol=1e-4,
        timeout=400.0,
    )


@pytest.mark.parametrize(("name", "world_size"), [("llama", 2), ("minimax", 2), ("mixtral", 4)])
def test_classification_reads_the_last_token_that_is_no_padding(name: str, world_size: int) -> None:
    if name not in ALWAYS and os.environ.get("ZECO_MODELS") != "all":
        pytest.skip("ZECO_MODELS=all runs it")

    def make() -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import AutoConfig, AutoModelForSequenceClassification

        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                config = AutoConfig.for_model(
                    name, **CONFIGS[name], num_labels=3, problem_type="single_label_classification"
                )
                self.model = AutoModelForSequenceClassification.from_config(config).train()

            def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
                out = self.model(input_ids=ids, labels=torch.tensor([2, 0]), use_cache=False)
                return out.loss, out.logits

        return Classifier()

    def padded() -> Tensor:
        ids = torch.randint(3, 32, (2, 16))
        ids[0, 5:] = 0
        ids[1, 14:] = 0
        return ids

    assert_equivalent(
        make,
        padded,
        world_size=world_size,
        dtype=torch.float32,
        reference_dtype=torch.float32,
        rtol=1e-4,
        timeout=400.0,
    )


def _delta_rule(x: Tensor) -> Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    heads = x[:, :, None]
    o, _ = torch_chunk_gated_delta_rule(
        heads, heads, heads, -x[..., :1].abs(), x[..., 1:2].sigmoid(), chunk_size=4
    )
    return o.to(x.dtype)


def test_delta_rules_are_refused_by_name() -> None:
    (message, _) = assert_refused(
        lambda: _delta_rule, lambda: torch.randn(2, 16, 4), world_size=2, error=UnsupportedFunction
    )
    assert "torch_chunk_gated_delta_rule" in message
    assert "gated delta rule: at each token the state is multiplied with a matrix" in message
    assert "test_transformers.py" in message


@pytest.mark.parametrize("backend", ["zeco", "eager"])
def test_delta_rules_are_traced_where_nothing_is_split(backend: str) -> None:
    x = torch.randn(2, 8, 4)
    found = torch.compile(_delta_rule, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(found, _delta_rule(x))


@pytest.mark.parametrize("given", ["plain", "everything"])
def test_scan_of_mamba2_is_the_library_s(given: str) -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    from zeco_compile import transformers_layers

    torch.manual_seed(0)
    x, dt, A = torch.randn(2, 7, 4, 3), torch.randn(2, 7, 4), -torch.rand(4)
    B, C = torch.randn(2, 7, 2, 5), torch.randn(2, 7, 2, 5)
    more: dict[str, Any] = {}
    if given == "everything":
        more = {
            "D": torch.randn(4), "dt_bias": torch.randn(4), "dt_softplus": True, "dt_limit": (0.1, 0.9),
            "initial_states": torch.randn(2, 4, 3, 5), "return_final_states": True,
        }  # fmt: skip
    else:
        dt = dt.abs()
    expected = mamba2_chunk_scan(x, dt, A, B, C, chunk_size=4, **more)
    found = transformers_layers.mamba2_chunk_scan(x, dt, A, B, C, chunk_size=4, **more)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("given", ["plain", "everything"])
def test_scan_of_mamba_is_the_library_s(given: str) -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    from zeco_compile import transformers_layers

    torch.manual_seed(0)
    x, dt, A = torch.randn(2, 6, 7), torch.rand(2, 6, 7), -torch.rand(6, 5)
    B, C = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    more: dict[str, Any] = {}
    if given == "everything":
        more = {
            "D": torch.randn(6), "z": torch.randn(2, 6, 7), "delta_bias": torch.randn(6), "delta_softplus": True,
            "return_last_state": True,
        }  # fmt: skip
    expected = mamba_selective_scan(x, dt, A, B, C, **more)
    found = transformers_layers.mamba_selective_scan(x, dt, A, B, C, **more)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
