"""Folders that are no plain ZAYA checkpoint: one line that says what they are and the way out, or they load.

Each is refused by our class, by the Auto class where transformers lets us have a say, and by `zaya generate`, before
any weights are read, and nothing is written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
)

import zaya_cli
from original_checkpoints import original_config, original_tensors, write_checkpoint
from saved_models import contents, differing, edit_config, tiny_model
from zaya_hf import ZayaConfig, ZayaForCausalLM, ZayaForSequenceClassification, weight_files
from zaya_hf.testing import random_ids

MODEL = tiny_model(num_hidden_layers=2)


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transformers' own zaya class.*")
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder with a model and a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("whole")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MODEL.save_pretrained(folder)
    words = {f"w{index}": index for index in range(128)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3"))).save_pretrained(folder)
    return folder


def tokenizer_only(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)


def instead(*names: str, config: bool = False) -> Callable[[Path], None]:
    """Other files in place of the weights (and, without `config`, of the config)."""

    def change(folder: Path) -> None:
        tokenizer_only(folder) if not config else (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_bytes(b"x")

    return change


def configured(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


def quantised_by(method: str, **more: object) -> Callable[[Path], None]:
    return configured(quantization_config={"quant_method": method, **more})


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({**tensors, name: tensor}, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def nested_vision(folder: Path) -> None:
    values = {"model_type": "zaya1_vl", "text_config": {"model_type": "zaya"}, "vision_config": {"depth": 2}}
    (folder / "config.json").write_text(json.dumps(values))


EXPERT = "model.layers.0.mlp.experts.down_proj"
PLAIN = "load the unquantised checkpoint, e.g. Zyphra/ZAYA1-8B"
# What is done to the folder, what is said, and whether the Auto class says it (else transformers stops it before us).
REFUSED: dict[str, tuple[Callable[[Path], None], str, bool]] = {
    "GGUF": (instead("model-Q4_K_M.gguf"), "holds GGUF files only; load the safetensors checkpoint", False),
    "GGUF with a config": (instead("model-Q4_K_M.gguf", config=True), "holds GGUF files only", True),
    "pickles": (instead("pytorch_model.bin", config=True), "pickled weights only; save each file as safetensors", True),
    "sharded pickles": (
        instead("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", config=True),
        "'pytorch_model-00001-of-00002.safetensors')",
        True,
    ),
    "a pickled training state": (instead("consolidated.00.pth"), "holds pickled weights only", False),
    "DCP": (instead(".metadata", "__0_0.distcp"), "distributed checkpoint of torch; merge it with `accelerate", False),
    "DCP with a config": (instead(".metadata", "__0_0.distcp", config=True), "distributed checkpoint of torch", True),
    "DeepSpeed": (instead("latest", "global_step5/x.pt", config=True), "run `python zero_to_fp32.py", True),
    "Megatron": (instead("latest_checkpointed_iteration.txt", "iter_0000005/mp_rank_00/x.pt"), "Megatron", False),
    "ONNX": (instead("model.onnx", config=True), "holds an ONNX model", True),
    "tokenizer": (tokenizer_only, "holds a tokenizer but no model: neither config.json nor model.safetensors", False),
    "a run with checkpoints": (
        instead("checkpoint-5/config.json", "checkpoint-10/config.json"),
        "holds no model itself; folders in it do: checkpoint-10, checkpoint-5; give one of them",
        False,
    ),
    "nothing known": (instead("notes.txt", config=True), "has no weights: neither model.safetensors nor", True),
    "vision-language": (configured(model_type="zaya1_vl"), "the vision-language model, which zaya_hf does not", False),
    "nested vision-language": (nested_vision, "load a text checkpoint such as Zyphra/ZAYA1-8B", False),
    "another model": (configured(model_type="gpt2"), "model_type='gpt2' is wrong: only 'zaya' checkpoints", False),
    **{
        method: (quantised_by(method, bits=4), f"is quantised (quantization_config: {method}); {PLAIN}", True)
        for method in ("awq", "gptq", "mxfp4", "hqq", "quanto", "modelopt", "eetq", "nobody's")
    },
    "FP8 in blocks": (
        quantised_by("fp8", weight_block_size=[128, 128]),
        f"is quantised (quantization_config: fp8; but no tensor is stored as FP8); {PLAIN}",
        True,
    ),
    "FP8 without a scale": (
        with_tensor(EXPERT, MODEL.model.layers[0].mlp.experts.down_proj.data.to(torch.float8_e4m3fn)),
        f"is quantised (tensor {EXPERT} is stored as F8_E4M3); {PLAIN}",
        True,
    ),
    "MXFP4 blocks": (
        with_tensor(EXPERT + "_blocks", torch.zeros(4, 8, dtype=torch.uint8)),
        f"{EXPERT}_blocks is stored as U8",
        True,
    ),
    "packed whole numbers": (
        with_tensor("model.layers.0.self_attn.o_proj.qweight", torch.zeros(4, 8, dtype=torch.int32)),
        "o_proj.qweight is stored as I32",
        True,
    ),
    "a scale": (
        with_tensor("model.layers.0.self_attn.o_proj.weight_scale", torch.ones(64, 1)),
        "o_proj.weight_scale is the scale of a quantised one",
        True,
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_said(tmp_path, monkeypatch, capsys, whole, kind):
    change, said, auto_too = REFUSED[kind]
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    change(folder)
    before = contents_below(folder)
    monkeypatch.setattr(weight_files.WeightFiles, "open", lambda self: pytest.fail("weights were read"))
    for load in [ZayaForCausalLM.from_pretrained, *([AutoModelForCausalLM.from_pretrained] if auto_too else [])]:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            load(folder)
        line = str(error.value)
        assert said in line
        assert "\n" not in line
        assert line.startswith(str(folder))
    if not auto_too and kind != "another model":
        with pytest.raises((ValueError, OSError)):  # by transformers, in its words
            AutoModelForCausalLM.from_pretrained(folder)
    capsys.readouterr()
    assert zaya_cli.main(["generate", str(folder), "--prompt", "w5"]) != 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert contents_below(folder) == before


def contents_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_empty_folder_and_a_file(tmp_path, whole):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    cases = {
        tmp_path / "empty": "is empty",
        tmp_path / "model.gguf": "GGUF files are not supported; load the safetensors checkpoint it was made from",
        whole / "model.safetensors": "is a file; give the folder that holds it and config.json",
    }
    for place, said in cases.items():
        with pytest.raises(ValueError) as error:
            ZayaForCausalLM.from_pretrained(place)
        assert str(error.value).startswith(str(place))
        assert said in str(error.value)


@pytest.mark.parametrize("cls", [ZayaForCausalLM, ZayaForSequenceClassification])
def test_arguments_for_other_formats(whole, cls):
    with pytest.raises(ValueError, match=r"^gguf_file: GGUF files are not supported; load the safetensors"):
        cls.from_pretrained(whole, gguf_file="model.gguf")
    with pytest.raises(ValueError, match=r"^use_safetensors=False: pickled weights are not supported"):
        cls.from_pretrained(whole, use_safetensors=False)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "shard"])
@pytest.mark.parametrize("kind", ["link", "loop", "folder", "pipe"])
def test_what_stands_in_the_place_of_a_file_is_named(tmp_path, name, kind):
    """A link into a cache that was tidied, say; not that the file is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MODEL.save_pretrained(
            tmp_path, max_shard_size="150KB" if name in ("shard", "model.safetensors.index.json") else "1GB"
        )
    path = tmp_path / name if name != "shard" else min(tmp_path.glob("model-*"))
    path.unlink()
    if kind == "link":
        path.symlink_to("../blobs/abc")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        (path.mkdir if kind == "folder" else lambda: os.mkfifo(path))()
    state = {"link": r"is a link to ../blobs/abc, which does not exist; fetch it again",
             "loop": rf"is a link to {path.name}, which does not exist; fetch it again",
             "folder": "is a folder, not a file", "pipe": "is a device or pipe, not a file"}[kind]  # fmt: skip
    place = f"{tmp_path}: shard {path.name}" if name == "shard" else str(path)
    with pytest.raises(FileNotFoundError, match=f"^{place} {state}"):
        ZayaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["", "no such folder", "a\0b", "~/model", "one/two/three", "./model"])
def test_what_is_neither_a_folder_nor_a_hub_id(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    said = f"there is no folder {name!r} (and it is no Hub id, which has the form name/name)"
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(said)}$"):
        ZayaForCausalLM.from_pretrained(name)


def test_a_state_dict_is_a_dict():
    with pytest.raises(TypeError, match=r"^state_dict is a list: it must be a dict of tensors by name$"):
        ZayaForCausalLM.from_pretrained(None, state_dict=[1], config=MODEL.config)


def test_a_variant_that_is_not_there_is_named(whole):
    right = "neither model.fp16.safetensors nor model.safetensors.index.fp16.json"
    with pytest.raises(FileNotFoundError, match=f"^{whole} has safetensors files but {right}$"):
        ZayaForCausalLM.from_pretrained(whole, variant="fp16")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"],
    ids=["lists", "objects", "digits"],
)
def test_json_that_python_gives_up_on(tmp_path, whole, name, text):
    shutil.copytree(whole, tmp_path / "model")
    (tmp_path / "model" / name).write_text(text)
    if "index" in name:
        (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/model/{name} is not a .*: it is no whole JSON file \(.*\); fetch"
    ):
        ZayaForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize("shard", ["", ".", "..", "a/b", "a\0b"])
def test_an_index_names_files_beside_it(tmp_path, whole, shard):
    shutil.copytree(whole, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": shard}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index.json lists the shard '.*', which is not a plain file name$"):
        ZayaForCausalLM.from_pretrained(tmp_path / "model")


def test_pickles_are_never_opened(tmp_path, whole, monkeypatch):
    """Also where they lie beside the safetensors files."""
    shutil.copytree(whole, tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"not a pickle")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("a pickle was opened"))
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path / "model"), MODEL) == []


def test_vision_language_and_smoe_are_left_to_others_in_the_auto_table(whole, tmp_path):
    """Their model types are not registered: that would keep the classes of others, or remote code, from them."""
    for model_type in ("zaya1_vl", "smoe"):
        with pytest.raises(ValueError, match=model_type):
            AutoConfig.for_model(model_type)
    with pytest.raises(ValueError, match="vision-language"):
        ZayaConfig.from_dict({"model_type": "zaya1_vl", "text_config": {"model_type": "zaya"}})


# ---------------------------------------------------------------------------------------------------------- FP8 experts
def fp8_tensors(scale_shape: str = "rows", seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of the original layout with FP8 experts and their scales, and what they stand for, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    stored, meant = original_tensors(MODEL), original_tensors(MODEL)
    for name in [name for name in stored if ".local_experts." in name]:
        rows = stored[name].shape[0]
        scale = 0.01 + torch.rand(rows, 1, generator=generator)
        if scale_shape == "one":
            scale = scale[:1]
        quantised = (stored[name] / scale).clamp(-440, 440).to(torch.float8_e4m3fn)
        meant[name] = quantised.to(torch.float32) * scale
        stored[name] = quantised
        stored[f"{name}_scale"] = scale.reshape({"rows": (rows, 1), "flat": (rows,), "one": ()}[scale_shape])
    return stored, meant


QUANTISATION = {
    "no word of it": None,
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}


@pytest.mark.parametrize("scale_shape", ["rows", "flat", "one"])
@pytest.mark.parametrize("config", QUANTISATION)
def test_fp8_experts_are_multiplied_by_their_scales(tmp_path, config, scale_shape):
    stored, meant = fp8_tensors(scale_shape)
    given = {} if QUANTISATION[config] is None else {"quantization_config": QUANTISATION[config]}
    fp8 = write_checkpoint(tmp_path / "fp8", stored, original_config(MODEL.config, **given), shards=2)
    plain = ZayaForCausalLM.from_pretrained(
        write_checkpoint(tmp_path / "plain", meant, original_config(MODEL.config)), dtype=torch.float32
    )
    for load in (ZayaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.warns(UserWarning, match=r"16 FP8 tensors are multiplied by their scales and held in the model's"):
            loaded = load(fp8, dtype=torch.float32)
        assert differing(loaded, plain) == []
        assert not getattr(loaded.config, "quantization_config", None)
        assert not getattr(loaded, "is_quantized", False)
    loaded.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path / "saved"), plain) == []


def test_fp8_experts_in_bf16_are_rounded_once(tmp_path):
    stored, meant = fp8_tensors()
    narrow = {name: value if value.dtype == torch.float8_e4m3fn or name.endswith("_scale") or "balancing" in name
              else value.to(torch.bfloat16) for name, value in stored.items()}  # fmt: skip
    folder = write_checkpoint(tmp_path, narrow, original_config(MODEL.config, torch_dtype="bfloat16"))
    with pytest.warns(UserWarning, match="FP8"):
        loaded = ZayaForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    for layer in range(2):
        for ours, theirs in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            name = f"model.layers.{2 * layer + 1}.zaya_block.experts.local_experts.{{}}.{theirs}.weight"
            want = torch.stack([meant[name.format(expert)] for expert in range(4)]).to(torch.bfloat16)
            assert torch.equal(getattr(loaded.model.layers[layer].mlp.experts, ours), want)
    assert loaded(random_ids(1, 5)).logits.isfinite().all()


def test_fp8_in_the_combined_layout_and_under_a_task_head(tmp_path):
    stored, meant = dict(MODEL.state_dict()), dict(MODEL.state_dict())
    stored.pop("lm_head.weight")
    weight = stored[EXPERT]
    scale = 0.5 + torch.rand(*weight.shape[:-1], 1)
    stored[EXPERT] = (weight / scale).to(torch.float8_e4m3fn)
    stored[f"{EXPERT}_scale"] = scale
    meant[EXPERT] = stored[EXPERT].to(torch.float32) * scale
    folder = write_checkpoint(tmp_path, stored, MODEL.config.to_dict())
    with pytest.warns(UserWarning, match="1 FP8 tensors"):
        assert differing(ZayaForCausalLM.from_pretrained(folder), meant) == []
    with pytest.warns(UserWarning, match="newly initialised"):
        head = AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(head.model.layers[0].mlp.experts.down_proj, meant[EXPERT])


def test_the_rest_of_the_files_decides_on_the_dtype_where_the_config_does_not(tmp_path):
    stored, _ = fp8_tensors()
    narrow = {name: value if value.dtype == torch.float8_e4m3fn else value.to(torch.bfloat16)
              for name, value in stored.items()}  # fmt: skip
    folder = write_checkpoint(tmp_path, narrow, original_config(MODEL.config, torch_dtype=None))
    with pytest.warns(UserWarning, match="FP8"):
        assert ZayaForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_fp8_on_disk_is_multiplied_out_in_the_dtype_that_was_asked_for(tmp_path):
    """Not in that of the config, which would round the products first."""
    stored, _ = fp8_tensors()
    folder = write_checkpoint(tmp_path / "fp8", stored, original_config(MODEL.config, torch_dtype="bfloat16"))
    ids = random_ids(1, 5)
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
        on_disk = [ZayaForCausalLM.from_pretrained(folder, dtype=dtype, **options) for dtype in (want.dtype, "float32")]
    for loaded in on_disk:
        torch.testing.assert_close(loaded(ids).logits, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused(tmp_path, value):
    stored, _ = fp8_tensors()
    name = next(name for name in stored if name.endswith("linear_fc1.weight_scale"))
    stored[name] = stored[name].clone()
    stored[name][3] = value
    folder = write_checkpoint(tmp_path, stored, original_config(MODEL.config))
    with pytest.raises(ValueError, match=rf"^{folder}: {name} has a value that is not finite; fetch the files again$"):
        ZayaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("weight_scale", torch.ones(2, 2), "stored as F8_E4M3"),  # blocks
        ("weight_scale", torch.ones(64, 1, dtype=torch.int64), "stored as F8_E4M3"),
        ("weight_scale_inv", torch.ones(64, 1), "stored as F8_E4M3"),
        ("input_scale", torch.ones(1), "input_scale is the scale of a quantised one"),
    ],
)
def test_other_fp8_forms_are_refused(tmp_path, name, tensor, said):
    stored, _ = fp8_tensors()
    expert = "model.layers.1.zaya_block.experts.local_experts.0.linear_fc1."
    if name != "input_scale":
        stored.pop(f"{expert}weight_scale")
    stored[expert + name] = tensor
    for number, given in enumerate(({}, {"quantization_config": QUANTISATION["fp8"]})):
        folder = write_checkpoint(tmp_path / str(number), stored, original_config(MODEL.config, **given))
        with pytest.raises(ValueError, match=rf"is quantised .*{said}.*{PLAIN}"):
            ZayaForCausalLM.from_pretrained(folder)


def test_no_argument_hides_how_files_are_quantised(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "model")
    edit_config(tmp_path / "model", quantization_config={"quant_method": "awq"})
    for given in (None, BitsAndBytesConfig(load_in_8bit=True)):
        with pytest.raises(ValueError, match=rf"is quantised \(quantization_config: awq\); {PLAIN}"):
            ZayaForCausalLM.from_pretrained(tmp_path / "model", quantization_config=given)


def test_restorable_methods_are_refused_in_the_original_layout(tmp_path):
    config = original_config(MODEL.config, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    folder = write_checkpoint(tmp_path, original_tensors(MODEL), config)
    with pytest.raises(ValueError, match=rf"in the original layout, is quantised \(bitsandbytes\); {PLAIN}"):
        ZayaForCausalLM.from_pretrained(folder)


# ------------------------------------------------------------------------------------------------------------- adapters
def test_an_adapter_without_peft_says_what_is_missing(tmp_path, monkeypatch):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somewhere"}))
    monkeypatch.setattr("zaya_hf.loading_source.is_peft_available", lambda: False)
    with pytest.raises(ValueError, match=r"holds a PEFT adapter and no model; where the package peft is installed, "):
        ZayaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("layout", ["combined", "original"])
def test_an_adapter_folder_loads_with_its_base(tmp_path, whole, layout):
    peft = pytest.importorskip("peft")
    base = whole
    if layout == "original":
        base = write_checkpoint(tmp_path / "base", original_tensors(MODEL), original_config(MODEL.config))
    adapted = peft.get_peft_model(
        ZayaForCausalLM.from_pretrained(base), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    want = adapted(random_ids(1, 5)).logits
    before = contents(base)
    for load in (ZayaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = load(tmp_path / "adapter")
        assert any("lora_A.default" in name for name, _ in loaded.named_parameters())
        torch.testing.assert_close(loaded(random_ids(1, 5)).logits, want, atol=1e-5, rtol=0)
    assert not torch.allclose(MODEL(random_ids(1, 5)).logits, want, atol=1e-3)
    assert contents(base) == before
