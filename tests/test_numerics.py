"""Which numbers are kept in which precision, through every way in which a model gets its dtype."""

from __future__ import annotations

import copy
import pickle
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as StockForCausalLM

import naive_zaya
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import TINY, random_ids, record_run, redraw, tiny_config

# Close to each other and far from 0: bf16 keeps 2 of these 5 apart.
CLOSE = torch.tensor([8.0, 8.003, 8.006, 8.009, 0.0])
# 1 / 5e6 ** (2 i / 8)
FREQUENCIES = torch.tensor([1.0, 0.021147, 4.4721e-4, 9.4574e-6])


@pytest.fixture
def model() -> ZayaForCausalLM:
    """Every parameter drawn; the biases of layer 1 are `CLOSE`."""
    model = redraw(ZayaForCausalLM(tiny_config()))
    model.model.layers[1].mlp.gate.balancing_biases.copy_(CLOSE)
    return model


@pytest.fixture
def folder(model: ZayaForCausalLM, tmp_path: Path) -> Path:
    with pytest.warns(UserWarning, match="skip bias"):
        model.save_pretrained(tmp_path)
    return tmp_path


def biases_of(model: nn.Module) -> list[Tensor]:
    return [layer.mlp.gate.balancing_biases for layer in model.model.layers]


def poison() -> None:
    """Leave NaN in the memory that new tensors are about to get."""
    for size in (4, 5, 8, 64, 128 * 64, 10_000):
        blocks = [torch.full((size,), torch.nan) for _ in range(8)]
        del blocks


def from_meta(model: ZayaForCausalLM) -> ZayaForCausalLM:
    with torch.device("meta"):
        made = ZayaForCausalLM(copy.deepcopy(model.config))
    poison()
    made.to_empty(device="cpu")
    made.load_state_dict(model.state_dict())
    return made.eval()


def accelerated(model: ZayaForCausalLM) -> ZayaForCausalLM:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.unwrap_model(accelerator.prepare_model(model))
    accelerator.free_memory()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # or it would hold for later tests
    return prepared


WAYS: dict[str, Callable[[ZayaForCausalLM], ZayaForCausalLM]] = {
    "to-bf16": lambda m: m.to(torch.bfloat16),
    "bfloat16()": lambda m: m.bfloat16(),
    "half()": lambda m: m.half(),
    "to-device-and-dtype": lambda m: m.to("cpu", torch.float16),
    "double()": lambda m: m.double(),
    "there-and-back": lambda m: m.bfloat16().float().half().double().float(),
    "base-model-only": lambda m: (m.model.bfloat16(), m)[1],
    "one-router-only": lambda m: (m.model.layers[1].mlp.gate.bfloat16(), m)[1],
    "deepcopy": lambda m: copy.deepcopy(m.bfloat16()),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.bfloat16())),
    "meta-to-empty": from_meta,
    "accelerate-bf16": accelerated,
}


# -------------------------------------------------------------------------------------------------- balancing biases
@pytest.mark.parametrize("way", WAYS)
def test_biases_stay_fp32_bitwise(way: str, model: ZayaForCausalLM) -> None:
    before = [b.clone() for b in biases_of(model)]
    after = biases_of(WAYS[way](model))
    assert all(b.dtype == torch.float32 for b in after)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert len(set(after[1].tolist())) == 5
    # ... and still are the buffers that the state dict and the router know
    for _ in range(100):
        after[1] += 1e-3
    torch.testing.assert_close(after[1], CLOSE + 0.1, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "auto", None])
@pytest.mark.parametrize("stored", ["fp32", "bf16-weights"])
def test_from_pretrained_keeps_the_biases_of_the_file(
    stored: str, dtype: Any, model: ZayaForCausalLM, tmp_path: Path
) -> None:
    if stored == "bf16-weights":
        model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="skip bias"):
        model.save_pretrained(tmp_path)
    poison()
    loaded = ZayaForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    on_disk = load_file(tmp_path / "model.safetensors")
    for index, biases in enumerate(biases_of(loaded)):
        kept = on_disk[f"model.layers.{index}.mlp.gate.balancing_biases"]
        assert kept.dtype == biases.dtype == torch.float32
        assert torch.equal(biases, kept)
        assert torch.equal(biases, biases_of(model)[index])
    wanted = {torch.float32, torch.bfloat16, torch.float16, torch.float64} if dtype in ("auto", None) else {dtype}
    assert {p.dtype for p in loaded.parameters()} <= wanted
    assert len({p.dtype for p in loaded.parameters()}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, "auto"])
def test_biases_of_a_bf16_file_become_fp32(dtype: Any, model: ZayaForCausalLM, folder: Path) -> None:
    """The published files hold bf16 biases: their values are kept, their precision from then on is fp32."""
    file = folder / "model.safetensors"
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(narrow, file, metadata={"format": "pt"})
    loaded = ZayaForCausalLM.from_pretrained(folder, dtype=dtype)
    for index, biases in enumerate(biases_of(loaded)):
        assert biases.dtype == torch.float32
        assert torch.equal(biases, narrow[f"model.layers.{index}.mlp.gate.balancing_biases"].float())


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_load_state_dict_never_narrows_the_biases(assign: bool, model: ZayaForCausalLM) -> None:
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    other = ZayaForCausalLM(tiny_config())
    other.load_state_dict(narrow, assign=assign)
    for index, biases in enumerate(biases_of(other)):
        assert biases.dtype == torch.float32
        assert torch.equal(biases, narrow[f"model.layers.{index}.mlp.gate.balancing_biases"].float())


def test_close_biases_choose_alike_in_bf16(model: ZayaForCausalLM) -> None:
    """In bf16 the biases 8.003, 8.006 and 8.009 would all be 8 and lowest index would win."""
    gate = model.model.layers[1].mlp.gate
    x, state = torch.zeros(1, 1, 64), torch.zeros(1, 1, 16)
    with torch.no_grad():
        gate.router_mlp.out_proj.weight.zero_()  # equal probabilities: the biases alone choose
        assert gate(x, state)[1].item() == 3
        model.bfloat16()
        assert gate(x.bfloat16(), state.bfloat16())[1].item() == 3


# ------------------------------------------------------------------------------------------------- rotary frequencies
@pytest.mark.parametrize("way", [*WAYS, "from-pretrained-bf16"])
def test_rotary_frequencies_are_fp32_each_time(way: str, model: ZayaForCausalLM, folder: Path) -> None:
    poison()
    if way == "from-pretrained-bf16":
        made = ZayaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    else:
        made = WAYS[way](model)
    frequencies = made.model.rotary.frequencies("hybrid", torch.device("cpu"))
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, FREQUENCIES, rtol=5e-5, atol=0)
    exact = 1.0 / 5e6 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8)
    assert torch.equal(frequencies, exact)
    assert not any("rotary" in name for name in made.state_dict())
    assert not any("rotary" in name for name, _ in made.named_buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rotary_tables_are_fp32_or_wider(dtype: torch.dtype, model: ZayaForCausalLM) -> None:
    """At position 100,000 an angle in bf16 would be off by hundreds of radians."""
    seen: list[tuple[Tensor, Tensor]] = []
    model.to(dtype)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[2]))
    model(random_ids(1, 3), position_ids=torch.arange(100_000, 100_003)[None])
    wide = torch.promote_types(dtype, torch.float32)
    angles = torch.arange(100_000, 100_003).double()[:, None] * model.model.rotary.frequencies(
        "hybrid", torch.device("cpu")
    ).double().repeat(2)
    assert len(seen) == 4
    for cos, sin in seen:
        assert cos.dtype == sin.dtype == wide
        torch.testing.assert_close(cos[0].double(), angles.cos(), rtol=0, atol=1e-2 if wide == torch.float32 else 1e-12)
        torch.testing.assert_close(sin[0].double(), angles.sin(), rtol=0, atol=1e-2 if wide == torch.float32 else 1e-12)


# ---------------------------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_parameter_stays_fp32(dtype: torch.dtype, model: ZayaForCausalLM) -> None:
    """One dtype for all parameters: that is what FSDP2 wants of a group. Only the biases, a buffer, differ."""
    model.to(dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    others = {name: b.dtype for name, b in model.named_buffers() if not name.endswith("balancing_biases")}
    assert not others


def test_meta_loading_gives_equal_logits(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 8)
    made = from_meta(model)
    assert torch.equal(made(ids).logits, model(ids).logits)
    for name, tensor in model.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor), name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fresh_model(device: str) -> None:
    """Temperature 1 (at 0 every key would be zero), no preference among experts, the skip slot behind."""
    if device == "meta":
        with torch.device("meta"):
            model = ZayaForCausalLM(tiny_config())
        assert all(p.device.type == "meta" for p in model.parameters())
        model = model.to_empty(device="cpu")
        model.init_weights()
    else:
        model = ZayaForCausalLM(tiny_config())
    for index, layer in enumerate(model.model.layers):
        assert (layer.self_attn.qk_norm.temp == 1).all()
        assert layer.mlp.gate.balancing_biases.tolist() == [0.0, 0.0, 0.0, 0.0, -1.0]
        assert (layer.input_layernorm.weight == 1).all()
        assert index == 0 or (layer.mlp.gate.router_states_scale == 1).all()
        for merge in (layer.post_attention_residual_scale, layer.post_mlp_residual_scale):
            assert (merge.hidden_states_scale == 1).all()
            assert (merge.residual_scale == 1).all()
            assert not merge.hidden_states_bias.any()
            assert not merge.residual_bias.any()
        assert 0.01 < float(layer.mlp.experts.gate_up_proj.detach().std()) < 0.03
    assert (model.model.input_hidden_states_scale == 1).all()
    output = model(random_ids(2, 6), use_cache=True)
    for cached in output.cache.layers:
        torch.testing.assert_close(cached.keys.norm(dim=-1), torch.full((2, 2, 6), 4.0))
    assert not model(random_ids(2, 6), output_router_logits=True).tokens_per_slot[:, -1].any()


# -------------------------------------------------------------------------------------------------------------- float64
def test_a_float64_model_is_float64_throughout(model: ZayaForCausalLM) -> None:
    ids = random_ids(2, 9, seed=2)
    wrong: list[str] = []

    def watch(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
                    wrong.append(name)

        return hook

    single = model(ids).logits
    model.double()
    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    output = model(ids, labels=ids)
    assert not wrong
    assert output.logits.dtype == output.loss.dtype == torch.float64
    output.loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float64}

    exact = torch.stack([naive_zaya.logits(model.state_dict(), model.config, row) for row in ids.tolist()])
    double_error = (output.logits - exact).abs().max()
    single_error = (single - exact).abs().max()
    assert single_error < 1e-4
    assert double_error < 1e-11
    assert double_error < single_error / 1e4


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_float64_works_with_every_experts_implementation(implementation: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(experts_implementation=implementation)).double())
    ids = random_ids(1, 6, seed=2)
    exact = naive_zaya.logits(model.state_dict(), model.config, ids[0].tolist())
    torch.testing.assert_close(model(ids).logits[0], exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("padded", [False, True])
def test_float64_decoding_is_as_exact_as_one_pass(padded: bool) -> None:
    """States, keys and tables are float64 as well: an fp32 step anywhere would show at 1e-7."""
    model = redraw(
        ZayaForCausalLM(tiny_config(layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=4)).double()
    )
    ids, mask = random_ids(2, 9), torch.ones(2, 9, dtype=torch.int64)
    if padded:
        mask[0, :3] = 0
    with torch.no_grad():
        want = model(ids, attention_mask=mask).logits
        output = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        parts = [output.logits]
        for t in range(5, 9):
            output = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=output.cache)
            parts.append(output.logits)
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], want[real], rtol=0, atol=1e-11)


# ------------------------------------------------------------------------------------------------------ half precision
def narrow_and_wide(seed: int, forced: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of our bf16 model, of stock's, and of the fp32 model with the same (bf16) weights. The skip bias is -1.
    Forced: one expert per layer wins by far, so that rounding cannot change the routing."""
    ids = random_ids(2, 24, seed=seed)
    wide = redraw(ZayaForCausalLM(tiny_config()), seed=seed)
    for index, biases in enumerate(biases_of(wide)):
        biases[-1] = -1.0
        if forced:
            biases[index % 4] += 3.0
    wide.bfloat16().float()
    ours = ZayaForCausalLM(tiny_config())
    ours.load_state_dict(wide.state_dict())
    stock = StockForCausalLM(StockConfig(**TINY))
    stock.load_state_dict(wide.state_dict())
    stock.bfloat16().eval()
    for mine, theirs in zip(biases_of(wide), biases_of(stock), strict=True):
        theirs.data = mine.clone()  # stock would round them; that fault is not measured here
    with torch.no_grad():
        return ours.bfloat16().eval()(ids).logits.float(), stock(ids).logits.float(), wide(ids).logits


@pytest.mark.parametrize("seed", range(10))
def test_bf16_logits_are_at_least_as_close_to_fp32_as_stocks(seed: int) -> None:
    ours, stock, wide = narrow_and_wide(seed, forced=True)
    assert (ours - wide).norm() <= 1.1 * (stock - wide).norm()
    assert (ours - wide).norm() < 0.1 * wide.norm()


def test_bf16_logits_with_free_routing_are_as_close_as_stocks() -> None:
    """Rounding tips some choices, in either model at other tokens, so a single draw says little: the median does."""
    ratios = []
    for seed in range(20, 37):
        ours, stock, wide = narrow_and_wide(seed, forced=False)
        ratios.append(float((ours - wide).norm() / (stock - wide).norm()))
    assert statistics.median(ratios) <= 1.1


def test_fp16_with_large_embeddings_is_finite_because_the_stream_is_fp32() -> None:
    """Embeddings x 3000; the stream then exceeds fp16's 65,504 and the logits do not."""
    ids = random_ids(2, 12)
    model = redraw(ZayaForCausalLM(tiny_config()))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3000)
    model.half()
    output = model(ids, output_hidden_states=True)
    assert output.logits.dtype == torch.float16
    assert output.logits.isfinite().all()
    with torch.no_grad():
        model.model.input_hidden_states_scale.mul_(100)
    output = model(ids, output_hidden_states=True)
    assert max(h.abs().max() for h in output.hidden_states[:-1]) > 65_504
    assert output.logits.isfinite().all()
    narrow = ZayaForCausalLM(tiny_config(residual_in_fp32=False)).half().eval()
    narrow.load_state_dict(model.state_dict())
    assert not narrow(ids).logits.isfinite().all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("empty_first", [False, True], ids=["second-row-empty", "first-row-empty"])
def test_a_row_that_is_all_padding_stays_finite_and_apart(
    empty_first: bool, dtype: torch.dtype, implementation: str
) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(attn_implementation=implementation))).to(dtype)
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    empty, full = (0, 1) if empty_first else (1, 0)
    mask[empty] = 0
    output = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    assert output.logits.isfinite().all()
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        solo = model(ids[full : full + 1]).logits
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(output.logits[full], solo[0], rtol=0, atol=tolerance)
        both = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None)
        alone = model.generate(ids[full : full + 1], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert both.shape == (2, 16)
    if dtype == torch.float32:
        assert torch.equal(both[full], alone[0])


def test_a_batch_that_is_all_padding_has_loss_0() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 6)
    output = model(ids, attention_mask=torch.zeros_like(ids), labels=torch.full_like(ids, -100))
    assert output.logits.isfinite().all()
    assert output.loss.item() == 0
    output.loss.backward()
    assert all(not p.grad.any() for p in model.parameters())


# --------------------------------------------------------------------------------------------- switches and autocast
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_fp32_logits(tied: bool, bias: bool) -> None:
    """The head multiplies in fp32; its weight, tied or not, stays in the model's dtype."""
    changes = {"tie_word_embeddings": tied, "lm_head_bias": bias}
    model = redraw(ZayaForCausalLM(tiny_config(fp32_logits=True, **changes))).bfloat16()
    plain = redraw(ZayaForCausalLM(tiny_config(**changes))).bfloat16()
    ids = random_ids(2, 8)
    hidden = model.model(ids).last_hidden_state
    assert hidden.dtype == model.lm_head.weight.dtype == torch.bfloat16
    logits = model(ids).logits
    assert logits.dtype == torch.float32
    exact = hidden.double() @ model.lm_head.weight.double().T
    exact = exact + (model.lm_head.bias.double() if bias else 0)
    torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5)
    assert plain(ids).logits.dtype == torch.bfloat16
    torch.testing.assert_close(plain(ids).logits, logits.bfloat16(), rtol=2**-7, atol=0.05)
    model(ids, labels=ids).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("padded", [False, True])
def test_autocast(padded: bool, implementation: str) -> None:
    """fp32 parameters under bf16 autocast, forward and backward: fp32 gradients that resemble those of fp32."""
    model = redraw(ZayaForCausalLM(tiny_config(experts_implementation=implementation)))
    for index, biases in enumerate(biases_of(model)):
        biases[index % 4] += 3.0  # routing cannot flip
    ids, mask = random_ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    if padded:
        mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    assert output.hidden_states[1].dtype == torch.float32
    assert output.logits.dtype == torch.bfloat16
    assert output.loss.dtype == torch.float32
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        if want[name].norm() > 1e-3:
            assert (parameter.grad - want[name]).norm() < 0.25 * want[name].norm(), name


def test_autocast_fills_a_cache_that_decodes() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(2, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = model(ids).logits
        output = model(ids[:, :4], use_cache=True)
        got = [model(ids[:, t : t + 1], cache=output.cache).logits for t in (4, 5)]
    torch.testing.assert_close(torch.cat(got, 1), want[:, 4:], rtol=0, atol=0.3)


def test_the_biases_of_an_fp32_run_choose_in_bf16_too(model: ZayaForCausalLM) -> None:
    """Same picks for clear choices, whatever the dtype: the biases are added in fp32."""
    ids = random_ids(2, 12)
    wide = record_run(model, ids)
    narrow = record_run(model.bfloat16(), ids)
    clear = wide.gaps[..., 0] > 0.05
    assert clear.sum() > 10
    assert torch.equal(wide.slots[..., 0][clear], narrow.slots[..., 0][clear])
