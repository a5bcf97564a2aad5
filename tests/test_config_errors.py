"""ZayaConfig: what it refuses (one line: field, value, what would be right), warns about, accepts and keeps."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.zaya.configuration_zaya import ZayaConfig as StockConfig

from zaya_hf import ZayaConfig
from zaya_hf.testing import tiny_config


def rope(**changes):
    """`rope_parameters` of a full-attention model, with changes."""
    return {"hybrid": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **changes}}


REFUSED = [
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"hidden_size": 0}, "hidden_size=0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
    ({"num_hidden_layers": -2}, "num_hidden_layers=-2"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    ({"num_key_value_heads": 3}, "num_attention_heads=4.*multiple of num_key_value_heads=3"),
    ({"head_dim": 0}, "head_dim=0"),
    ({"head_dim": -16}, "head_dim=-16"),
    ({"head_dim": 15}, "head_dim=15.*even"),
    ({"head_dim": 15, "num_key_value_heads": 1}, "head_dim=15.*the value is made of two halves"),
    ({"max_position_embeddings": 0}, "max_position_embeddings=0"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size=0"),
    ({"num_experts": 0}, "num_experts=0"),
    ({"num_experts": "4"}, "num_experts='4'.*expected int"),
    ({"num_experts_per_tok": 2}, "num_experts_per_tok=2"),
    ({"router_hidden_size": 0}, "router_hidden_size=0"),
    ({"cca_time0": 0}, "cca_time0=0"),
    ({"cca_time1": -1}, "cca_time1=-1"),
    ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"router_norm_eps": -1.0}, "router_norm_eps=-1.0"),
    ({"initializer_range": -0.1}, "initializer_range=-0.1"),
    ({"attention_dropout": 1.0}, "attention_dropout=1.0"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
    ({"hidden_act": "slu"}, "hidden_act='slu'.*'silu'"),
    ({"skip_expert": "none"}, "skip_expert='none'.*identity"),
    ({"pad_token_id": 128}, "pad_token_id=128.*vocab_size=128"),
    ({"layer_types": ["hybrid"] * 3}, "layer_types has 3: num_hidden_layers=4 needs 4 entries"),
    ({"layer_types": ["hybrid"] * 3 + ["full_attention"]}, r"layer_types\[3\]='full_attention'.*hybrid_sliding"),
    ({"layer_types": "hybrid"}, "layer_types='hybrid'.*list"),
    ({"layer_types": ["hybrid"] * 3 + ["hybrid_sliding"]}, "sliding_window=None.*hybrid_sliding"),
    ({"sliding_window": 0}, "sliding_window=0"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters=.*one dict per layer type.*hybrid"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters=.*one dict per layer type"),
    ({"rope_parameters": {}}, "rope_parameters=.*one dict per layer type"),
    ({"rope_parameters": {"hybrid_sliding": rope()["hybrid"]}}, r"rope_parameters\['hybrid'\]=None"),
    ({"rope_parameters": rope() | {"full_attention": {}}}, r"rope_parameters\['full_attention'\]"),
    ({"rope_parameters": rope() | {"rope_theta": 1e4}}, r"rope_parameters\['rope_theta'\]"),
    ({"rope_parameters": {"hybrid": {"rope_type": "default"}}}, r"rope_parameters\['hybrid'\]\['rope_theta'\]=None"),
    ({"rope_parameters": rope(rope_theta=0)}, r"\['rope_theta'\]=0"),
    ({"rope_parameters": rope(rope_theta="1e4")}, r"\['rope_theta'\]='1e4'"),
    ({"rope_parameters": rope(partial_rotary_factor=0)}, r"\['partial_rotary_factor'\]=0"),
    ({"rope_parameters": rope(partial_rotary_factor=1.5)}, r"\['partial_rotary_factor'\]=1.5"),
    ({"rope_parameters": rope(partial_rotary_factor=0.05)}, r"partial_rotary_factor'\]=0.05.*rotates 0 of head_dim=16"),
    ({"rope_parameters": rope(partial_rotary_factor=0.2)}, r"partial_rotary_factor'\]=0.2.*rotates 3 of head_dim=16"),
    ({"rope_parameters": rope(rope_type="dynamic", factor=2.0)}, r"\['rope_type'\]='dynamic'.*length"),
    ({"rope_parameters": rope(rope_type="longrope", factor=2.0)}, r"\['rope_type'\]='longrope'.*length"),
    ({"rope_parameters": rope(rope_type="spiral")}, r"\['rope_type'\]='spiral'.*yarn"),
    ({"rope_parameters": rope(rope_type="yarn")}, "rope_parameters.*factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters=.*one dict per layer type"),
    ({"rope_scaling": True}, "rope_scaling=True"),
    ({"rope_theta": 1e6}, "rope_theta=1000000.0.*rope_parameters"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25.*rope_parameters"),
    ({"dtype": "bf16"}, "dtype='bf16'.*bfloat16"),
    ({"torch_dtype": "half_precision"}, "torch_dtype='half_precision'"),
    ({"zaya_layers": ["a", 4]}, "zaya_layers=.*from_dict"),
    ({"ffn_hidden_size": 64}, "ffn_hidden_size=64.*from_dict"),
    ({"per_layer_config": {0: {"num_experts": 8}}}, "per_layer_config.*all blocks have one shape"),
    ({"to_dict": 3}, "to_dict=3.*used by the config class itself"),
    ({"attribute_map": None}, "attribute_map=None.*used by the config class itself"),
]

# Keys of any transformers config, each with values of a wrong kind; transformers itself checks none of them.
ANYTHING = [True, 4, 4.5, float("nan"), "four", [], [1], {"a": 1}]
RIGHT_KINDS = {
    "architectures": ([],),
    "attn_implementation": ("four",),
    "base_model_tp_plan": ({"a": 1},),
    "chunk_size_feed_forward": (4,),
    "dtype": (),
    "experts_implementation": ("four",),
    "id2label": (),
    "is_encoder_decoder": (True,),
    "label2id": ({"a": 1},),
    "name_or_path": ("four",),
    "num_labels": (4,),
    "output_attentions": (True,),
    "output_hidden_states": (True,),
    "per_layer_config": (),
    "problem_type": (),
    "quantization_config": ({"a": 1},),
    "return_dict": (True,),
    "tie_last_hidden_states": (True,),
    "torch_dtype": (),
    "transformers_version": ("four",),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_refused_with_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        tiny_config(**changes)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("ZayaConfig: ")


@pytest.mark.parametrize("key", RIGHT_KINDS)
def test_wrong_kinds_are_refused_with_one_line(key):
    for value in ANYTHING:
        if any(value is right or (type(value) is type(right) and value == right) for right in RIGHT_KINDS[key]):
            ZayaConfig(**{key: value})
            continue
        with pytest.raises(ValueError, match=rf"^ZayaConfig: {key}=.* is wrong: ") as caught:
            ZayaConfig(**{key: value})
        assert "\n" not in str(caught.value)
    ZayaConfig(**{key: None})


def test_every_field_of_any_config_has_a_checked_kind():
    """A transformers version with another common field must not let values of any type through."""
    assert {field.name for field in dataclasses.fields(PreTrainedConfig)} <= set(RIGHT_KINDS)


def test_labels_and_a_config_that_is_no_object():
    config = tiny_config(id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1}, num_labels=2)
    assert (config.num_labels, config.id2label) == (2, {0: "no", 1: "yes"})
    for id2label in ({"a": "no"}, {"0": 1}, {1.5: "no"}):
        with pytest.raises(ValueError, match=r"id2label=.*from numbers to names"):
            tiny_config(id2label=id2label)
    for given, kind in (([], "a list"), (None, "null"), (3, "3"), ("x", '"x"')):
        with pytest.raises(ValueError, match=f"ZayaConfig: a model config must be an object .dict., not {kind}"):
            ZayaConfig.from_dict(given)


def test_a_window_that_no_layer_uses_is_warned_about(tmp_path):
    with pytest.warns(UserWarning, match=r'sliding_window=4 does nothing: no entry of layer_types is "hyb') as caught:
        ZayaConfig(sliding_window=4)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ZayaConfig(sliding_window=None)
        tiny_config(layer_types=["hybrid"] * 3 + ["hybrid_sliding"], sliding_window=4).save_pretrained(
            tmp_path / "used"
        )
        ZayaConfig.from_pretrained(tmp_path / "used")
        tiny_config().save_pretrained(tmp_path / "null")
        assert '"sliding_window": null' in (tmp_path / "null" / "config.json").read_text()
        ZayaConfig.from_pretrained(tmp_path / "null")


def test_the_smallest_and_oddest_shapes_are_accepted():
    tiny_config(cca_time0=1, cca_time1=1, num_experts=1, num_key_value_heads=1, num_attention_heads=1)
    tiny_config(num_attention_heads=3, num_key_value_heads=3, head_dim=4, num_hidden_layers=1)
    tiny_config(layer_types=["hybrid_sliding"] * 4, sliding_window=1)
    tiny_config(rope_parameters=rope(partial_rotary_factor=1.0), rms_norm_eps=0)
    tiny_config(rope_parameters=rope(rope_type="linear", factor=2.0))
    config = tiny_config(rope_parameters=rope(rope_type="yarn", factor=2.0))
    assert config.rope_parameters["hybrid"]["original_max_position_embeddings"] == 512


def test_a_change_after_construction_is_checked_too(tmp_path):
    config = tiny_config()
    with pytest.raises(ValueError, match=r"ZayaConfig: num_experts='8'.*expected int"):
        config.num_experts = "8"
    config.num_experts = 0
    with pytest.raises(ValueError, match="num_experts=0"):
        config.validate()
    with pytest.raises(ValueError, match="num_experts=0"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("num_expert", "num_experts"),
        ("cca_time_0", "cca_time0"),
        ("rms_norm_epsilon", "rms_norm_eps"),
        ("num_experts_per_token", "num_experts_per_tok"),
        ("clamp_temps", "clamp_temp"),
        ("tie_word_embedding", "tie_word_embeddings"),
        ("layer_type", "layer_types"),
        ("rope_parameter", "rope_parameters"),
    ],
)
def test_misspelt_keys_are_warned_about(key, near):
    with pytest.warns(UserWarning, match=f"'{key}'.*did you mean '{near}'") as caught:
        tiny_config(**{key: 3})
    assert caught[0].filename.endswith("testing.py")  # where the config was made, not inside a library


# What the published combined config and other tools put beside our fields.
HUB_EXTRAS = {
    "_name_or_path": "x/y",
    "_attn_implementation_autoset": True,
    "architectures": ["ZayaForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_zaya.ZayaConfig"},
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "transformers_version": "5.13.0",
    "model_type": "zaya",
    "temperature": 0.6,
    "top_p": 0.95,
    "max_length": 4096,
    "output_attentions": False,
    "rope_scaling": False,
    "mamba_cache_dtype": "float32",
    "num_query_groups": 2,
    "zaya_mlp_expansion": 16,
    "ffn_hidden_size": 64,
    "norm_epsilon": 1e-5,
    "use_grouped_mm": True,
    "load_balance_coeff": None,
    "unsloth_fixed": True,
    "pretraining_tp": 1,
}


def test_extras_of_published_configs_are_silent():
    values = {**tiny_config().to_dict(), **HUB_EXTRAS}
    values["rope_parameters"] = {**values["rope_parameters"], "rope_type": "default"}  # stray, as on the Hub
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = ZayaConfig.from_dict(values)
    assert set(config.rope_parameters) == {"hybrid", "hybrid_sliding"}
    assert config.dtype is torch.bfloat16
    written = config.to_dict()
    assert [key for key in written if key.startswith("_")] == ["_name_or_path"]
    assert not {"ffn_hidden_size", "zaya_mlp_expansion", "norm_epsilon", "num_query_groups"} & set(written)


def test_round_trip_and_the_caller_s_dicts(tmp_path):
    changes = {
        "clamp_temp": True,
        "residual_in_fp32": False,
        "router_norm_eps": 1e-6,
        "fp32_logits": True,
        "skip_expert": "identity",
        "tie_word_embeddings": False,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": 5,
        "rope_parameters": {**rope(), "hybrid_sliding": {"rope_theta": 1e4}},
        "eos_token_id": [1, 106],
    }
    given = copy.deepcopy(changes)
    config = tiny_config(**changes)
    assert changes == given, "the caller's dict must not change"
    config._private = "must not leak"
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert not [key for key in written if key.startswith("_")]
    assert written["tie_word_embeddings"] is False
    assert ZayaConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    assert tiny_config().to_diff_dict()["tie_word_embeddings"] is True, "the tie flag is always written"


def test_overrides_while_reading_are_checked(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    assert ZayaConfig.from_pretrained(tmp_path, num_experts=8).num_experts == 8
    with pytest.raises(ValueError, match="num_experts=0"):
        ZayaConfig.from_pretrained(tmp_path, num_experts=0)
    with pytest.raises(ValueError, match=r"layer_types has 4: num_hidden_layers=2 needs 2 entries"):
        ZayaConfig.from_pretrained(tmp_path, num_hidden_layers=2)
    config, unused = ZayaConfig.from_pretrained(tmp_path, num_experts=8, other=1, return_unused_kwargs=True)
    assert (config.num_experts, unused) == (8, {"other": 1})


def test_models_of_another_type_are_refused(tmp_path):
    for model_type, message in (("llama", "model_type='llama'"), ("zaya1_vl", "vision-language")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ValueError, match=message):
            ZayaConfig.from_pretrained(tmp_path)


def test_float_fields_written_as_integers_load_in_transformers_own_class(tmp_path):
    tiny_config(rms_norm_eps=0, router_norm_eps=1, initializer_range=0).save_pretrained(tmp_path)
    stock = StockConfig.from_pretrained(tmp_path)
    assert (stock.rms_norm_eps, stock.initializer_range) == (0.0, 0.0)


def test_native_config_is_converted_whole():
    native = StockConfig(
        num_hidden_layers=2,
        layer_types=["hybrid", "hybrid_sliding"],
        sliding_window=7,
        dtype="bfloat16",
        architectures=["ZayaForCausalLM"],
        attn_implementation="sdpa",
        experts_implementation="batched_mm",
        name_or_path="somewhere",
        my_note="kept",
    )
    config = ZayaConfig.from_native(native)
    ours, theirs = config.to_dict(), native.to_dict()
    assert {key: ours[key] for key in theirs} == theirs
    assert (config._attn_implementation, config._experts_implementation) == ("sdpa", "batched_mm")
    assert (config.dtype, config.name_or_path) == (torch.bfloat16, "somewhere")
    assert ZayaConfig.from_native(config) is config
    from transformers import LlamaConfig

    with pytest.raises(TypeError, match="needs a ZayaConfig, not a LlamaConfig"):
        ZayaConfig.from_native(LlamaConfig())


def test_defaults_are_those_of_transformers():
    ours, stock = ZayaConfig().to_dict(), StockConfig().to_dict()
    assert {key: ours[key] for key in stock} == stock
    extra = {key: value for key, value in ours.items() if key not in stock}
    assert extra == {
        "clamp_temp": False,
        "residual_in_fp32": True,
        "router_norm_eps": None,
        "fp32_logits": False,
        "skip_expert": "zero",
    }
    assert ZayaConfig.base_model_ep_plan == StockConfig.base_model_ep_plan


def test_auto_config_gives_ours(tmp_path):
    tiny_config(clamp_temp=True).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is ZayaConfig
    assert config.clamp_temp
