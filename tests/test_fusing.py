"""`fuse_for_inference`: the same outputs, the same state dict, and an end as soon as something makes it wrong."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from zaya_hf import ZayaForCausalLM
from zaya_hf.fusing import FusedLinears
from zaya_hf.modeling_zaya import ZayaLinear
from zaya_hf.ops.linear import can_pack, packed
from zaya_hf.testing import assert_equal_logits, random_ids, record_run, redraw, tiny_config

# Wide enough for oneDNN, so that packed weights are really multiplied from.
WIDE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}

packs = pytest.mark.skipif(not can_pack(torch.zeros(8, 8)), reason="this build of torch packs no weights")


def build(dtype: torch.dtype = torch.float32, **changes: Any) -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(**changes)).to(dtype), seed=5)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    library = FusedLinears.__call__

    def spy(self: FusedLinears, *args: Any) -> Any:
        calls.append(1)
        return library(self, *args)

    monkeypatch.setattr(FusedLinears, "__call__", spy)
    return calls


@torch.no_grad()
def decoded(model: ZayaForCausalLM, ids: Tensor) -> Tensor:
    """Logits of a prompt of 6 and of the other tokens one by one."""
    cache = DynamicCache(config=model.config)
    parts = [ids[:, :6], *ids[:, 6:].split(1, dim=1)]
    return torch.cat([model(part, cache=cache, use_cache=True).logits for part in parts], dim=1)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"num_key_value_heads": 4}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_outputs_are_the_same(dtype: torch.dtype, changes: dict[str, Any], fused_calls: list[int]) -> None:
    model, ids = build(dtype, **changes), random_ids(2, 12)
    with torch.no_grad():
        want = record_run(model, ids)
    assert model.fuse_for_inference() is model
    assert model.is_fused
    with torch.no_grad():
        got = record_run(model, ids)
    assert len(fused_calls) == 4
    if dtype == torch.bfloat16:
        assert (got.logits - want.logits).norm() <= 0.05 * want.logits.norm()
    else:
        assert_equal_logits(got, want)


@packs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_packed_outputs_are_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(torch.float64, **WIDE)
    ids = random_ids(2, 12)
    exact, plain = decoded(model, ids), model.to(dtype)
    if not can_pack(torch.zeros(8, 8, dtype=dtype)):
        pytest.skip(f"this processor packs no {dtype}")
    unpacked = decoded(plain, ids)
    plain.fuse_for_inference(pack_weights=True)
    used: list[int] = []
    library = packed.linear
    monkeypatch.setattr(packed, "linear", lambda *args: used.append(1) or library(*args))
    got = decoded(plain, ids)
    assert used
    if dtype == torch.float32:
        torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
    else:
        assert (got - exact).norm() <= 1.5 * (unpacked - exact).norm() + 0.02 * exact.norm()


def test_nothing_shows_in_the_state_dict(tmp_path: Any) -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    model.fuse_for_inference(pack_weights=can_pack(torch.zeros(8, 8)))
    after = model.state_dict()
    assert list(after) == list(before)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.save_pretrained(tmp_path / "saved")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = ZayaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(loaded[name], before[name]) for name in before if name != "lm_head.weight")
    state = torch.load(tmp_path / "state.pt")
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_parameters_stay_parameters(fused_calls: list[int]) -> None:
    """Written to in place, they are the fused weight; with gradients wanted they are used one by one."""
    model, ids = build().fuse_for_inference(), random_ids(1, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "v_proj" in name:
                parameter.mul_(1.5)
    other = build()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_equal_logits(record_run(model, ids), record_run(other, ids))
    assert fused_calls
    fused_calls.clear()
    model(ids, labels=ids).loss.backward()
    other(ids, labels=ids).loss.backward()
    assert not fused_calls
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, same.grad)


def ends_by_casting(model: ZayaForCausalLM) -> ZayaForCausalLM:
    return model.to(torch.float64)


def ends_by_assigning(model: ZayaForCausalLM) -> ZayaForCausalLM:
    model.load_state_dict(build().state_dict(), assign=True)
    return model


def ends_by_replacing(model: ZayaForCausalLM) -> ZayaForCausalLM:
    for layer in model.model.layers:
        old = layer.self_attn.qkv_proj.k_proj
        layer.self_attn.qkv_proj.k_proj = nn.Linear(old.in_features, old.out_features, bias=False)
        nn.init.constant_(layer.self_attn.qkv_proj.k_proj.weight, 0.01)
    return model


def ends_by_hooking(model: ZayaForCausalLM) -> ZayaForCausalLM:
    for layer in model.model.layers:
        layer.self_attn.qkv_proj.q_proj.register_forward_hook(lambda module, args, output: output * 2)
    return model


@pytest.mark.parametrize(
    "change",
    [ends_by_casting, ends_by_assigning, ends_by_replacing, ends_by_hooking, copy.deepcopy],
    ids=lambda f: f.__name__,
)
def test_what_makes_it_wrong_ends_it(change: Any, fused_calls: list[int]) -> None:
    ids = random_ids(1, 8)
    fused, plain = change(build().fuse_for_inference()), change(build())
    with torch.no_grad():
        got, want = record_run(fused, ids), record_run(plain, ids)
    assert not fused_calls
    assert torch.equal(got.logits, want.logits)


def test_a_pickled_model_is_a_plain_one(fused_calls: list[int]) -> None:
    model, ids = build().fuse_for_inference(), random_ids(1, 8)
    loaded = pickle.loads(pickle.dumps(model))
    assert not loaded.is_fused
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, build()(ids).logits)
    assert not fused_calls


def test_fusing_twice_and_unfusing(fused_calls: list[int]) -> None:
    model, ids = build(), random_ids(1, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = [id(parameter) for parameter in model.parameters()]
    for pack in (False, False, True, False):
        if pack and not can_pack(torch.zeros(8, 8)):
            continue
        model.fuse_for_inference(pack_weights=pack)
        has_packed = [m.packed_experts is not None for m in model.modules() if hasattr(m, "packed_experts")]
        assert has_packed == [pack] * 4
    assert model.unfuse() is model
    assert not model.is_fused
    model.unfuse()
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    assert len(set(storages)) == len(storages)
    with torch.no_grad():
        model(ids)
    assert not fused_calls


def test_training_ends_it_and_refuses_it() -> None:
    model = build().fuse_for_inference()
    model.train()
    assert not model.is_fused
    with pytest.raises(ValueError, match=r"call eval\(\) first"):
        model.fuse_for_inference()


def test_adapters_are_refused() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: ZayaLinear):
            super().__init__()
            self.base = base

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.base(x)

    model = build()
    projection = model.model.layers[1].self_attn.qkv_proj
    projection.v_proj_current = Adapter(projection.v_proj_current)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.qkv_proj holds a Adapter"):
        model.fuse_for_inference()
    assert not model.is_fused


def test_what_is_not_there_is_refused() -> None:
    with torch.device("meta"):
        model = ZayaForCausalLM(tiny_config()).eval()
    with pytest.raises(ValueError, match="meta device"):
        model.fuse_for_inference()
    with pytest.raises(ValueError, match=r"float64 on cpu, which oneDNN does not pack"):
        build(torch.float64).fuse_for_inference(pack_weights=True)
