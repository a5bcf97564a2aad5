"""PEFT on ZAYA: the LoRA recipe, what "all-linear" picks, merging, saving, and what is refused."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.zaya import ZayaForCausalLM as StockZaya

import zaya_hf
from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.testing import TINY, random_ids, redraw, tiny_config
from zaya_hf.training import lora_targets

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]

IDS = random_ids(2, 12)
ATTENTION = {
    *(f"self_attn.qkv_proj.{name}" for name in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")),
    "self_attn.o_proj",
}
ROUTER = {"mlp.gate.down_proj", *(f"mlp.gate.router_mlp.{name}" for name in ("fc1", "fc2", "out_proj"))}
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def a_model(**changes: Any) -> ZayaForCausalLM:
    model = redraw(ZayaForCausalLM(tiny_config(**changes)))
    assert isinstance(model, ZayaForCausalLM)
    return model


def adapted(model: ZayaForCausalLM, **options: Any) -> Any:
    """With LoRA matrices that are not zero, so that the adapter changes the result."""
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "init_lora_weights": False, **options})).eval()


@torch.no_grad()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(input_ids=ids).logits


def largest(difference: Tensor) -> float:
    return float(difference.detach().abs().max())


def per_layer(names: list[str]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for name in names:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        assert match is not None, name
        found.setdefault(int(match[1]), set()).add(match[2])
    return found


# ------------------------------------------------------------------------------------------------ what is adapted
def test_recipe_adapts_attention_and_experts_of_every_layer_and_nothing_else() -> None:
    model = adapted(a_model(), **lora_targets(a_model()))
    assert per_layer(model.targeted_module_names) == dict.fromkeys(range(4), ATTENTION)
    assert per_layer(model.targeted_parameter_names) == dict.fromkeys(range(4), EXPERTS)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 4 * 2 * (len(ATTENTION) + len(EXPERTS))
    assert all("lora_" in name and "gate." not in name for name in trained)


def test_recipe_takes_parts_layers_and_configs() -> None:
    assert set(lora_targets(tiny_config(), experts=False)["target_modules"]) == ATTENTION
    assert lora_targets(tiny_config(), experts=False)["target_parameters"] == []
    only_experts = adapted(a_model(), **lora_targets(tiny_config(), attention=False))
    assert only_experts.targeted_module_names == []
    many = tiny_config(num_hidden_layers=12)
    model = adapted(redraw(ZayaForCausalLM(many)), **lora_targets(many, layers=[1, 11]))  # type: ignore[arg-type]
    assert per_layer(model.targeted_module_names) == dict.fromkeys((1, 11), ATTENTION)
    assert per_layer(model.targeted_parameter_names) == dict.fromkeys((1, 11), EXPERTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": False, "experts": False}, "nothing is left to adapt"),
        ({"layers": []}, "nothing is left to adapt"),
        ({"layers": [0, 4]}, r"there is no layer 4; the model has layers 0 \.\.\. 3"),
        ({"layers": [-1, 2]}, "there is no layer -1"),
    ],
)
def test_recipe_refuses_what_adapts_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lora_targets(tiny_config(), **options)


def test_recipe_refuses_another_model() -> None:
    with pytest.raises(ValueError, match="this one is 'Linear'"):
        lora_targets(torch.nn.Linear(2, 2))


def test_all_linear_picks_attention_and_router_and_no_expert() -> None:
    model = adapted(a_model(), target_modules="all-linear")
    assert per_layer(model.targeted_module_names) == dict.fromkeys(range(4), ATTENTION | ROUTER)
    assert not any("experts" in name for name, _ in model.named_parameters() if "lora_" in name)


def test_names_of_other_models_find_the_router() -> None:
    """Why the recipe's names are longer: "down_proj" is an expert's elsewhere, and here also the router's."""
    model = adapted(a_model(), target_modules=["gate_up_proj", "down_proj"])
    assert per_layer(model.targeted_module_names) == dict.fromkeys(range(4), frozenset({"mlp.gate.down_proj"}))


# ------------------------------------------------------------------------------------------- effect, gradient, merge
@pytest.mark.parametrize(
    ("parts", "options", "changes"),
    [
        ({}, {}, {}),
        ({}, {"use_rslora": True}, {"attention_bias": True}),
        ({"experts": False}, {"use_dora": True}, {}),
        ({"experts": False}, {"lora_bias": True}, {"attention_bias": True}),
        ({"attention": False}, {}, {"skip_expert": "identity"}),
        ({"layers": [1, 3]}, {"modules_to_save": ["gate"]}, {}),
    ],
    ids=["all", "rslora", "dora", "bias", "experts", "layers"],
)
def test_adapters_have_effect_gradients_and_merge(
    parts: dict[str, Any], options: dict[str, Any], changes: dict[str, Any]
) -> None:
    base = a_model(**changes)
    before = logits(base)
    model = adapted(base, **lora_targets(base, **parts), **options)
    with_adapter = logits(model)
    assert largest(with_adapter - before) > 0.1

    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    for name, parameter in trained.items():
        assert parameter.grad is not None, name
        assert largest(parameter.grad) > 0, name

    model.merge_adapter()
    torch.testing.assert_close(logits(model), with_adapter, atol=1e-5, rtol=0)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), with_adapter, atol=1e-5, rtol=0)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)
    merged = model.merge_and_unload()
    assert type(merged) is ZayaForCausalLM
    assert not hasattr(merged, "peft_config")
    torch.testing.assert_close(logits(merged), with_adapter, atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_implementation_of_the_experts_uses_the_adapter(implementation: str) -> None:
    model = adapted(a_model(), **lora_targets(tiny_config(), attention=False))
    expected = logits(model)
    model.get_base_model().set_experts_implementation(implementation)
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant: bool) -> None:
    def gradients(model: Any) -> dict[str, Tensor]:
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    expected = gradients(adapted(a_model(), **lora_targets(tiny_config())))
    model = adapted(a_model(), **lora_targets(tiny_config()))
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    got = gradients(model)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_bias_of_an_adapter_reaches_the_value_before_the_first_token() -> None:
    """The delayed value of a first token is the projection of nothing: the adapter's bias if the layer has none."""
    model = adapted(a_model(), target_modules=["v_proj_delayed"], lora_bias=True)
    like = a_model(attention_bias=True)
    plain = model.get_base_model()
    with torch.no_grad():
        own = {n.replace("base_layer.", ""): p for n, p in plain.named_parameters() if "lora_" not in n}
        for name, parameter in like.named_parameters():
            parameter.copy_(own.get(name, torch.zeros_like(parameter)))
        for name, buffer in like.named_buffers():
            buffer.copy_(plain.get_buffer(name))
        for layer, other in zip(plain.model.layers, like.model.layers, strict=True):
            adapter = layer.self_attn.qkv_proj.v_proj_delayed
            adapter.lora_A["default"].weight.zero_()
            bias = adapter.scaling["default"] * adapter.lora_B["default"].bias
            other.self_attn.qkv_proj.v_proj_delayed.bias.copy_(bias)
    torch.testing.assert_close(logits(model), logits(like), atol=1e-5, rtol=0)


# --------------------------------------------------------------------------------------------------- saving, loading
def test_adapter_round_trip(tmp_path: Path) -> None:
    model = adapted(a_model(), **lora_targets(tiny_config()))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(a_model(), tmp_path).eval()
    torch.testing.assert_close(logits(again), logits(model), atol=0, rtol=0)


def test_merged_model_loads_in_transformers_own_class(tmp_path: Path) -> None:
    base = a_model()
    for layer in base.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1.0  # transformers' own class sets it so
    model = adapted(base, **lora_targets(base))
    expected = logits(model)
    model.merge_and_unload().save_pretrained(tmp_path)
    torch.testing.assert_close(logits(StockZaya.from_pretrained(tmp_path)), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(ZayaForCausalLM.from_pretrained(tmp_path)), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("whole", [["lm_head"], ["lm_head", "embed_tokens"]], ids=" ".join)
def test_head_and_embedding_can_be_trained_whole(whole: list[str], tmp_path: Path) -> None:
    """A tied weight is then two: the copy that is trained shows in the logits, in the merged model and in its files."""
    base = a_model()
    model = adapted(base, **lora_targets(base), modules_to_save=whole)
    before = logits(model)
    model(input_ids=IDS, labels=IDS).loss.backward()
    copies = {n: p for n, p in model.named_parameters() if "modules_to_save" in n and p.requires_grad}
    assert len(copies) == len(whole)
    with torch.no_grad():
        for parameter in copies.values():
            assert parameter.grad is not None
            assert largest(parameter.grad) > 0
            parameter.add_(parameter.grad.sign(), alpha=0.05)
    trained = logits(model)
    assert largest(trained - before) > 1e-2
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), trained, atol=1e-5, rtol=0)
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(ZayaForCausalLM.from_pretrained(tmp_path)), trained, atol=1e-5, rtol=0)


def test_convolutions_and_temperature_can_be_trained_whole() -> None:
    names = ["conv_qk_depthwise", "conv_qk_grouped", "qk_norm"]
    model = adapted(a_model(), **lora_targets(tiny_config()), modules_to_save=names)
    model(input_ids=IDS, labels=IDS).loss.backward()
    copies = {n: p for n, p in model.named_parameters() if "modules_to_save" in n and p.requires_grad}
    assert len(copies) == 4 * 5
    for name, parameter in copies.items():
        assert parameter.grad is not None, name
        assert largest(parameter.grad) > 0, name


def test_single_words_can_be_trained() -> None:
    base = a_model()
    before = logits(base)
    model = adapted(base, **lora_targets(base), trainable_token_indices=[5, 6])
    model(input_ids=IDS.clone().fill_diagonal_(5), labels=IDS).loss.backward()
    words = [p for n, p in model.named_parameters() if "trainable_tokens_delta" in n and p.requires_grad]
    assert words
    assert all(p.grad is not None and largest(p.grad) > 0 for p in words)
    assert largest(logits(model) - before) > 0.1


# ---------------------------------------------------------------------------------------------- fusing and compiling
def test_adapters_end_fusing_and_packed_weights() -> None:
    """PEFT merges through .data, which no packed copy of a weight would notice."""
    base = a_model()
    base.fuse_for_inference(pack_weights=True)
    logits(base)
    model = adapted(base, **lora_targets(base))
    assert not base.is_fused
    assert not any(getattr(m, n, None) for m in base.modules() for n in ("packed_weight", "packed_experts"))
    with_adapter = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), with_adapter, atol=1e-5, rtol=0)
    merged.fuse_for_inference(pack_weights=True)
    torch.testing.assert_close(logits(merged), with_adapter, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [{"attention": False}, {"experts": False}], ids=["experts", "attention"])
def test_fusing_is_refused_with_adapters(parts: dict[str, Any]) -> None:
    base = a_model()
    model = adapted(base, **lora_targets(base, **parts))
    with pytest.raises(ValueError, match="has an adapter; merge and unload it first"):
        base.fuse_for_inference()
    model.merge_and_unload().fuse_for_inference()


GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("targets", [{"target_modules": ["o_proj"]}, lora_targets(tiny_config(), attention=False)])
def test_generation_with_adapters_on_a_compiled_model(targets: dict[str, Any]) -> None:
    base = a_model(num_hidden_layers=1)
    base.compile_decoding(backend="eager")
    model = adapted(base, **targets)
    if "target_parameters" in targets:
        with pytest.raises(ValueError, match="has an adapter of parameters; merge and unload it first"):
            base.compile_decoding(backend="eager")
    else:
        assert base.model.compiled_decoding is not None
    with torch.no_grad():
        got = model.generate(input_ids=IDS[:1], **GREEDY)
        base.uncompile_decoding()
        expected = IDS[:1]
        for _ in range(4):
            expected = torch.cat([expected, logits(model, expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(got, expected)


# ------------------------------------------------------------------------------------------------------ other methods
def test_prompt_tuning_trains_and_generates() -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(a_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ones = torch.ones_like(IDS)
    model(input_ids=IDS, attention_mask=ones, labels=IDS).loss.backward()
    (prompt,) = (p for p in model.parameters() if p.requires_grad)
    assert prompt.grad is not None
    assert largest(prompt.grad) > 0
    got = model.generate(input_ids=IDS, attention_mask=ones, **GREEDY)
    expected = IDS
    with torch.no_grad():
        for _ in range(4):
            step = model(input_ids=expected, attention_mask=torch.ones_like(expected)).logits
            expected = torch.cat([expected, step[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(got, expected)


def test_prefix_tuning_is_refused() -> None:
    """It writes keys and values into a cache, and knows no convolution states that would belong to them."""
    model = peft.get_peft_model(a_model(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    for call in (model, model.generate):
        with pytest.raises(ValueError, match=r"prefix tuning.*no convolution states that would belong") as error:
            call(input_ids=IDS, attention_mask=torch.ones_like(IDS))
        assert "\n" not in str(error.value)


def test_adapters_of_convolution_weights_are_refused() -> None:
    model = adapted(a_model(), target_modules=[], target_parameters=["conv_qk_grouped.weight"])
    with pytest.raises(ValueError, match="around a convolution of CCA"):
        logits(model)


def test_same_adapters_in_transformers_own_class() -> None:
    """One adapter file serves both classes: names and shapes are the same."""
    base = a_model()
    stock = redraw(StockZaya(ZayaConfig(**TINY)))
    shapes = []
    for model in (base, stock):
        tuned = adapted(model, **lora_targets(model))  # type: ignore[arg-type]
        shapes.append({n: tuple(p.shape) for n, p in tuned.named_parameters() if "lora_" in n})
    assert shapes[0] == shapes[1]


def test_recipe_needs_neither_peft_nor_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft", "accelerate"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # an import of it fails
    for name in ("zaya_hf.training", "zaya_hf.training.lora"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(zaya_hf, "training", zaya_hf.training)  # what the import is about to set is taken back, too
    again = importlib.import_module("zaya_hf.training")
    assert set(again.lora_targets(tiny_config())["target_modules"]) == ATTENTION
