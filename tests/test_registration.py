"""What importing zaya_hf changes in transformers (its entries of Auto tables), and that its switches have effect."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers import ZayaConfig as NativeConfig
from transformers import ZayaForCausalLM as NativeZaya
from transformers import ZayaModel as NativeModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface, batched_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import zaya_hf
from zaya_hf import ZayaConfig, ZayaForCausalLM, ZayaModel, modeling_zaya
from zaya_hf.testing import assert_equal_logits, random_ids, record_run, redraw, tiny_config

SOURCE = Path(zaya_hf.__file__).parents[1]


def python(code: str, **environment: str):
    """Run `code` in a fresh interpreter that can import this zaya_hf; the JSON that it prints last."""
    inherited = {key: value for key, value in os.environ.items() if key != "ZAYA_HF_NO_REGISTER"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**inherited, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def registration():
    """Leaves the registration as it found it."""
    yield
    zaya_hf.register()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with a tiny model that both classes compute alike, and a tokenizer of its 128 words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder = tmp_path_factory.mktemp("saved")
    model = redraw(ZayaForCausalLM(tiny_config()))
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1.0
    model.save_pretrained(folder)
    words = ["<pad>", "<eos>", "<bos>"] + [f"w{index}" for index in range(3, 128)]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    ).save_pretrained(folder)
    return folder


# -------------------------------------------------------------------------------------------------- what import changes
TABLES = """
    import importlib, json, pkgutil
    import torch, transformers
    from transformers.models.zaya import modeling_zaya as native

    MODULES = [
        "cache_utils", "configuration_utils", "conversion_mapping", "core_model_loading", "generation.utils",
        "integrations.hub_kernels", "integrations.moe", "masking_utils", "modeling_rope_utils", "modeling_utils",
        "models.auto.auto_factory", "models.auto.configuration_auto", "models.auto.modeling_auto",
        "models.auto.tokenization_auto", "models.zaya.configuration_zaya", "models.zaya.modeling_zaya",
        "monkey_patching", "pipelines", "utils.generic",
    ]

    def describe(value):
        if isinstance(value, (type, type(describe))):
            return f"{value.__module__}.{value.__qualname__} {id(value)}"
        return f"{type(value).__qualname__} {id(value)}"

    def tables():
        found = {}
        for name in MODULES:
            module = importlib.import_module(f"transformers.{name}")
            for attribute, value in list(vars(module).items()):
                key = f"{name}.{attribute}"
                found[key] = describe(value)
                for part in ("", "_extra_content", "_mapping", "_model_mapping", "_global_mapping", "_local_mapping"):
                    table = getattr(value, part, None) if part else value
                    if not part and hasattr(value, "_extra_content"):
                        continue  # iterating it would import every model
                    if type(table).__name__ in ("dict", "OrderedDict", "defaultdict") or part == "_model_mapping":
                        for row in list(dict.items(table)) if isinstance(table, dict) else []:
                            found[f"{key}.{part}[{row[0]!r}]"] = describe(row[1])
                    elif isinstance(table, (list, set, frozenset, tuple)):
                        found[f"{key}.{part} contents"] = repr(sorted(map(repr, table)))
        for cls in (native.ZayaForCausalLM, native.ZayaModel, native.ZayaPreTrainedModel, native.ZayaConfig,
                    native.ZayaExperts, transformers.PreTrainedModel, transformers.GenerationMixin,
                    transformers.DynamicCache, transformers.cache_utils.DynamicLayer, torch.nn.Module):
            for attribute, value in vars(cls).items():
                found[f"{cls.__name__}.{attribute}"] = describe(value)
        return found

    def changes(before, after):
        return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
"""

#: the tables of the model classes
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)
REGISTERED = {
    "models.auto.configuration_auto.CONFIG_MAPPING._extra_content['zaya']",
    *(f"models.auto.modeling_auto.{name}._extra_content[{ZayaConfig!r}]" for name in MAPPINGS),
}
#: every subclass of `ModelOutput` is made known to torch's pytree when it is defined
INHERENT = {"utils.generic._registered_model_output_types. contents"}


def test_entries_of_auto_tables_are_all_that_changes(saved):
    """Importing adds them; loading, running, generating and training add nothing; `unregister` takes them out."""
    on_import, in_use, after = python(
        TABLES
        + f"""
    def use(cls, **options):
        model = cls.from_pretrained({str(saved)!r})
        ids = torch.tensor([[3, 4, 5]])
        model.set_experts_implementation("batched_mm")
        model.generate(ids, max_new_tokens=3, **options)
        model.train()(ids, labels=ids).loss.backward()

    use(native.ZayaForCausalLM)  # fills the library's own caches
    before = tables()
    import zaya_hf
    on_import = changes(before, tables())
    use(zaya_hf.ZayaForCausalLM, prompt_lookup_num_tokens=2)
    in_use = changes(before, tables())
    zaya_hf.unregister()
    print(json.dumps([on_import, in_use, changes(before, tables())]))
    """
    )
    assert set(on_import) == REGISTERED | INHERENT
    assert set(in_use) == REGISTERED | INHERENT
    assert set(after) == INHERENT


@pytest.mark.parametrize(
    ("value", "ours"),
    [
        *((word, False) for word in ("1", "true", "True", "YES", "on", " 1 ")),
        *((word, True) for word in ("0", "false", "No", "OFF", "", None)),
    ],
)
def test_environment_variable_opts_out(registration, monkeypatch, value, ours):
    zaya_hf.unregister()
    if value is None:
        monkeypatch.delenv("ZAYA_HF_NO_REGISTER", raising=False)
    else:
        monkeypatch.setenv("ZAYA_HF_NO_REGISTER", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(zaya_hf)
    assert zaya_hf.is_registered() is ours
    assert type(AutoConfig.for_model("zaya")) is (ZayaConfig if ours else NativeConfig)


def test_a_value_that_says_neither_is_named_once_in_one_line(registration, monkeypatch):
    zaya_hf.unregister()
    monkeypatch.setenv("ZAYA_HF_NO_REGISTER", "maybe")
    said = r"^ZAYA_HF_NO_REGISTER='maybe' is ignored: 1, true, yes or on .*classes$"
    with pytest.warns(UserWarning, match=said) as found:
        importlib.reload(zaya_hf)
    assert len(found) == 1
    assert zaya_hf.is_registered()


def test_outputs_are_exported():
    model = ZayaForCausalLM(tiny_config(num_hidden_layers=1))
    ids = random_ids(1, 3)
    assert type(model(ids)) is zaya_hf.ZayaCausalLMOutput
    assert type(model.model(ids)) is zaya_hf.ZayaModelOutput
    assert {"ZayaCausalLMOutput", "ZayaModelOutput"} <= set(zaya_hf.__all__)


# ------------------------------------------------------------------------------------------------------- Auto classes
def test_auto_classes_build_ours_while_registered_and_stock_otherwise(saved, registration):
    ids = random_ids(2, 9)
    logits = {}
    for ours in (True, False, True):
        zaya_hf.register() if ours else zaya_hf.unregister()
        assert zaya_hf.is_registered() is ours
        config_class, model_class, head_class = (
            (ZayaConfig, ZayaModel, ZayaForCausalLM) if ours else (NativeConfig, NativeModel, NativeZaya)
        )
        config = AutoConfig.from_pretrained(saved)
        assert type(config) is config_class
        assert type(AutoModel.from_config(config)) is model_class
        assert type(AutoModelForCausalLM.from_config(config)) is head_class
        assert type(AutoModel.from_pretrained(saved)) is model_class
        model = AutoModelForCausalLM.from_pretrained(saved)
        assert type(model) is head_class
        with torch.no_grad():
            logits[ours] = model(ids).logits
    torch.testing.assert_close(logits[True], logits[False], rtol=0, atol=3e-5)


def test_repeating_changes_nothing(registration):
    for _ in range(2):
        zaya_hf.unregister()
        zaya_hf.unregister()
        assert not zaya_hf.is_registered()
        zaya_hf.register()
        zaya_hf.register()
        assert zaya_hf.is_registered()


def test_somebody_elses_registration_is_left_alone(registration):
    class OtherConfig(NativeConfig):
        pass

    AutoConfig.register("zaya", OtherConfig, exist_ok=True)
    try:
        assert not zaya_hf.is_registered()
        zaya_hf.unregister()
        assert type(AutoConfig.for_model("zaya")) is OtherConfig
    finally:
        zaya_hf.register()
    assert type(AutoConfig.for_model("zaya")) is ZayaConfig


def test_models_survive_unregistering(registration):
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(1, 5)
    before = model.generate(ids, max_new_tokens=4, do_sample=False)
    zaya_hf.unregister()
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), before)
    assert type(copy.deepcopy(model)) is ZayaForCausalLM


def test_tokenizer_of_a_saved_folder_loads(saved, registration):
    for change in (zaya_hf.register, zaya_hf.unregister):
        change()
        tokenizer = AutoTokenizer.from_pretrained(saved)
        assert tokenizer("w5 w9 w100")["input_ids"] == [5, 9, 100]
        assert tokenizer.pad_token_id == 0


def test_text_generation_pipeline(saved):
    generator = pipeline("text-generation", model=str(saved), device="cpu")
    assert type(generator.model) is ZayaForCausalLM
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    single = [generator(text, **options)[0]["generated_token_ids"] for text in ("w5 w9 w100", "w7")]
    generator.tokenizer.padding_side = "left"
    batched = generator(["w5 w9 w100", "w7"], batch_size=2, **options)
    for alone, [together] in zip(single, batched, strict=True):
        assert together["generated_token_ids"][-4:] == alone[-4:]
    ids = torch.tensor([[5, 9, 100]])
    assert single[0] == generator.model.generate(ids, max_new_tokens=4, do_sample=False)[0].tolist()


# ------------------------------------------------------------------------------------------------- the native config
def native_config(**changes) -> NativeConfig:
    values = tiny_config().to_dict()
    ours_alone = ("clamp_temp", "residual_in_fp32", "router_norm_eps", "fp32_logits", "skip_expert")
    dropped = {"model_type", "transformers_version", *ours_alone}
    return NativeConfig(**{key: value for key, value in values.items() if key not in dropped} | changes)


@pytest.mark.parametrize("cls", [ZayaModel, ZayaForCausalLM])
def test_native_config_is_converted(cls):
    native = native_config(
        attn_implementation="eager",
        experts_implementation="batched_mm",
        num_hidden_layers=2,
        layer_types=["hybrid", "hybrid_sliding"],
        sliding_window=7,
        rms_norm_eps=1e-4,
    )
    before = copy.deepcopy(native.to_dict())
    model = cls(native)
    assert type(model.config) is ZayaConfig
    assert model.config._attn_implementation == "eager"
    assert model.config._experts_implementation == "batched_mm"
    for name, value in before.items():
        if name not in ("transformers_version", "architectures"):
            assert getattr(model.config, name) == value, name
    assert type(native) is NativeConfig
    assert native.to_dict() == before


def test_native_config_gives_the_stock_models_numbers():
    stock = redraw(NativeZaya(native_config()))
    for layer in stock.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1.0
    ours = ZayaForCausalLM(stock.config)
    ours.load_state_dict(stock.state_dict())
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert_equal_logits(record_run(ours.eval(), ids), record_run(stock, ids), atol=3e-5)


def test_other_configs_are_refused():
    from transformers import LlamaConfig

    with pytest.raises(TypeError, match="needs a ZayaConfig, not a LlamaConfig"):
        ZayaForCausalLM(LlamaConfig())


# ------------------------------------------------------------------------------------------------------- the switches
@pytest.fixture
def paths(monkeypatch) -> dict[str, int]:
    """How often each attention and experts implementation was called."""
    counts: dict[str, int] = {}

    def spy(kind: str, name: str, function):
        def counted(*args, **kwargs):
            counts[f"{kind} {name}"] = counts.get(f"{kind} {name}", 0) + 1
            return function(*args, **kwargs)

        return counted

    for interface, kind, names in (
        (ALL_ATTENTION_FUNCTIONS, "attention", ["sdpa"]),
        (ALL_EXPERTS_FUNCTIONS, "experts", ["batched_mm", "grouped_mm"]),
    ):
        for name in names:
            monkeypatch.setitem(type(interface)._global_mapping, name, spy(kind, name, interface[name]))
    eager = spy("attention", "eager", modeling_zaya.attention.eager_attention)
    monkeypatch.setattr(modeling_zaya.attention, "eager_attention", eager)
    monkeypatch.setattr(modeling_zaya.ops, "experts", spy("experts", "eager", modeling_zaya.ops.experts))
    return counts


def implementations_run(model, paths: dict[str, int]) -> set[str]:
    """What a run used; each of it in every layer."""
    paths.clear()
    with torch.no_grad():
        model(random_ids(2, 6))
    assert set(paths.values()) == {model.config.num_hidden_layers}
    return set(paths)


def test_each_switch_makes_another_code_path_run(paths):
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 6)
    with torch.no_grad():
        want = record_run(model, ids)
    assert implementations_run(model, paths) == {"attention sdpa", "experts eager"}
    for attention in ("eager", "sdpa"):
        for experts in ("eager", "batched_mm", "grouped_mm", "zaya"):
            model.set_attn_implementation(attention)
            model.set_experts_implementation(experts)
            assert model.config._attn_implementation == attention
            assert model.config._experts_implementation == experts
            ran = "eager" if experts == "zaya" else experts  # what ours is on a CPU
            assert implementations_run(model, paths) == {f"attention {attention}", f"experts {ran}"}
            with torch.no_grad():
                assert_equal_logits(record_run(model, ids), want, atol=3e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_switches_through_every_way_in(saved, paths, attention, experts):
    switches = {"attn_implementation": attention, "experts_implementation": experts}
    for model in (
        ZayaForCausalLM.from_pretrained(saved, **switches),
        AutoModelForCausalLM.from_pretrained(saved, **switches),
        AutoModelForCausalLM.from_pretrained(saved, config=AutoConfig.from_pretrained(saved), **switches),
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved), **switches),
        ZayaForCausalLM(tiny_config(**switches)),
    ):
        assert implementations_run(model, paths) == {f"attention {attention}", f"experts {experts}"}


def test_switches_work_for_subclasses_wherever_they_are_defined(paths, monkeypatch):
    """Their source says nothing about the layers; in a notebook there is none."""
    for name in ("attn", "experts"):  # what the library remembers of an earlier test
        monkeypatch.setattr(ZayaForCausalLM, f"_can_set_{name}_implementation_cached_value", None, raising=False)
    Subclass = type("Subclass", (ZayaForCausalLM,), {"__module__": "nowhere"})
    model = redraw(Subclass(tiny_config()))
    assert implementations_run(model, paths) == {"attention sdpa", "experts eager"}
    model.set_attn_implementation("eager")
    model.set_experts_implementation("batched_mm")
    assert implementations_run(model, paths) == {"attention eager", "experts batched_mm"}


def test_unknown_implementations_are_refused():
    model = ZayaForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="no_such"):
        model.set_attn_implementation("no_such")
    with pytest.raises(ValueError, match="no_such"):
        model.set_experts_implementation("no_such")
    assert model.config._attn_implementation == "sdpa"
    assert model.config._experts_implementation == "zaya"


@pytest.mark.parametrize("first", ["native first", "ours first"])
def test_switches_do_not_depend_on_which_class_came_first(first):
    """transformers looks for switches in the source of the module that defined a class, and remembers the answer."""
    ours = "import zaya_hf; model = zaya_hf.ZayaForCausalLM(zaya_hf.testing.tiny_config())"
    native = "native = transformers.ZayaForCausalLM(transformers.ZayaConfig(**SIZES))"
    order = [native, ours] if first == "native first" else [ours, native]
    printed = python(
        f"""
    import json, torch, transformers
    import zaya_hf.testing
    SIZES = {{k: v for k, v in zaya_hf.testing.TINY.items()}}
    {order[0]}
    {order[1]}
    from transformers.integrations import moe
    seen = []
    for name in ("batched_mm", "grouped_mm"):
        def spy(*args, _name=name, _run=moe.ALL_EXPERTS_FUNCTIONS[name], **kwargs):
            seen.append(_name)
            return _run(*args, **kwargs)
        moe.ExpertsInterface.register(name, spy)
    said = [model.config._experts_implementation, model.config._attn_implementation]
    for name in ("batched_mm", "eager", "grouped_mm"):
        model.set_experts_implementation(name)
        model(torch.tensor([[3, 4, 5]]))
    print(json.dumps([said, seen]))
    """
    )
    assert printed == [["zaya", "sdpa"], ["batched_mm"] * 4 + ["grouped_mm"] * 4]


@pytest.fixture
def own_attention():
    """An attention of a user's own, registered as the library says, and taken out again."""
    calls = []

    def attention(module, query, key, value, attention_mask, *, scaling, dropout=0.0, sliding_window=None, **kwargs):
        calls.append(module.layer_idx)
        causal = attention_mask is None and query.shape[2] > 1
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=causal,
            enable_gqa=True,
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("own_attention", attention)
    yield calls
    AttentionInterface._global_mapping.pop("own_attention")
    AttentionMaskInterface._global_mapping.pop("own_attention", None)


@pytest.mark.parametrize("sliding", [False, True])
def test_own_attention_with_its_mask_function_equals_sdpa(own_attention, sliding):
    layers = {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 3} if sliding else {}
    model = redraw(ZayaForCausalLM(tiny_config(**layers)))
    ids = random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0, 1]).expand(2, -1)
    cases = [{}, {"attention_mask": mask}, {"position_ids": positions}]
    with torch.no_grad():
        want = [record_run(model, ids, **case) for case in cases]
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    AttentionMaskInterface.register("own_attention", sdpa_mask)
    model.set_attn_implementation("own_attention")
    for case, expected in zip(cases, want, strict=True):
        own_attention.clear()
        with torch.no_grad():
            got = record_run(model, ids, **case)
        assert own_attention == [0, 1, 2, 3]
        real = case.get("attention_mask", torch.ones_like(ids)).bool()
        assert_equal_logits(got, expected, atol=3e-5, where=real)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), tokens)


def test_own_attention_without_a_mask_function_never_ignores_padding(own_attention):
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 9)
    with torch.no_grad():
        want = record_run(model, ids)
        model.set_attn_implementation("own_attention")
        assert_equal_logits(record_run(model, ids), want, atol=3e-5)  # nothing to ignore: causal is all there is
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        with pytest.raises(ValueError, match="'own_attention' has no mask function"):
            model(ids, attention_mask=mask)


def test_own_experts_run(paths):
    calls = []

    def own_experts(module, *args, **kwargs):
        calls.append(module)
        return batched_mm_experts_forward(module, *args, **kwargs)

    model = redraw(ZayaForCausalLM(tiny_config()))
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1.0  # the library's own function takes no skipped token
    with torch.no_grad():
        want = record_run(model, random_ids(2, 6))
    assert not (want.slots == 4).any()
    ExpertsInterface.register("own_experts", own_experts)
    try:
        model.set_experts_implementation("own_experts")
        with torch.no_grad():
            assert_equal_logits(record_run(model, random_ids(2, 6)), want, atol=3e-5)
        assert len(calls) == 4
    finally:
        ExpertsInterface._global_mapping.pop("own_experts")


def test_the_library_itself_is_never_patched():
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    assert NativeZaya.__module__ == "transformers.models.zaya.modeling_zaya"
    assert "generate" not in vars(NativeZaya)
