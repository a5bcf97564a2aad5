"""What `zaya train --show` works out, against models that are built, what torch counts, and published figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.testing import tiny_config
from zaya_hf.training import memory, show
from zaya_hf.training.config import TrainingConfig
from zaya_hf.training.flops import count_parameters, flops_per_token, peak_tflops
from zaya_hf.training.optim import build_optimizer
from zaya_hf.training.settings_files import load


def run_config(fields: dict[str, Any], **changes: Any) -> TrainingConfig:
    settings = {
        "out": "runs/x",
        "steps": 10,
        "model": {"config": fields},
        "data": {"sources": [{"path": "x"}], "sequence_length": 32},
        "batch": {"rows": 6, "micro_rows": 2},
        "optimizer": {"lr": 1e-3},
    }
    return TrainingConfig.model_validate(settings | changes)


class TestParameters:
    def test_of_zaya1_8b(self) -> None:
        count = count_parameters(ZayaConfig())
        assert count.total == 8_840_488_784
        assert count.embedding == 262_272 * 2048
        assert count.total_without_embedding == 8_303_355_728  # "8.3B total"
        assert count.active_without_embedding == 753_608_528  # "760M active"
        assert count.active == 753_608_528 + 262_272 * 2048
        assert count.experts == 40 * 16 * (4096 * 2048 + 2048 * 2048)

    @pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"lm_head_bias": True, "num_experts": 3}])
    def test_of_models_that_are_built(self, changes: dict[str, Any]) -> None:
        config = tiny_config(**changes)
        model = ZayaForCausalLM(config)
        count = count_parameters(config)
        assert count.total == sum(parameter.numel() for parameter in model.parameters())
        inner = (
            sum(parameter.numel() for parameter in model.model.parameters()) - model.model.embed_tokens.weight.numel()
        )
        assert count.total_without_embedding == inner
        expert = model.model.layers[0].mlp.experts
        one = expert.gate_up_proj[0].numel() + expert.down_proj[0].numel()
        unused = (config.num_experts - 1) * one * config.num_hidden_layers
        assert count.active == count.total - unused

    def test_an_untied_head_is_no_part_of_the_layers(self) -> None:
        tied, untied = (count_parameters(tiny_config(tie_word_embeddings=tie)) for tie in (True, False))
        assert untied.total - tied.total == untied.head == 128 * 64
        assert untied.active_without_embedding == tied.active_without_embedding


class TestFlops:
    def test_of_zaya1_8b(self) -> None:
        flops = flops_per_token(ZayaConfig(), 4096)
        assert flops.body + flops.experts == pytest.approx(4.52e9, rel=1e-3)
        assert flops.head == pytest.approx(3.22e9, rel=2e-3)
        assert flops.attention == 12 * 40 * 1024 * 4096
        assert flops.total == pytest.approx(9.76e9, rel=1e-3)
        assert flops_per_token(ZayaConfig(), 32768).attention == pytest.approx(16.1e9, rel=1e-3)
        assert "6 x 753,608,528 active parameters" in flops.formula
        assert "12 x 40 x 1024 x 4096 of attention" in flops.formula

    def test_the_matrices_do_what_torch_counts(self) -> None:
        """torch counts a forward and backward pass itself; of it are no vectors, which are in our 6 x parameters."""
        from torch.utils.flop_counter import FlopCounterMode

        config = tiny_config(
            num_hidden_layers=2, hidden_size=128, moe_intermediate_size=256, vocab_size=512, num_experts=2
        )
        config._attn_implementation = "eager"  # of other kinds torch counts nothing
        model = ZayaForCausalLM(config)
        ids = torch.randint(3, 512, (1, 64))
        with FlopCounterMode(display=False) as counter:
            model(ids).logits.sum().backward()
        counted = counter.get_total_flops() / 64
        flops = flops_per_token(config, 64)
        assert flops.at(0.0) == pytest.approx(counted, rel=0.02)

    def test_what_the_mask_leaves(self) -> None:
        config = tiny_config(layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=5)
        flops = flops_per_token(config, 12)
        full = sum(token + 1 for token in range(12)) / 12
        window = sum(min(token + 1, 5) for token in range(12)) / 12
        width = 4 * 16
        assert flops.attention == 12 * width * (2 * 12 + 2 * 5)
        assert flops.causal_attention == pytest.approx(12 * width * (2 * full + 2 * window))
        assert flops.causal == pytest.approx(flops.total - flops.attention + flops.causal_attention)

    def test_skips(self) -> None:
        flops = flops_per_token(tiny_config(), 32, skip_rate=0.25)
        assert flops.total == flops.at(0.25) == flops.at(0) - 0.25 * flops.experts
        assert flops.recomputed == pytest.approx(flops.total + (flops.total - flops.head) / 3)
        with pytest.raises(ValueError, match="skip_rate is 2; expected 0 to 1"):
            flops_per_token(tiny_config(), 32, skip_rate=2)
        with pytest.raises(ValueError, match="sequence_length is 0"):
            flops_per_token(tiny_config(), 0)

    @pytest.mark.parametrize(
        ("name", "narrow", "wide"),
        [
            ("AMD Instinct MI300X", 1307.4, 163.4),
            ("AMD Instinct MI325X", 1307.4, 163.4),
            ("AMD Instinct MI355X", 2516.6, 157.3),
            ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
            ("NVIDIA H100 PCIe", 756.0, 51.2),
            ("NVIDIA H100 NVL", 835.5, 60.0),
            ("NVIDIA H200", 989.4, 66.9),
            ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
            ("NVIDIA A10", 125.0, 31.2),
            ("NVIDIA A10G", None, None),
            ("NVIDIA L4", 121.0, 30.3),
            ("NVIDIA L40S", 362.1, 91.6),
            ("AMD EPYC", None, None),
        ],
    )
    def test_peaks(self, name: str, narrow: float | None, wide: float | None) -> None:
        assert peak_tflops(name, "bfloat16") == narrow
        assert peak_tflops(name, "float32") == wide

    def test_an_unknown_precision(self) -> None:
        with pytest.raises(ValueError, match="precision is 'fp8'"):
            peak_tflops("NVIDIA H100", "fp8")


class TestMemory:
    def items(self, config: TrainingConfig, model: ZayaConfig) -> dict[str, int]:
        return {item.name: item.bytes for item in memory.estimate_memory(config, model)}

    @pytest.mark.parametrize("optimizer", ["hybrid_muon", "adamw"])
    def test_what_stays_is_what_torch_holds(self, optimizer: str) -> None:
        model_config = tiny_config()
        model = ZayaForCausalLM(model_config)
        items = self.items(run_config({}, optimizer={"name": optimizer, "lr": 1e-3}), model_config)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        assert items["weights"] == items["gradients"] == weights
        built: torch.optim.Optimizer = build_optimizer(model)
        if optimizer == "adamw":
            built = torch.optim.AdamW(model.parameters())
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            built.step()
        held = sum(
            value.nbytes
            for state in built.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1  # AdamW counts its steps besides
        )
        # Of one-element parameters there are none here, so what is left out are the counters.
        assert items["optimizer state"] == held

    def test_zaya1_8b(self) -> None:
        config = run_config({}, precision="bfloat16", activation_checkpointing=True, ema_decay=0.99)
        items = self.items(config, ZayaConfig())
        assert items["weights"] == items["gradients"] == 8_840_488_784 * 4
        assert items["weights"] == pytest.approx(35.4e9, rel=2e-3)
        assert items["optimizer state"] == pytest.approx((33.2 + 4.4) * 1e9, rel=2e-3)
        assert items["average of the weights"] == items["weights"]
        assert items["weights in bf16"] == pytest.approx(17.7e9, rel=2e-3)

    def test_the_peak_is_the_larger_half(self) -> None:
        def item(size: int, when: str) -> memory.MemoryItem:
            return memory.MemoryItem("x", size, "", when)

        items = [item(5, "always"), item(3, "forward and backward"), item(2, "optimizer"), item(2, "optimizer")]
        assert memory.peak_bytes(items) == 9

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_activations_are_about_what_torch_keeps(self, precision: str, checkpointing: bool) -> None:
        config = tiny_config(
            num_hidden_layers=6, hidden_size=112, head_dim=20, num_attention_heads=6, moe_intermediate_size=72
        )
        model = ZayaForCausalLM(config).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: dict[int, int] = {}
        alive = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            # Copies of weights in bf16 are counted apart, in the table as here.
            if storage.data_ptr() not in weights and tensor.shape[-2:] != (112, 144) and tensor.shape[-2:] != (72, 112):
                kept[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)  # else its memory would be another's
            return tensor

        ids = torch.randint(3, 128, (2, 128))
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            model(ids, labels=ids, use_cache=False)
        settings = run_config({}, precision=precision, activation_checkpointing=checkpointing)
        settings = settings.model_copy(update={"data": settings.data.model_copy(update={"sequence_length": 128})})
        estimated = self.items(settings, config)["activations"]
        if checkpointing:  # the layer that is computed again is there later
            estimated -= 256 * memory.activation_bytes(config, precision)
        assert estimated == pytest.approx(sum(kept.values()), rel=0.2)

    def test_lora_trains_adapters_alone(self) -> None:
        peft = pytest.importorskip("peft")
        from zaya_hf.training import lora_targets

        config = tiny_config()
        model = ZayaForCausalLM(config)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**lora_targets(model, layers=[1, 2]), r=3))
        trained = sum(parameter.nbytes for parameter in adapted.parameters() if parameter.requires_grad)
        settings = run_config({}, model={"checkpoint": "base", "lora": {"r": 3, "layers": [1, 2]}, "dtype": "bfloat16"})
        items = self.items(settings, config)
        assert items["adapters"] == items["gradients"] == trained
        assert items["weights"] == count_parameters(config).total * 2


class TestShow:
    def test_the_page_is_a_settings_file(self, tmp_path: Path) -> None:
        config = load("cpu-small")
        text = show.describe(config, 2)
        file = tmp_path / "again.yaml"
        file.write_text(text, encoding="utf-8")
        assert load(file) == config

    def test_tables(self) -> None:
        text = show.describe(load("pretrain-4k"), 1024)
        for words in (
            "tokens of a step         16,777,216  4,096 rows x 4,096",
            "steps                       476,838",
            "accumulation                      4  micro-batches of 1 row on each of 1024 processes",
            "total   8,840,488,784  8.84",
            "        8,303,355,728  without 537,133,056 of embedding, which is the head too",
            "        753,608,528  without",
            "counted  9.758e+09  6 x 753,608,528 active parameters without embedding",
            "days of one AMD Instinct MI300X at its peak, 1307.4 TFLOP/s in bfloat16",
            "weights                32.93 GiB  8,840,488,784 x 4 bytes (float32)",
            "most at a time",
        ):
            assert words in text

    def test_rows_that_do_not_go_up(self) -> None:
        text = show.describe(run_config({"vocab_size": 300}), 2)
        assert "accumulation          2  micro-batches of 2 rows on each of 2 processes" in text
        assert "empty rows            2  in every step" in text

    def test_a_checkpoint_that_is_not_there_yet(self, tmp_path: Path) -> None:
        place = tmp_path / "earlier"
        config = run_config({}, model={"checkpoint": str(place), "overrides": {"rope_theta": 1e6}})
        text = show.describe(config)
        assert "parameters, FLOPs and memory: not known, " in text
        assert str(place) in text.partition("# length")[2]
        tiny_config().save_pretrained(place)
        assert f"total   {count_parameters(tiny_config()).total:,}" in show.describe(config)

    def test_a_fresh_model_with_a_wrong_config(self) -> None:
        with pytest.raises(ValueError, match=r"model\.config\.hiden_size: .* did you mean hidden_size"):
            show.describe(run_config({"hiden_size": 3, "vocab_size": 9}))
