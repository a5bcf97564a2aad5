"""Weights that arrive when their module is called: offload by accelerate and sharding by FSDP act on calls only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload

from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

FORMS = {
    "default": {},
    "fp32_logits, untied": {"fp32_logits": True, "tie_word_embeddings": False},
    "head bias": {"lm_head_bias": True, "fp32_logits": True},
    "attention_bias": {"attention_bias": True},
    "identity": {"skip_expert": "identity", "clamp_temp": True},
}


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_offloaded_weights_give_equal_logits(form: str, dtype: torch.dtype, implementation: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(**FORMS[form]))).to(dtype)
    model.set_experts_implementation(implementation)
    ids = random_ids(2, 7)
    with torch.no_grad():
        want = model(ids).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert next(model.model.layers[0].parameters()).device.type == "meta"  # something is offloaded
        torch.testing.assert_close(model(ids).logits, want, atol=1e-5, rtol=0)
        assert model(ids[:0]).logits.shape == (0, 7, 128)
        assert model(ids[:, :0]).logits.shape == (2, 0, 128)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_offloaded_experts_that_every_token_skips(implementation: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    model.set_experts_implementation(implementation)
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = 9.0
    ids = random_ids(2, 7)
    with torch.no_grad():
        want = model(ids).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        torch.testing.assert_close(model(ids).logits, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("place", ["lm_head", "model.layers.0", "model.layers.3", "model.norm"])
def test_any_part_on_disk(tmp_path: Path, place: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(fp32_logits=True, tie_word_embeddings=False)))
    model.save_pretrained(tmp_path / "model")
    parts = ["model.embed_tokens", "model.norm", "model.input_hidden_states_scale", "model.input_hidden_states_bias"]
    parts += ["lm_head", *(f"model.layers.{index}" for index in range(4))]
    places = {part: "disk" if part == place else "cpu" for part in parts}
    loaded = ZayaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=str(tmp_path / "offload")
    )
    ids = random_ids(2, 7)
    with torch.no_grad():
        want = model(ids).logits
        torch.testing.assert_close(loaded(ids).logits, want, atol=1e-5, rtol=0)
        prefix = loaded(ids[:, :4], use_cache=True)
        torch.testing.assert_close(loaded(ids[:, 4:], cache=prefix.cache).logits, want[:, 4:], atol=1e-5, rtol=0)


def test_a_resized_head_stays_in_fp32() -> None:
    model = redraw(ZayaForCausalLM(tiny_config(fp32_logits=True, tie_word_embeddings=False))).to(torch.bfloat16)
    model.resize_token_embeddings(140, mean_resizing=False)
    with torch.no_grad():
        assert model(random_ids(1, 4)).logits.dtype == torch.float32
