"""Quantising while loading: every linear layer is offered to the quantiser, and what it leaves is said.

A small quantiser of our own runs everywhere; those of bitsandbytes, torchao and quanto where they are installed.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig
from transformers.quantizers import HfQuantizer
from transformers.quantizers import auto as quantiser_tables
from transformers.utils.quantization_config import QuantizationConfigMixin

from original_checkpoints import original_config, original_tensors, write_checkpoint
from saved_models import differing, tiny_model
from zaya_hf import ZayaForCausalLM, ZayaForSequenceClassification
from zaya_hf.modeling_zaya import ZayaLinear
from zaya_hf.quantised_loading import plain_weights, settle_quantised
from zaya_hf.testing import random_ids

#: linear layers of one block that have to be offered: CCA's and the router's
LINEARS = {
    *(f"self_attn.qkv_proj.{name}" for name in ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")),
    "self_attn.o_proj",
    "mlp.gate.down_proj",
    *(f"mlp.gate.router_mlp.{name}" for name in ("fc1", "fc2", "out_proj")),
}
SAID = re.compile(
    r": (\S+) has quantised (\d+)% of the weights\. (\d+)% are as they were, (\d+)% in the experts, which"
)


class Int8Linear(nn.Module):
    """Weights rounded to 255 levels per row."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.scale = nn.Buffer(layer.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.quantised = nn.Buffer((layer.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantised.to(self.scale.dtype) * self.scale, self.bias)


class RowsConfig(QuantizationConfigMixin):
    def __init__(self, experts: bool = False, **kwargs: Any):
        self.quant_method = "rows"
        self.experts = experts


class RowsQuantiser(HfQuantizer):
    """Replaces what is exactly `nn.Linear`, as bitsandbytes does; with `experts`, replaces those too."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        pass

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and name != "lm_head":
                model.set_submodule(name, Int8Linear(module))
            if self.quantization_config.experts and name.endswith(".experts"):
                model.set_submodule(name, SumOfNothing())
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class SumOfNothing(nn.Module):
    """Stands for a class of experts that knows nothing of our implementations."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


@pytest.fixture
def rows() -> Iterator[type[RowsConfig]]:
    quantiser_tables.AUTO_QUANTIZER_MAPPING["rows"] = RowsQuantiser
    quantiser_tables.AUTO_QUANTIZATION_CONFIG_MAPPING["rows"] = RowsConfig
    yield RowsConfig
    del quantiser_tables.AUTO_QUANTIZER_MAPPING["rows"], quantiser_tables.AUTO_QUANTIZATION_CONFIG_MAPPING["rows"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transformers' own zaya class.*")
        yield


@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    # heads of 32, since bitsandbytes on a CPU takes 32 rows at a time
    return tiny_model(num_hidden_layers=2, skip_expert="identity", head_dim=32, hidden_size=128)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("folders")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(place / "combined")
    write_checkpoint(place / "original", original_tensors(model), original_config(model.config), shards=2)
    return {path.name: path for path in place.iterdir()}


def shares(model: ZayaForCausalLM, left: str = "lm_head") -> tuple[int, int, int]:
    """Per cent of the values in linear layers of the blocks, in the rest, and in the experts."""
    total = sum(p.numel() for p in model.parameters())
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head" and left not in n]
    linear = sum(layer.weight.numel() for _, layer in layers)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    return round(100 * linear / total), round(100 * (total - linear) / total), round(100 * experts / total)


def load(folder: Path, config: Any, cls: Any = ZayaForCausalLM, **options: Any) -> tuple[Any, list[str]]:
    """The model, and what was said of the shares."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = cls.from_pretrained(folder, quantization_config=config, dtype=torch.float32, **options)
    return loaded, [str(w.message) for w in caught if SAID.search(str(w.message))]


# -------------------------------------------------------------------------------------------------- without any package
@pytest.mark.parametrize("cls", [ZayaForCausalLM, AutoModelForCausalLM], ids=["own", "auto"])
@pytest.mark.parametrize("layout", ["combined", "original"])
def test_every_linear_layer_is_offered_and_the_rest_is_counted(folders, model, rows, layout, cls):
    loaded, said = load(folders[layout], rows(), cls)
    replaced = {name for name, module in loaded.named_modules() if isinstance(module, Int8Linear)}
    assert replaced == {f"model.layers.{index}.{name}" for index in range(2) for name in LINEARS}
    [line] = said
    assert "\n" not in line
    assert line.startswith(str(folders[layout]))
    method, *percent = SAID.search(line).groups()
    assert (method, tuple(map(int, percent))) == ("rows", shares(model))
    # what is left is the file's, and the model computes with what was rounded
    for index in range(2):
        theirs, ours = model.model.layers[index], loaded.model.layers[index]
        assert torch.equal(ours.mlp.experts.gate_up_proj, theirs.mlp.experts.gate_up_proj)
        assert torch.equal(ours.mlp.gate.balancing_biases, theirs.mlp.gate.balancing_biases)
    difference = (loaded(random_ids(1, 9)).logits - model(random_ids(1, 9)).logits).abs()
    assert 0 < float(difference.mean().detach()) < 0.5


def test_a_model_that_is_not_quantised_says_nothing_and_keeps_its_layers(folders, model):
    loaded, said = load(folders["combined"], None)
    assert said == []
    assert type(loaded.model.layers[0].self_attn.o_proj) is ZayaLinear
    assert differing(loaded, model) == []


def test_experts_of_another_class_run(folders, rows):
    """Our own choice of an implementation is none of theirs."""
    loaded, said = load(folders["combined"], rows(experts=True))
    assert said == []
    assert loaded.config._experts_implementation == "eager"
    assert loaded(random_ids(1, 4)).logits.isfinite().all()
    asked, _ = load(folders["combined"], rows(experts=True), experts_implementation="grouped_mm")
    assert asked.config._experts_implementation == "grouped_mm"


def test_transformers_fp8_experts_know_the_slot_of_no_expert(model):
    """They replace ours when quantising to FP8, which takes a GPU; that they fit is checked here."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    experts = FP8Experts(model.config, block_size=(16, 16))
    assert experts.gate_up_proj.shape == model.model.layers[0].mlp.experts.gate_up_proj.shape
    assert experts.down_proj.shape == model.model.layers[0].mlp.experts.down_proj.shape
    nobody = torch.full((3, 1), model.config.num_experts)
    assert not experts(torch.randn(3, 128), nobody, torch.ones(3, 1)).any()


def test_the_original_layout_leaves_no_copy_behind(folders, rows, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    load(folders["original"], rows())
    assert not list(tmp_path.iterdir())


def test_a_quantised_task_head(folders, rows):
    with pytest.warns(UserWarning, match="newly initialised"):
        loaded = ZayaForSequenceClassification.from_pretrained(folders["combined"], quantization_config=rows())
    assert loaded(random_ids(2, 4)).logits.shape == (2, 2)


def test_what_counts_as_plain():
    layers = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    layers["b"].weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    layers["c"].weight = nn.Parameter(torch.zeros(1, 2), requires_grad=False)  # packed
    assert plain_weights(layers, {f"{name}.weight": 4 for name in "abcd"}) == {"a.weight"}


def test_nothing_is_said_of_a_model_without_a_method(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settle_quantised(model, ZayaForCausalLM, (), "somewhere")


# ---------------------------------------------------------------------------------------------------- with the packages
def bitsandbytes4() -> Any:
    pytest.importorskip("bitsandbytes")
    # its CPU kernel takes no layer of 5 rows (17 in the published models), and a router is small and worth its bits
    return BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", ".*mlp.gate"])


def bitsandbytes8() -> Any:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=True)


def quanto8() -> Any:
    pytest.importorskip("optimum.quanto")
    return QuantoConfig(weights="int8")


def torchao8() -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


METHODS = {
    "bitsandbytes4": bitsandbytes4,
    "bitsandbytes8": bitsandbytes8,
    "quanto8": quanto8,
    "torchao8": torchao8,
}


@pytest.mark.parametrize("layout", ["combined", "original"])
@pytest.mark.parametrize("method", METHODS)
def test_real_methods(folders, model, layout, method):
    loaded, said = load(folders[layout], METHODS[method]())
    [line] = said
    percent = tuple(map(int, SAID.search(line).groups()[1:]))
    left = "mlp.gate" if method == "bitsandbytes4" else "lm_head"
    assert percent == shares(model, left)
    for index in range(2):
        theirs, ours = model.model.layers[index], loaded.model.layers[index]
        for name in (name for name in LINEARS if left not in name):
            weight = ours.get_submodule(name).weight
            assert type(weight) is not nn.Parameter or not weight.is_floating_point()
        assert torch.equal(ours.mlp.gate.balancing_biases, theirs.mlp.gate.balancing_biases)
    with torch.no_grad():
        difference = (loaded(random_ids(1, 9)).logits - model(random_ids(1, 9)).logits).abs()
    assert 0 < float(difference.mean()) < (1.5 if method == "bitsandbytes4" else 0.2)
    assert loaded.generate(random_ids(1, 4), max_new_tokens=3, do_sample=False).shape == (1, 7)
    with pytest.raises(ValueError, match="quantised layers cannot be fused"):
        loaded.fuse_for_inference()


@pytest.mark.parametrize("method", ["bitsandbytes4", "bitsandbytes8", "torchao8"])
def test_saved_and_loaded_again(tmp_path, folders, method):
    loaded, _ = load(folders["combined"], METHODS[method]())
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    again, said = load(tmp_path, None)
    assert len(said) == 1
    with torch.no_grad():
        torch.testing.assert_close(again(random_ids(1, 9)).logits, loaded(random_ids(1, 9)).logits, atol=1e-5, rtol=0)
