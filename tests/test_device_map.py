"""Where weights go while a model loads: devices, disk, meta; in which dtype; and that none come from old memory.

More of modules whose weights arrive when they are called: `test_offload.py`.
"""

from __future__ import annotations

import copy
import gc
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from original_checkpoints import original_config, original_tensors, write_checkpoint
from saved_models import differing, tiny_model
from zaya_hf import ZayaForCausalLM, ZayaForSequenceClassification, ZayaModel
from zaya_hf.combined_copy import write_combined
from zaya_hf.temporary_folders import host_prefix
from zaya_hf.testing import random_ids, tiny_config

#: RoPE frequencies of the tiny config: theta 5e6 to the power of -2 i / 8
FREQUENCIES = torch.tensor([1.0, 0.021147, 4.4721e-4, 9.4574e-6])
PARTS = ["model.embed_tokens", "lm_head", "model.norm", *(f"model.layers.{index}" for index in range(4))]
PARTS += ["model.input_hidden_states_scale", "model.input_hidden_states_bias"]
INNER = ["input_layernorm", "self_attn", "post_attention_residual_scale", "post_attention_layernorm", "mlp"]
INNER += ["post_mlp_residual_scale"]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transformers' own zaya class.*")
        # accelerate takes names of parameters for misspelt modules
        warnings.filterwarnings("ignore", message=".*device_map keys do not match any submodules.*")
        yield


@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    return tiny_model(skip_expert="identity")  # as in the original layout


@pytest.fixture(scope="module")
def untied() -> ZayaForCausalLM:
    return tiny_model(skip_expert="identity", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, model, untied) -> dict[str, Path]:
    """Folders of both models in both layouts; the original one in shards."""
    place = tmp_path_factory.mktemp("folders")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(place / "combined")
        untied.save_pretrained(place / "combined untied")
    for name, one in (("original", model), ("original untied", untied)):
        write_checkpoint(place / name, original_tensors(one), original_config(one.config), shards=2)
    return {path.name: path for path in place.iterdir()}


def split(where: dict[str, str], layer: int | None = None) -> dict[str, str]:
    """A device map with every part on the CPU but those in `where`; `layer` is split into its modules."""
    parts = [part for part in PARTS if part != f"model.layers.{layer}"]
    if layer is not None:
        parts += [f"model.layers.{layer}.{name}" for name in INNER]
    assert set(where) <= set(parts)
    return {part: where.get(part, "cpu") for part in parts}


def with_nan_in_free_memory() -> None:
    """What a tensor that nobody fills would then hold."""
    for count in (4, 5, 16, 64, 1024, 4096, 65536):
        torch.full((count,), float("nan"))
        torch.full((count,), float("nan"), dtype=torch.bfloat16)


def assert_equals(loaded: Any, model: Any, ids: torch.Tensor | None = None) -> None:
    """Logits in one call and with a cache, frequencies, and the biases that are in memory."""
    ids = random_ids(2, 9) if ids is None else ids
    with torch.no_grad():
        want = model(ids).logits
        torch.testing.assert_close(loaded(ids).logits, want, atol=1e-5, rtol=0)
        prefix = loaded(ids[:, :5], use_cache=True)
        torch.testing.assert_close(loaded(ids[:, 5:], cache=prefix.cache).logits, want[:, 5:], atol=1e-5, rtol=0)
    frequencies = loaded.model.rotary.frequencies("hybrid", torch.device("cpu"))
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, FREQUENCIES, rtol=1e-4, atol=0)
    for ours, theirs in zip(loaded.model.layers, model.model.layers, strict=True):
        biases = ours.mlp.gate.balancing_biases
        assert biases.dtype == torch.float32
        assert biases.device.type == "meta" or torch.equal(biases, theirs.mlp.gate.balancing_biases)


# ---------------------------------------------------------------------------------------------------------- device maps
MAPS: dict[str, Any] = {
    "cpu": "cpu",
    "auto": "auto",
    "a torch device": torch.device("cpu"),
    "one device": {"": "cpu"},
    "layer 0 on disk": split({"model.layers.0": "disk"}),
    "experts on disk": split({"model.layers.1.mlp": "disk"}, layer=1),
    "attention on disk": split({"model.layers.2.self_attn": "disk"}, layer=2),
    "scales on disk": split({"model.layers.3.post_mlp_residual_scale": "disk"}, layer=3),
    "norm on disk": split({"model.norm": "disk"}),
    "all on disk": {"": "disk"},
    "embedding and head on disk": split({"model.embed_tokens": "disk", "lm_head": "disk"}),
}
UNTIED_MAPS: dict[str, Any] = {
    "embedding on disk": split({"model.embed_tokens": "disk"}),
    "head on disk": split({"lm_head": "disk"}),
    "both on disk": split({"model.embed_tokens": "disk", "lm_head": "disk"}),
}


@pytest.mark.parametrize("layout", ["combined", "original"])
@pytest.mark.parametrize("name", MAPS)
def test_device_maps(tmp_path, folders, model, name, layout):
    with_nan_in_free_memory()
    before = {path: path.stat().st_mtime_ns for path in folders[layout].iterdir()}
    loaded = ZayaForCausalLM.from_pretrained(
        folders[layout], device_map=MAPS[name], offload_folder=tmp_path / "offload"
    )
    on_disk = any(p.device.type == "meta" for p in loaded.parameters())
    assert on_disk is ("disk" in name)
    assert_equals(loaded, model)
    assert loaded.name_or_path == str(folders[layout])
    assert {path: path.stat().st_mtime_ns for path in folders[layout].iterdir()} == before


@pytest.mark.parametrize("layout", ["combined untied", "original untied"])
@pytest.mark.parametrize("name", UNTIED_MAPS)
def test_device_maps_of_an_untied_embedding(tmp_path, folders, untied, name, layout):
    where = UNTIED_MAPS[name]
    loaded = AutoModelForCausalLM.from_pretrained(folders[layout], device_map=where, offload_folder=tmp_path)
    for module, weight in (
        ("model.embed_tokens", loaded.model.embed_tokens.weight),
        ("lm_head", loaded.lm_head.weight),
    ):
        assert (weight.device.type == "meta") is (where[module] == "disk")
    assert_equals(loaded, untied)


@pytest.mark.parametrize("layout", ["combined", "original"])
def test_memory_limits_send_whole_layers_to_disk(tmp_path, folders, model, layout):
    loaded = ZayaForCausalLM.from_pretrained(
        folders[layout], device_map="auto", max_memory={"cpu": 400_000}, offload_folder=tmp_path / "offload"
    )
    places = loaded.hf_device_map
    assert {"cpu", "disk"} <= set(map(str, places.values()))
    # a layer passes its stream and router state on by itself; hooks inside it would move them one by one
    assert not any(name.startswith(f"model.layers.{index}.") for name in places for index in range(4))
    assert_equals(loaded, model)


def test_what_is_not_to_be_split(model):
    with init_empty_weights():
        empty = ZayaForCausalLM(model.config)
    empty.tie_weights()
    for cls in (ZayaForCausalLM, ZayaModel, ZayaForSequenceClassification):
        assert cls._no_split_modules == ["ZayaDecoderLayer"]
    sizes = infer_auto_device_map(empty, max_memory={"cpu": 300_000}, no_split_module_classes=empty._no_split_modules)
    assert not any(name.startswith(f"model.layers.{index}.") for name in sizes for index in range(4))


def test_the_original_layout_needs_a_folder_for_what_stays_on_disk(tmp_path, folders):
    for where in ({"": "disk"}, "auto"):
        with pytest.raises(ValueError) as error:
            ZayaForCausalLM.from_pretrained(folders["original"], device_map=where, max_memory={"cpu": 200_000})
        said = str(error.value)
        assert said.startswith(f"{folders['original']}: ")
        assert "give offload_folder=..." in said
        assert "\n" not in said
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="is a file; give a folder"):
        ZayaForCausalLM.from_pretrained(folders["original"], device_map={"": "disk"}, offload_folder=tmp_path / "file")


def test_two_models_share_an_offload_folder(tmp_path, folders, model):
    """Each keeps its own copy: the second must not overwrite what the first still reads."""
    other = tiny_model(seed=7, skip_expert="identity")
    second = write_checkpoint(tmp_path / "second", original_tensors(other), original_config(other.config))
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    loaded = [ZayaForCausalLM.from_pretrained(folder, **options) for folder in (folders["original"], second)]
    assert_equals(loaded[1], other)
    assert_equals(loaded[0], model)


def test_the_copy_goes_with_the_model(tmp_path, folders, model):
    """Its modules, and copies of them, go on reading from it."""
    loaded = ZayaForCausalLM.from_pretrained(folders["original"], device_map={"": "disk"}, offload_folder=tmp_path)
    twin = copy.deepcopy(loaded)
    del loaded
    gc.collect()
    assert_equals(twin, model)
    layers = twin.model.layers
    del twin
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    del layers
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_copies_of_processes_that_ended_are_removed(tmp_path, folders):
    """A process that was killed with a model on disk could not remove its own; at its end one does, and a fork not."""
    program = """
import os, sys, warnings
warnings.simplefilter("ignore")
from zaya_hf import ZayaForCausalLM
model = ZayaForCausalLM.from_pretrained(sys.argv[1], device_map={"": "disk"}, offload_folder=sys.argv[2])
if os.fork() == 0:
    sys.exit()
os.wait()
print(len(os.listdir(sys.argv[2])))
"""
    (tmp_path / f"{host_prefix('combined')}{2**22 + 1}-left").mkdir()  # no Linux process has so large a number
    command = [sys.executable, "-c", program, str(folders["original"]), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr
    assert not list(tmp_path.iterdir())


def test_memory_limits_leave_nothing_but_the_copy(tmp_path, folders):
    loaded = ZayaForCausalLM.from_pretrained(
        folders["original"], device_map="auto", max_memory={"cpu": 400_000}, offload_folder=tmp_path
    )
    assert "disk" in loaded.hf_device_map.values()
    assert [path.is_dir() for path in tmp_path.iterdir()] == [True]


def test_a_full_disk_is_named_before_anything_is_written(tmp_path, folders, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda place: free)
    with pytest.raises(
        OSError, match=rf"^{tmp_path}/offload: a copy in the combined layout takes 0.00 GB, and .* free;"
    ):
        ZayaForCausalLM.from_pretrained(
            folders["original"], device_map={"": "disk"}, offload_folder=tmp_path / "offload"
        )
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()

    def fail(*args: Any, **options: Any) -> None:
        raise SafetensorError("Error while serializing: No space left on device")

    monkeypatch.setattr("zaya_hf.combined_copy.save_file", fail)
    with pytest.raises(OSError, match=r"model-00001.safetensors cannot be written: Error while serializing: No space"):
        write_combined(tmp_path, {"a": torch.ones(3)}, torch.float32)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"device_map": {}}, ValueError, "device_map is empty: it must give devices by module name"),
        ({"device_map": {"": None}}, TypeError, "device_map has '': None: it must give devices"),
        ({"device_map": {"model": "cpu", 3: "cpu"}}, TypeError, "device_map has 3: 'cpu': it must give devices"),
        ({"device_map": ["cpu"]}, TypeError, r"device_map=\['cpu'\]: it must be a device"),
        ({"device_map": "auto", "max_memory": [1]}, TypeError, r"max_memory=\[1\]: it must be a dict by device"),
        ({"dtype": "float99"}, ValueError, "dtype='float99': it must be \"auto\" or one of float64, "),
        ({"dtype": torch.int64}, ValueError, 'dtype=torch.int64: it must be "auto" or one of '),
        ({"torch_dtype": torch.float8_e4m3fn}, ValueError, "torch_dtype=torch.float8_e4m3fn: it must be "),
        ({"quantization_config": "int8"}, TypeError, "quantization_config='int8': it must be a config such as "),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["combined", "original"])
def test_arguments_that_make_no_sense(folders, layout, options, error, said):
    with pytest.raises(error, match=f"^{said}") as caught:
        ZayaForCausalLM.from_pretrained(folders[layout], **options)
    assert "\n" not in str(caught.value)


def test_a_failed_load_leaves_no_copy(tmp_path, folders, monkeypatch):
    def fail(*args: Any) -> None:
        (args[0] / "model-00001.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("zaya_hf.loading.write_combined", fail)
    with pytest.raises(OSError, match="No space left"):
        ZayaForCausalLM.from_pretrained(folders["original"], device_map={"": "disk"}, offload_folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_copy_is_in_shards_and_complete(tmp_path, model):
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    write_combined(tmp_path, state, torch.bfloat16, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    assert set(index) == set(state)
    stored = {name: value for file in set(index.values()) for name, value in load_file(tmp_path / file).items()}
    assert differing(stored, state) == []


def test_bf16_and_a_task_head_with_layers_on_disk(tmp_path, folders, model):
    for layout in ("combined", "original"):
        with pytest.warns(UserWarning, match="newly initialised"):
            loaded = ZayaForSequenceClassification.from_pretrained(
                folders[layout],
                num_labels=3,
                dtype=torch.bfloat16,
                device_map={**split({"model.layers.1": "disk"}), "score": "cpu"},
                offload_folder=tmp_path,
            )
        want = ZayaModel.from_pretrained(folders["combined"], dtype=torch.bfloat16)
        hidden = want(random_ids(2, 5)).last_hidden_state[:, -1]
        torch.testing.assert_close(loaded(random_ids(2, 5)).logits, loaded.score(hidden))
        assert loaded.model.layers[0].mlp.gate.balancing_biases.dtype == torch.float32


@pytest.mark.parametrize("layout", ["combined", "original"])
def test_generating_with_layers_on_disk(tmp_path, folders, model, layout):
    loaded = ZayaForCausalLM.from_pretrained(
        folders[layout], device_map=split({"model.layers.0": "disk", "model.layers.2": "disk"}), offload_folder=tmp_path
    )
    ids, mask = random_ids(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, **options)
    assert torch.equal(loaded.generate(ids, **options), want)
    assert torch.equal(loaded.generate(ids, cache_implementation="static", **options), want)
    assert torch.equal(loaded.generate(ids, num_beams=2, **options), model.generate(ids, num_beams=2, **options))


@pytest.mark.parametrize("layout", ["combined", "original"])
def test_a_dispatched_model_is_saved_whole(tmp_path, folders, model, layout):
    loaded = ZayaForCausalLM.from_pretrained(
        folders[layout],
        device_map=split({"model.layers.0": "disk", "model.layers.3": "disk"}),
        offload_folder=tmp_path / "offload",
    )
    loaded.save_pretrained(tmp_path / "saved")
    assert differing(ZayaForCausalLM.from_pretrained(tmp_path / "saved"), model) == []
    assert_equals(loaded, model)  # and it still runs


# ----------------------------------------------------------------------------------------------------------------- meta
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meta_to_empty_load_state_dict(model, dtype, assign):
    with_nan_in_free_memory()
    with torch.device("meta"):
        loaded = ZayaForCausalLM(tiny_config(skip_expert="identity", dtype=dtype)).to(dtype)
    assert all(tensor.device.type == "meta" for tensor in loaded.state_dict().values())
    assert not list(loaded.named_buffers())[4:]  # only the balancing biases, which every checkpoint has
    loaded.to_empty(device="cpu")
    biases = {id(layer.mlp.gate.balancing_biases) for layer in loaded.model.layers}
    assert len(biases) == 4
    stored = {name: value if name.endswith("biases") else value.to(dtype) for name, value in model.state_dict().items()}
    loaded.load_state_dict(stored, assign=assign)
    loaded.tie_weights()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_equals(loaded.eval().to(torch.float32), model if dtype == torch.float32 else rounded(model))


def rounded(model: ZayaForCausalLM) -> ZayaForCausalLM:
    twin = ZayaForCausalLM(model.config).eval()
    twin.load_state_dict(
        {n: v if n.endswith("biases") else v.to(torch.bfloat16).to(v.dtype) for n, v in model.state_dict().items()}
    )
    return twin


@pytest.mark.parametrize("layout", ["combined", "original"])
def test_device_map_meta_reads_no_weights(folders, layout, model):
    loaded = ZayaForCausalLM.from_pretrained(folders[layout], device_map="meta")
    assert all(p.device.type == "meta" for p in loaded.parameters())
    loaded.to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict())
    loaded.tie_weights()
    assert_equals(loaded, model)


def dispatched(folder: Path, where: dict[str, str], offload: Path, **options: Any) -> ZayaForCausalLM:
    with init_empty_weights():
        empty = ZayaForCausalLM(tiny_config(skip_expert="identity"))
    empty.tie_weights()
    return load_checkpoint_and_dispatch(
        empty,
        str(folder / "model.safetensors"),
        device_map=where,
        offload_folder=str(offload),
        no_split_module_classes=empty._no_split_modules,
        **options,
    ).eval()


@pytest.mark.parametrize("name", ["one device", "layer 0 on disk", "experts on disk", "norm on disk"])
def test_accelerate_builds_empty_and_dispatches(tmp_path, folders, model, name):
    with_nan_in_free_memory()
    loaded = dispatched(folders["combined"], MAPS[name], tmp_path, offload_buffers=True)
    assert any(p.device.type == "meta" for p in loaded.parameters()) is ("disk" in name)
    assert_equals(loaded, model)


def test_accelerate_never_goes_on_with_initial_biases(tmp_path, folders, model):
    """It reads buffers of what stays on disk only with `offload_buffers=True`. Without, a model whose biases were not
    on meta would go on with the initial ones."""
    loaded, said = None, ""
    try:
        loaded = dispatched(folders["combined"], MAPS["layer 0 on disk"], tmp_path)
    except ValueError as error:
        said = str(error)
    if loaded is None:
        assert "balancing_biases is on the meta device" in said
        return
    biases = loaded.model.layers[0].mlp.gate.balancing_biases
    assert torch.equal(biases.to(model.device), model.model.layers[0].mlp.gate.balancing_biases), biases
    assert_equals(loaded, model)


@pytest.mark.parametrize(
    "where", [{"model": "disk", "lm_head": "cpu"}, split({"lm_head": "disk"}), {"": "disk", "lm_head": 0}]
)
@pytest.mark.parametrize("layout", ["combined", "original"])
def test_one_tensor_cannot_be_in_two_places(tmp_path, folders, layout, where):
    said = r"^device_map has model.embed_tokens on \w+ and lm_head on \w+, but they are one tensor .*: give them one"
    for load in (ZayaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=said):
            load(folders[layout], device_map=where, offload_folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_accelerate_dispatches_a_model_in_memory(tmp_path, model):
    twin = tiny_model(skip_expert="identity")
    where = split({"model.layers.1": "disk"})
    assert_equals(dispatch_model(twin, where, main_device="cpu", offload_dir=str(tmp_path)), model)


@pytest.mark.parametrize("layout", ["combined", "original"])
@pytest.mark.parametrize("low", [True, False, None])
def test_low_cpu_mem_usage_changes_nothing(folders, model, layout, low):
    with_nan_in_free_memory()
    loaded = ZayaForCausalLM.from_pretrained(folders[layout], low_cpu_mem_usage=low)
    assert differing(loaded, model) == []
    assert_equals(loaded, model)


# --------------------------------------------------------------------------------------------------------------- dtypes
@pytest.mark.parametrize("layout", ["combined", "original"])
@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        ("auto", torch.float32),
        (None, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "load", [ZayaForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained], ids=["own", "auto"]
)
def test_dtype_under_both_names(folders, model, layout, argument, given, right, load):
    loaded = load(folders[layout], **{argument: given})
    assert {p.dtype for p in loaded.parameters()} == {right}
    assert loaded.dtype == loaded.config.dtype == right
    assert loaded.model.layers[1].mlp.gate.balancing_biases.dtype == torch.float32
    assert torch.equal(
        loaded.model.layers[1].mlp.gate.balancing_biases, model.model.layers[1].mlp.gate.balancing_biases
    )
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight.to(right))


@pytest.mark.parametrize("layout", ["combined", "original"])
@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("given", ["bf16x", "int8x", 3])
def test_a_dtype_that_is_none_is_named(folders, layout, argument, given):
    with pytest.raises((ValueError, TypeError)) as error:
        ZayaForCausalLM.from_pretrained(folders[layout], **{argument: given})
    assert "dtype" in str(error.value)
    assert "\n" not in str(error.value)
