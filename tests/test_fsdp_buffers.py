"""FSDP2 where only the main process has loaded the weights: buffers arrive whole, and what is saved is no shard."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import zaya_hf
from rank_processes import run_ranks
from zaya_hf.testing import assert_equal_logits, random_ids, record_run, redraw, tiny_config
from zaya_hf.training.sharding import full_state, load_full_state, prepare

# theta 5e6, 8 rotary dimensions
FREQUENCIES = [1.0, 0.021147, 4.4721e-4, 9.4574e-6]


def fsdp_on_cpus() -> Accelerator:
    """accelerate knows FSDP2 on GPUs alone; that it is also to be on CPUs, it is told here."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def in_each_process(folder: Path) -> None:
    accelerator = fsdp_on_cpus()
    if accelerator.is_main_process:
        model = zaya_hf.ZayaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    else:
        torch.manual_seed(1)
        model = redraw(zaya_hf.ZayaForCausalLM(zaya_hf.ZayaConfig.from_pretrained(folder / "model")), 1)
    model, _ = prepare(accelerator, model, torch.optim.AdamW(model.parameters()))
    model = accelerator.unwrap_model(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert model.lm_head.weight is model.get_input_embeddings().weight

    def check() -> None:
        saved = load_file(folder / "model" / "model.safetensors")
        buffers = dict(model.named_buffers())
        assert len(buffers) == 4
        for name, biases in buffers.items():
            assert type(biases) is torch.Tensor
            assert torch.equal(biases, saved[name])
        frequencies = model.model.rotary.frequencies("hybrid", torch.device("cpu"))
        torch.testing.assert_close(frequencies, torch.tensor(FREQUENCIES), rtol=1e-4, atol=0.0)
        assert frequencies.dtype == torch.float32
        whole = full_state(model)
        if accelerator.is_main_process:
            assert whole.keys() == saved.keys()
            assert all(type(whole[name]) is torch.Tensor and torch.equal(whole[name], saved[name]) for name in saved)
        else:
            assert whole == {}

    check()
    with torch.no_grad():
        logits = model.eval()(input_ids=random_ids(2, 12)).logits
    whole = full_state(model)
    if accelerator.is_main_process:
        torch.save(logits, folder / "logits.pt")
        model.save_pretrained(folder / "again", state_dict=whole, save_original_format=False)

    with torch.no_grad():  # and whole tensors come back, from the main process alone
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()

    def read() -> dict[str, torch.Tensor]:
        assert accelerator.is_main_process
        return load_file(folder / "again" / "model.safetensors")

    load_full_state(model, read)
    check()


def test_buffers_of_a_sharded_model(tmp_path: Path) -> None:
    model = redraw(zaya_hf.ZayaForCausalLM(tiny_config()))
    model.save_pretrained(tmp_path / "model")
    run_ranks(in_each_process, tmp_path)

    saved = load_file(tmp_path / "again" / "model.safetensors")
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert saved.keys() == before.keys()
    assert sum(name.endswith("balancing_biases") for name in saved) == 4
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["ZayaForCausalLM"]
    again = zaya_hf.ZayaForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    ids = random_ids(2, 12)
    with torch.no_grad():
        expected = record_run(model, ids)
        assert_equal_logits(record_run(again, ids), expected)
    assert_equal_logits(torch.load(tmp_path / "logits.pt"), expected)
