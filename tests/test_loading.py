"""Loading the combined layout: what must fit, what is refused, and that nothing changes a value."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
import transformers.models.zaya.modeling_zaya as stock_zaya
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.zaya.configuration_zaya import ZayaConfig as StockConfig

from original_checkpoints import original_config, original_tensors, write_checkpoint
from saved_models import differing, edit_config, files, tiny_model
from zaya_hf import ZayaConfig, ZayaForCausalLM, ZayaModel, ZayaPreTrainedModel
from zaya_hf.testing import random_ids, redraw, tiny_config
from zaya_hf.weight_files import LazyStack


@pytest.fixture(autouse=True)
def _no_stock_warning():
    """Redrawn models have trained skip biases, so each save would warn; tests of the warning ask for it themselves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transformers' own zaya class.*")
        yield


def logits(model, ids=None):
    with torch.no_grad():
        return model(random_ids(2, 12) if ids is None else ids).logits


def assert_same_logits(one, other):
    """Equal to rounding: tensors in a mapped file lie at other addresses, and kernels differ by alignment."""
    torch.testing.assert_close(logits(one), logits(other), atol=1e-5, rtol=1e-5)


def edit(folder, change, file="model.safetensors"):
    """Rewrite a weight file: `change` gets the dict of tensors."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path, tied, max_shard_size):
    model = tiny_model(tie_word_embeddings=tied, clamp_temp=True, residual_in_fp32=False, router_norm_eps=1e-6)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) == 1 if max_shard_size == "5GB" else len(shards) > 10
    stored = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert ("lm_head.weight" in stored) is not tied
    loaded, info = ZayaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert differing(loaded, model) == []
    assert_same_logits(loaded, model)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert (loaded.config.clamp_temp, loaded.config.residual_in_fp32, loaded.config.router_norm_eps) == (
        True,
        False,
        1e-6,
    )


def test_auto_class_and_native_config(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is ZayaForCausalLM
    native = StockConfig.from_pretrained(tmp_path)
    loaded = ZayaForCausalLM.from_pretrained(tmp_path, config=native)
    assert type(loaded.config) is ZayaConfig
    assert differing(loaded, model) == []
    assert type(native) is StockConfig


@pytest.mark.parametrize("width", [(1, 1), (1, 2), (3, 4)])
def test_saved_folder_loads_in_transformers_own_class(tmp_path, width):
    model = tiny_model(
        cca_time0=width[0],
        cca_time1=width[1],
        layer_types=["hybrid", "hybrid_sliding"] * 2,
        sliding_window=4,
        tie_word_embeddings=False,
    )
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1.0  # transformers resets it to this
    assert model.stock_differences() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path, max_shard_size="100KB")
    stock, info = stock_zaya.ZayaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert differing(stock.eval(), model) == []
    assert_same_logits(stock, model)


def test_folder_of_transformers_own_class_loads(tmp_path):
    stock = redraw(stock_zaya.ZayaForCausalLM(StockConfig(**tiny_config().to_dict())), 2)
    stock.save_pretrained(tmp_path)
    loaded = ZayaForCausalLM.from_pretrained(tmp_path)
    assert differing(loaded, stock) == []
    assert_same_logits(loaded, stock.eval())


def test_implementations_and_overrides_reach_the_model(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    loaded = ZayaForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="batched_mm", rms_norm_eps=1e-3, use_cache=False
    )
    config = loaded.config
    assert (config._attn_implementation, config._experts_implementation) == ("eager", "batched_mm")
    assert (config.rms_norm_eps, config.use_cache) == (1e-3, False)
    with pytest.raises(ValueError, match="rms_norm_eps=-1"):
        ZayaForCausalLM.from_pretrained(tmp_path, rms_norm_eps=-1)


def test_dtype_of_a_folder_that_states_none(tmp_path):
    """fp32 balancing biases come first in a bf16 file, and do not decide."""
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype=None)
    assert next(iter(load_file(tmp_path / "model.safetensors").values())).dtype == torch.float32
    assert ZayaForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_hub_cache_with_revision_and_subfolder(tmp_path):
    """A repository in the Hub's cache, as it is after a download: no network, both names of the revision."""
    model, commit = tiny_model(), "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--someone--tiny-zaya"
    model.save_pretrained(repository / "snapshots" / commit / "inner", max_shard_size="100KB")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for revision in ({}, {"revision": "main"}, {"revision": commit}):
        loaded = ZayaForCausalLM.from_pretrained(
            "someone/tiny-zaya", cache_dir=tmp_path, local_files_only=True, subfolder="inner", **revision
        )
        assert differing(loaded, model) == []
        assert loaded.config.name_or_path == "someone/tiny-zaya"
    next((repository / "snapshots" / commit / "inner").glob("model-00002*")).unlink()
    with pytest.raises(OSError, match="model-00002-of"):
        ZayaForCausalLM.from_pretrained(
            "someone/tiny-zaya", cache_dir=tmp_path, local_files_only=True, subfolder="inner"
        )


def test_base_and_causal_classes_read_each_other(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "causal")
    base, info = ZayaModel.from_pretrained(tmp_path / "causal", output_loading_info=True)
    assert differing(base, model.model) == []
    assert set(info["unexpected_keys"]) == {"lm_head.weight"}
    tied = tiny_model()
    tied.model.save_pretrained(tmp_path / "base")
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "base" / "model.safetensors"))
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path / "base"), tied) == []
    # Without ties the head is a new one there, like that of any task.
    base.save_pretrained(tmp_path / "untied")
    with pytest.warns(UserWarning, match=r"no weights for lm_head\.weight"):
        ZayaForCausalLM.from_pretrained(tmp_path / "untied")


class ZayaForScoring(ZayaPreTrainedModel):
    """A task class: the backbone with a head that no published file has."""

    def __init__(self, config):
        super().__init__(config)
        self.model = ZayaModel(config)
        self.score = nn.Linear(config.hidden_size, 3)
        self.post_init()


def test_new_task_head_is_warned_about_and_reloads(tmp_path):
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "causal")
    with pytest.warns(UserWarning, match=r"no weights for score\.weight, score\.bias: newly initialised"):
        scorer = ZayaForScoring.from_pretrained(tmp_path / "causal")
    assert differing(scorer.model, model.model) == []
    assert scorer.score.weight.std() > 0
    scorer.save_pretrained(tmp_path / "scorer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert differing(ZayaForScoring.from_pretrained(tmp_path / "scorer"), scorer) == []
    assert differing(ZayaModel.from_pretrained(tmp_path / "scorer"), model.model) == []


def test_state_dict_instead_of_a_folder():
    model = tiny_model()
    loaded = ZayaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert differing(loaded, model) == []
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight"):
        ZayaForCausalLM.from_pretrained(
            None,
            config=model.config,
            state_dict={name: value for name, value in model.state_dict().items() if name != "model.norm.weight"},
        )


# --- no value changes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "auto", None])
def test_loading_changes_no_value(tmp_path, dtype, stored):
    model = tiny_model().to(stored)
    biases = torch.tensor([8.0, 8.003, 8.006, 8.009, 0.5])
    model.model.layers[1].mlp.gate.balancing_biases.copy_(biases)
    model.save_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    loaded = ZayaForCausalLM.from_pretrained(tmp_path, **({} if dtype is None else {"dtype": dtype}))
    expected = stored if dtype in ("auto", None) else dtype
    assert {value.dtype for value in loaded.parameters()} == {expected}
    for name, value in loaded.state_dict().items():
        if name != "lm_head.weight":
            want = torch.float32 if name.endswith("balancing_biases") else expected
            assert value.dtype == want
            assert torch.equal(value, on_disk[name].to(want)), name
    kept = loaded.model.layers[1].mlp.gate.balancing_biases
    assert torch.equal(kept, biases)
    for _ in range(100):
        kept += 1e-3
    torch.testing.assert_close(kept, biases + 0.1, atol=1e-4, rtol=0)


def test_bf16_biases_in_a_file_are_widened_exactly(tmp_path):
    """The published files store them in bf16."""
    tiny_model().save_pretrained(tmp_path)

    def narrow(tensors):
        for name in [name for name in tensors if name.endswith("balancing_biases")]:
            tensors[name] = tensors[name].to(torch.bfloat16)

    edit(tmp_path, narrow)
    on_disk = load_file(tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.bfloat16):
        loaded = ZayaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        for index, layer in enumerate(loaded.model.layers):
            biases = layer.mlp.gate.balancing_biases
            assert biases.dtype == torch.float32
            assert torch.equal(biases, on_disk[f"model.layers.{index}.mlp.gate.balancing_biases"].float())


def test_neither_post_init_nor_resizing_nor_checkpointing_changes_a_value(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    on_disk = load_file(tmp_path / "model.safetensors")
    loaded = ZayaForCausalLM.from_pretrained(tmp_path)

    def changed():
        rows = on_disk["model.embed_tokens.weight"].shape[0]
        return [
            name
            for name, value in loaded.state_dict().items()
            if name != "lm_head.weight" and not torch.equal(value[:rows] if "embed" in name else value, on_disk[name])
        ]

    loaded.post_init()
    loaded.init_weights()
    assert changed() == []
    loaded.gradient_checkpointing_enable()
    assert changed() == []
    loaded.resize_token_embeddings(140)
    assert changed() == []
    assert loaded.lm_head.weight.shape == (140, 64)
    loaded.save_pretrained(tmp_path / "wider")
    again = ZayaForCausalLM.from_pretrained(tmp_path / "wider")
    assert (again.config.vocab_size, differing(again, loaded)) == (140, [])


def test_tensors_that_the_file_lacks_never_come_from_old_memory(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    for _ in range(8):
        block = torch.full((1 << 20,), torch.nan)
        del block
    loaded = ZayaForCausalLM.from_pretrained(tmp_path)
    assert_same_logits(loaded, model)
    frequencies = loaded.model.rotary.frequencies("hybrid", torch.device("cpu"))
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, torch.tensor([1, 0.021147, 4.4721e-4, 9.4574e-6]), rtol=1e-4, atol=0)
    with torch.device("meta"):
        empty = ZayaForCausalLM(model.config)
    empty = empty.to_empty(device="cpu").eval()
    empty.load_state_dict(model.state_dict())
    empty.tie_weights()
    assert differing(empty, model) == []
    assert_same_logits(empty, model)


def test_device_map_with_disk_offload(tmp_path):
    pytest.importorskip("accelerate")
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    device_map = dict.fromkeys(("model.embed_tokens", "lm_head", "model.norm"), "cpu")
    device_map |= {f"model.layers.{index}": "cpu" for index in (1, 2, 3)}
    device_map |= {f"model.layers.0.{name}": "cpu" for name, _ in model.model.layers[0].named_children()}
    device_map |= {"model.input_hidden_states_scale": "cpu", "model.input_hidden_states_bias": "cpu"}
    device_map["model.layers.0.mlp"] = "disk"
    loaded = ZayaForCausalLM.from_pretrained(
        tmp_path, device_map=device_map, offload_folder=tmp_path / "offload", offload_buffers=True
    )
    assert_same_logits(loaded, model)


# --- files that do not fit --------------------------------------------------------------------------------------------


def load_error(folder, cls=ZayaForCausalLM, error=ValueError, **kwargs):
    """The one line with which loading a folder fails."""
    with pytest.raises(error) as caught:
        cls.from_pretrained(folder, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_and_unexpected_tensors_are_named_and_counted(tmp_path):
    tiny_model().save_pretrained(tmp_path)

    def damage(tensors):
        del tensors["model.layers.2.self_attn.qk_norm.temp"]
        tensors["model.layers.2.self_attn.qk_norm.temperature"] = torch.ones(2)

    edit(tmp_path, damage)
    message = load_error(tmp_path)
    assert "missing: model.layers.2.self_attn.qk_norm.temp;" in message
    assert "unexpected: model.layers.2.self_attn.qk_norm.temperature" in message
    assert "missing: layers.2.self_attn.qk_norm.temp;" in load_error(tmp_path, ZayaModel)

    def damage_more(tensors):
        for name in [name for name in tensors if ".layers.3." in name]:
            del tensors[name]

    edit(tmp_path, damage_more)
    assert "(33 in all)" in load_error(tmp_path)  # 32 tensors of a block and the temperature


def test_wrong_shapes_are_named(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, num_experts=6)
    message = load_error(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj [4, 64, 64] where [6, 64, 64] is expected" in message
    assert "(16 in all)" in message
    edit_config(tmp_path, num_experts=4)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    assert "model.norm.weight [3] where [64] is expected" in load_error(tmp_path)
    loaded = ZayaForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert differing(loaded, model) == ["model.norm.weight"]


def test_a_tie_flag_that_contradicts_the_file_is_reported(tmp_path):
    untied = tiny_model(tie_word_embeddings=False)
    untied.save_pretrained(tmp_path / "untied")
    edit_config(tmp_path / "untied", tie_word_embeddings=True)
    assert "tie_word_embeddings=true, but lm_head.weight is not the embedding" in load_error(tmp_path / "untied")
    tied = tiny_model()
    tied.save_pretrained(tmp_path / "tied")
    edit_config(tmp_path / "tied", tie_word_embeddings=False)
    assert "tie_word_embeddings=false, but there is no lm_head.weight" in load_error(tmp_path / "tied")
    # A head that is a copy of the embedding contradicts nothing, and stays tied.
    edit_config(tmp_path / "tied", tie_word_embeddings=True)
    edit(tmp_path / "tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    loaded = ZayaForCausalLM.from_pretrained(tmp_path / "tied")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert differing(loaded, tied) == []


def test_missing_shard_and_broken_files_are_named(tmp_path):
    tiny_model().save_pretrained(tmp_path, max_shard_size="40KB")
    shard = files(tmp_path)[4]
    data = (tmp_path / shard).read_bytes()
    (tmp_path / shard).unlink()
    assert f"shard {shard} is missing" in load_error(tmp_path, error=FileNotFoundError)
    (tmp_path / shard).write_bytes(data[: len(data) // 2])
    assert f"{shard} is not a whole safetensors file" in load_error(tmp_path)
    other = files(tmp_path)[5]
    shutil.copy(tmp_path / other, tmp_path / shard)
    assert "is in two shards" in load_error(tmp_path)
    (tmp_path / shard).write_bytes(data)
    edit(tmp_path, lambda tensors: tensors.update({"stray": tensors.pop(next(iter(tensors)))}), shard)
    assert "though the index of" in load_error(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "is not a safetensors index" in load_error(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "not a plain file name" in load_error(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors nor" in load_error(tmp_path, error=FileNotFoundError)


def test_other_formats_are_refused_with_the_way_out(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    assert "GGUF" in load_error(tmp_path, gguf_file="x.gguf")
    assert "safetensors" in load_error(tmp_path, use_safetensors=False)
    assert "is a file; give the folder" in load_error(weights, config=model.config)
    weights.rename(tmp_path / "weights.gguf")
    assert "GGUF files only; load the safetensors" in load_error(tmp_path)
    (tmp_path / "weights.gguf").rename(tmp_path / "pytorch_model.bin")
    assert "pickled weights only" in load_error(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert "has no weights" in load_error(tmp_path, error=FileNotFoundError)
    packed = {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(4, 8, dtype=torch.uint8)}
    save_file(tensors | packed, weights, metadata={"format": "pt"})
    assert "quantised (tensor model.layers.0.mlp.experts.gate_up_proj_blocks" in load_error(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert "quantization_config: mxfp4); load the unquantised checkpoint" in load_error(tmp_path)
    edit_config(tmp_path, model_type="zaya1_vl")
    assert "vision-language" in load_error(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in load_error(tmp_path, error=FileNotFoundError)
    assert "there is no folder" in load_error(tmp_path / "nowhere", error=FileNotFoundError)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"', "", "{", "{]"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_a_file_that_holds_no_json_object_is_named(tmp_path, file, text):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / file).write_text(text)
    message = load_error(tmp_path)
    assert message.startswith(f"{tmp_path / file} is not a ")
    assert "it must hold a JSON object, not" in message or "it is no whole JSON file" in message


@pytest.mark.parametrize("weight_map", [[], None, {}, "x", 3, {"a": 3}, {"a": None}, {"a": ["b"]}])
def test_a_weight_map_of_a_wrong_type_is_named(tmp_path, weight_map):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path, max_shard_size="40KB")
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))
    assert load_error(tmp_path).startswith(f"{file} is not a safetensors index: weight_map must be an object like")


def test_broken_generation_settings_of_the_original_layout_are_named(tmp_path):
    model = tiny_model(num_hidden_layers=1)
    write_checkpoint(tmp_path, original_tensors(model), original_config(model.config), generation={"top_k": 7})
    assert ZayaForCausalLM.from_pretrained(tmp_path).generation_config.top_k == 7
    (tmp_path / "generation_config.json").write_text('{"top_k": 7')
    assert "generation_config.json is not a generation config" in load_error(tmp_path)
    # Neither is read where settings are given, or by a class that does not generate.
    ZayaForCausalLM.from_pretrained(tmp_path, generation_config=model.generation_config)
    ZayaModel.from_pretrained(tmp_path)


def test_an_error_in_the_config_names_its_file(tmp_path):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    for changes, message in (
        ({"dtype": [1]}, "ZayaConfig: dtype=[1] is wrong: it must be the name of a floating torch dtype"),
        ({"num_experts": "4"}, "ZayaConfig: num_experts='4'"),
        ({"output_hidden_states": "4"}, "ZayaConfig: output_hidden_states='4' is wrong: it must be true or false"),
    ):
        kept = (tmp_path / "config.json").read_text()
        edit_config(tmp_path, **changes)
        assert load_error(tmp_path).startswith(f"{tmp_path / 'config.json'}: {message}")
        (tmp_path / "config.json").write_text(kept)


def test_a_config_argument_that_is_no_place_is_refused(tmp_path):
    tiny_model(num_hidden_layers=1).save_pretrained(tmp_path)
    for config in (5, 1.5, True, [], {}, b"x"):
        message = load_error(tmp_path, error=TypeError, config=config)
        assert message == f"config={config!r}: give a ZayaConfig, or the folder or Hub id of one"
    assert "config: there is no folder 'nofolder', and as a Hub id" in load_error(
        tmp_path, error=OSError, config="nofolder"
    )
    assert "there is no folder 'nofolder', and as a Hub id" in load_error("nofolder", error=OSError)


def test_an_adapter_config_of_a_wrong_type_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("zaya_hf.loading_source.is_peft_available", lambda: True)
    for text in ("[]", '{"base_model_name_or_path": 3}', "{}"):
        (tmp_path / "adapter_config.json").write_text(text)
        assert load_error(tmp_path).startswith(str(tmp_path / "adapter_config.json"))


def test_auto_classes_read_the_original_layout(tmp_path):
    model = tiny_model(num_hidden_layers=2)
    for dialect in ("A", "B"):
        folder = tmp_path / dialect
        changes = {} if dialect == "B" else {"layernorm_epsilon": model.config.rms_norm_eps}
        write_checkpoint(folder, original_tensors(model, dialect), original_config(model.config, dialect, **changes))
        config = AutoConfig.from_pretrained(folder)
        assert (type(config), config.num_hidden_layers, config.head_dim) == (ZayaConfig, 2, 16)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert type(loaded) is ZayaForCausalLM
        assert differing(loaded, model) == []
        assert_same_logits(loaded, ZayaForCausalLM.from_pretrained(folder))
    # The Auto classes ask for the type before anything of ours runs; our class reads the folder.
    write_checkpoint(tmp_path / "C", original_tensors(model, "C"), original_config(model.config, "C"))
    with pytest.raises(ValueError, match="smoe"):
        AutoConfig.from_pretrained(tmp_path / "C")
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path / "C"), model) == []


def test_an_adapter_is_checked_by_its_base(tmp_path, monkeypatch):
    monkeypatch.setattr("zaya_hf.loading_source.is_peft_available", lambda: True)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = tiny_model()
    model.save_pretrained(base)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    edit(base, lambda tensors: tensors.pop("model.norm.weight"))
    assert f"{base}: tensors do not fit the config: missing: model.norm.weight" in load_error(adapter)


# --- what transformers would compute differently ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "switch"),
    [
        ({"clamp_temp": True}, "clamp_temp"),
        ({"residual_in_fp32": False}, "residual_in_fp32=False"),
        ({"router_norm_eps": 1e-2}, "router_norm_eps=0.01"),
        ({"fp32_logits": True}, "fp32_logits"),
        ({"skip_expert": "identity"}, 'skip_expert="identity"'),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["hybrid_sliding"] * 4, "sliding_window": 1}, "sliding_window=1"),
    ],
)
def test_each_switch_is_reported_once(changes, switch):
    model = ZayaForCausalLM(tiny_config(**changes))
    assert [name for name, _ in model.stock_differences()] == [switch]
    assert [name for name, _ in model.model.stock_differences()] == [switch]


def test_a_trained_skip_bias_is_reported_and_warned_about_on_save(tmp_path):
    model = ZayaForCausalLM(tiny_config(router_norm_eps=1e-5))
    assert model.stock_differences() == []
    model.model.layers[2].mlp.gate.balancing_biases[-1] = 0.5
    ((switch, why),) = model.stock_differences()
    assert switch == "balancing_biases[-1]"
    assert "layers 2" in why
    with pytest.warns(UserWarning, match=r"transformers' own zaya class.*balancing_biases") as caught:
        model.save_pretrained(tmp_path)
    assert len([w for w in caught if "own zaya class" in str(w.message)]) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "again")  # said already
    stock = stock_zaya.ZayaForCausalLM.from_pretrained(tmp_path)
    assert stock.model.layers[2].mlp.gate.balancing_biases[-1] == -1.0, "the reason for the warning is gone"


@pytest.mark.parametrize("switch", ["clamp_temp", "router_norm_eps", "skip_expert", "attention_bias", "sliding_window"])
def test_the_reported_differences_are_real(tmp_path, switch):
    changes = {
        "clamp_temp": {"clamp_temp": True},
        "router_norm_eps": {"router_norm_eps": 0.1},
        "skip_expert": {"skip_expert": "identity"},
        "attention_bias": {"attention_bias": True},
        "sliding_window": {"layer_types": ["hybrid_sliding"] * 4, "sliding_window": 1},
    }[switch]
    model = tiny_model(**changes)
    for layer in model.model.layers:
        biases = layer.mlp.gate.balancing_biases
        if switch == "skip_expert":
            biases[:-1] -= 3.0  # only skipped tokens tell the two apart
        biases[-1] = -1.0
    model.save_pretrained(tmp_path)
    stock = stock_zaya.ZayaForCausalLM.from_pretrained(tmp_path).eval()
    ids = random_ids(1, 9)
    with torch.no_grad():
        if switch == "attention_bias":  # shows behind left padding only
            mask = (torch.arange(9)[None] >= 4).long()
            ours, theirs = (m(ids, attention_mask=mask).logits[:, 4:] for m in (model, stock))
        elif switch == "sliding_window":  # shows in decoding only
            theirs = stock(ids[:, 8:], cache=stock(ids[:, :8], use_cache=True).cache).logits
            ours = model(ids, use_cache=False).logits[:, 8:]
        else:
            ours, theirs = logits(model, ids), logits(stock, ids)
    assert (ours - theirs).abs().max() > 1e-3


# --- parts ------------------------------------------------------------------------------------------------------------


def test_lazy_stack_indexes_as_the_stacked_tensor():
    parts = [torch.randn(6, 5) for _ in range(4)]
    whole, lazy = torch.stack(parts), LazyStack(parts)
    assert lazy.get_shape() == [4, 6, 5]
    for index in (..., 2, slice(1, 3), (slice(0, 2), slice(1, 4)), (3, 1), (slice(None), slice(None), 2)):
        assert torch.equal(lazy[index], whole[index])
    assert torch.equal(lazy[..., 1:3], whole[..., 1:3])
    assert lazy[2:2].shape == (0, 6, 5)
