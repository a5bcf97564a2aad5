"""`ops.cca_mix` against CCA written token by token (naive_zaya.cca): any heads, widths, documents, padding, states."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import naive_zaya
from cca_problems import (
    INPUTS,
    LAYOUTS,
    Document,
    Problem,
    assert_same,
    describe,
    draw,
    layout,
    mix,
    naive,
    with_random_past,
)
from zaya_hf import ZayaForCausalLM, ops
from zaya_hf.testing import random_ids, redraw, tiny_config

# query heads, key/value heads, head width
SHAPES = [(1, 1, 2), (2, 1, 6), (4, 2, 16), (6, 3, 8), (3, 3, 4), (8, 2, 10), (5, 1, 8), (4, 2, 48), (9, 3, 2)]
WIDTHS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4)]


def shape_id(value: Any) -> str:
    return "-".join(map(str, value))


# ------------------------------------------------------------------------------------------------ forward and gradients
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"widths-{shape_id(w)}")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"heads-{shape_id(s)}")
def test_equals_the_definition_with_all_gradients(
    shape: tuple[int, int, int], widths: tuple[int, int], name: str, test_seed: int
) -> None:
    rows, length, documents, with_past = layout(name)
    problem = draw(*shape, *widths, rows, length, test_seed + sum(shape), torch.float64)
    leaves = problem.leaves() | with_random_past(documents, problem, with_past, test_seed + 1)
    reach, states = describe(documents, rows, length, problem.look_back)
    assert_same(mix(problem, reach=reach, states=states), naive(problem, documents), leaves)


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"widths-{shape_id(w)}")
@pytest.mark.parametrize("name", ["one-document-per-row", "rows-with-a-past", "one-token-with-a-past"])
def test_without_reach_a_row_is_one_document(name: str, widths: tuple[int, int]) -> None:
    """`reach` None and states without an index: the short way that plain prompts and decoding take."""
    rows, length, documents, with_past = layout(name)
    problem = draw(4, 2, 6, *widths, rows, length, 5, torch.float64)
    leaves = problem.leaves() | with_random_past(documents, problem, with_past, 6)
    states = None
    if with_past:
        states = ops.SegmentStates(
            torch.stack([d.past for d in documents]), torch.stack([d.past_value for d in documents])
        )
    assert_same(mix(problem, states=states), naive(problem, documents), leaves)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"heads-{shape_id(s)}")
def test_fp32_is_within_fp32_of_float64(shape: tuple[int, int, int], name: str) -> None:
    rows, length, documents, with_past = layout(name)
    problem = draw(*shape, 2, 2, rows, length, 17, torch.float32)
    with_random_past(documents, problem, with_past, 18)
    reach, states = describe(documents, rows, length, problem.look_back)
    got = mix(problem, reach=reach, states=states)
    assert all(out.dtype == torch.float32 for out in got)
    exact = Problem({k: v.detach().double() for k, v in problem.tensors.items()}, problem.head_dim, problem.look_back)
    for d in documents:
        if d.past is not None and d.past_value is not None:
            d.past, d.past_value = d.past.detach().double(), d.past_value.detach().double()
    for g, w in zip(got, naive(exact, documents), strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)


@given(data=st.data())
def test_random_layouts(data: st.DataObject) -> None:
    """Documents anywhere, padding anywhere, a past or none: what the lists above do not think of."""
    groups = data.draw(st.integers(1, 3), "key/value heads")
    heads = groups * data.draw(st.integers(1, 3), "query heads per key/value head")
    widths = (data.draw(st.integers(1, 3), "width0"), data.draw(st.integers(1, 4), "width1"))
    rows, length = data.draw(st.integers(1, 3), "rows"), data.draw(st.integers(1, 9), "length")
    documents = []
    for row in range(rows):
        column = 0
        while column < length:
            size = data.draw(st.integers(1, length - column))
            if data.draw(st.booleans()):
                documents.append(Document(row, column, size))
            column += size
    chosen = {n for n in range(len(documents)) if data.draw(st.booleans())}
    problem = draw(heads, groups, 4, *widths, rows, length, data.draw(st.integers(0, 2**16), "seed"), torch.float64)
    leaves = problem.leaves() | with_random_past(documents, problem, chosen, 3)
    reach, states = describe(documents, rows, length, problem.look_back)
    assert_same(mix(problem, reach=reach, states=states), naive(problem, documents), leaves)


# ---------------------------------------------------------------------------------------------------------- splitting
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"widths-{shape_id(w)}")
@pytest.mark.parametrize("case", range(4))
def test_pieces_with_states_in_one_row_equal_the_whole(widths: tuple[int, int], case: int, test_seed: int) -> None:
    """Cut a sequence anywhere, shuffle the pieces into one row with padding between them, and give each its state."""
    length = 11
    chance = random.Random(1000 * test_seed + case)
    whole = draw(4, 2, 6, *widths, 1, length, 31 + case, torch.float64)
    query, key, value = (out.detach() for out in mix(whole))

    cuts = sorted(chance.sample(range(1, length), chance.randint(1, 5)))
    pieces = list(zip([0, *cuts], [*cuts, length], strict=True))
    chance.shuffle(pieces)
    raw = torch.cat([whole.tensors["query"], whole.tensors["key"]], dim=-1)[0].detach()
    delayed = whole.tensors["value_delayed"][0].detach()
    padded_raw = torch.cat([raw.new_zeros(whole.look_back, raw.shape[1]), raw])

    order: list[int] = []  # column of the whole for each column of the row, -1: padding
    documents = []
    for begin, end in pieces:
        order += [-1] * chance.randint(0, 2)
        past_value = whole.tensors["nothing"].detach() if begin == 0 else delayed[begin - 1]
        past = padded_raw[begin : begin + whole.look_back].T
        documents.append(Document(0, len(order), end - begin, past, past_value))
        order += range(begin, end)
    take = torch.tensor([max(column, 0) for column in order])
    tensors = dict(whole.tensors)
    for name in INPUTS:
        tensors[name] = whole.tensors[name][:, take].detach()
    tensors["cos"], tensors["sin"] = whole.tensors["cos"][:, take], whole.tensors["sin"][:, take]
    row = Problem(tensors, whole.head_dim, whole.look_back)
    reach, states = describe(documents, 1, len(order), whole.look_back)

    real = torch.tensor([column >= 0 for column in order])
    for got, want in zip(mix(row, reach=reach, states=states), (query, key, value), strict=True):
        torch.testing.assert_close(got[:, real], want[:, take[real]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda w: f"widths-{shape_id(w)}")
@pytest.mark.parametrize("sizes", [(4, 1, 1, 5), (1,) * 6, (6, 5)], ids=lambda s: f"chunks-{shape_id(s)}")
def test_next_states_carry_rows_from_chunk_to_chunk(sizes: tuple[int, ...], widths: tuple[int, int]) -> None:
    length = sum(sizes)
    whole = draw(4, 2, 6, *widths, 2, length, 8, torch.float64)
    want = mix(whole)
    raw = torch.cat([whole.tensors["query"], whole.tensors["key"]], dim=-1)
    delayed = whole.tensors["value_delayed"]
    before = ops.initial_states(raw, delayed, whole.look_back, whole.tensors["nothing"])
    begin = 0
    for size in sizes:
        span = slice(begin, begin + size)
        tensors = dict(whole.tensors)
        for name in (*INPUTS, "cos", "sin"):
            tensors[name] = tensors[name][:, span]
        states = ops.SegmentStates(*before)
        for got, full in zip(mix(Problem(tensors, 6, whole.look_back), states=states), want, strict=True):
            torch.testing.assert_close(got, full[:, span], rtol=1e-12, atol=1e-12)
        before = ops.next_states(raw[:, span], delayed[:, span], before, states=states)
        begin += size
        padded = torch.cat([raw.new_zeros(2, whole.look_back, raw.shape[-1]), raw], dim=1)
        torch.testing.assert_close(
            before[0], padded[:, begin : begin + whole.look_back].transpose(1, 2), rtol=0, atol=0
        )
        torch.testing.assert_close(before[1], delayed[:, begin - 1], rtol=0, atol=0)


def test_next_states_take_the_last_real_token_of_the_last_document() -> None:
    """Right padding, a short last document, and a row without a real token, which keeps its state."""
    raw = torch.arange(1.0, 31.0).view(3, 10, 1)  # the value says row and column
    delayed = -raw
    before = (torch.full((3, 1, 3), 0.5), torch.full((3, 1), 0.25))
    documents = [Document(0, 0, 4), Document(0, 4, 3), Document(1, 0, 9), Document(1, 9, 1)]
    reach, _ = describe(documents, 3, 10, 3)
    qk, value = ops.next_states(
        raw, delayed, before, reach=reach, last=torch.tensor([6, 9, 0]), has_real=torch.tensor([True, True, False])
    )
    assert qk[:, 0].tolist() == [[5.0, 6.0, 7.0], [0.0, 0.0, 20.0], [0.5, 0.5, 0.5]]
    assert value[:, 0].tolist() == [-7.0, -20.0, 0.25]


# ------------------------------------------------------------------------------------------------------ single rules
@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.3, 1.7, 5.0])
def test_clamped_temperature(temperature: float) -> None:
    problem = draw(4, 2, 6, 2, 2, 1, 5, 2, torch.float64)
    with torch.no_grad():
        problem.tensors["temperature"].fill_(temperature)
    documents = [Document(0, 0, 5)]
    want = naive(problem, documents, clamp_temperature=True)
    assert_same(mix(problem, clamp_temperature=True), want, problem.leaves())
    # The same by hand: keys have length sqrt(D) times the factor, queries sqrt(D).
    factor = torch.tensor(temperature, dtype=torch.float64).clamp(1e-7, 2.0).exp()
    query, key, _ = mix(problem, clamp_temperature=True)
    torch.testing.assert_close(key.norm(dim=-1), (6**0.5 * factor).expand(1, 5, 2))
    torch.testing.assert_close(query.norm(dim=-1), torch.full((1, 5, 4), 6**0.5, dtype=torch.float64))


def test_temperature_is_linear_and_acts_on_keys_only() -> None:
    """The released models multiply by the temperature itself, per key/value head; a negative one turns keys round."""
    problem = draw(4, 2, 6, 2, 2, 1, 5, 2, torch.float64)
    plain = mix(problem)
    with torch.no_grad():
        problem.tensors["temperature"].mul_(torch.tensor([-2.0, 3.0]))
    scaled = mix(problem)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[1], plain[1] * torch.tensor([-2.0, 3.0])[:, None])
    torch.testing.assert_close(scaled[2], plain[2])


@pytest.mark.parametrize("reach", [None, torch.arange(6)[None].clamp_max(2)], ids=["no-reach", "reach"])
def test_second_convolution_sees_the_first_ones_bias_before_position_0(reach: Tensor | None) -> None:
    """With raw zeros every token, the first included, sees nothing but biases: all positions are alike. Padding each
    convolution by itself would give position 0 another value."""
    problem = draw(4, 2, 6, 2, 2, 1, 6, 3, torch.float64)
    tensors = {**problem.tensors, "query": torch.zeros(1, 6, 24).double(), "key": torch.zeros(1, 6, 12).double()}
    tensors["cos"], tensors["sin"] = torch.ones_like(tensors["cos"]), torch.zeros_like(tensors["sin"])
    query, key, _ = mix(Problem(tensors, 6, 2), reach=reach)
    bias, weight = tensors["depthwise_bias"].view(6, 6), tensors["grouped_weight"].view(6, 6, 6, 2)
    expected = torch.einsum("hoik,hi->ho", weight, bias) + tensors["grouped_bias"].view(6, 6)
    expected = expected / expected.norm(dim=-1, keepdim=True) * 6**0.5
    for position in range(6):
        torch.testing.assert_close(query[0, position], expected[:4])
        torch.testing.assert_close(key[0, position], expected[4:] * tensors["temperature"][:, None])


@pytest.mark.parametrize(
    ("groups", "head_dim", "at_token_2"),
    [
        (1, 12, [[1.0] * 6 + [20.0] * 6]),
        (2, 6, [[1.0] * 6, [20.0] * 6]),
        (3, 4, [[1.0] * 4, [1.0, 1.0, 20.0, 20.0], [20.0] * 4]),
    ],
    ids=["one-head-in-halves", "two-heads-one-each", "three-heads-middle-split"],
)
def test_value_halves_are_concatenated_before_the_heads(
    groups: int, head_dim: int, at_token_2: list[list[float]]
) -> None:
    """With two key/value heads, head 0 is the current token and head 1 the one before it."""
    problem = draw(groups, groups, head_dim, 2, 2, 1, 3, 1, torch.float32)
    problem.tensors["value_current"] = torch.full((1, 3, 6), 1.0)
    problem.tensors["value_delayed"] = torch.arange(1.0, 4.0)[None, :, None].expand(1, 3, 6) * 10
    value = mix(problem, value_of_nothing=torch.full((6,), 7.0))[2][0]
    assert value[2].tolist() == at_token_2
    assert [set(value[t].flatten().tolist()) for t in range(3)] == [{1.0, 7.0}, {1.0, 10.0}, {1.0, 20.0}]


def test_rotation_turns_the_first_dimensions_after_the_norm() -> None:
    problem = draw(2, 1, 8, 2, 2, 1, 4, 1, torch.float64)
    still = {**problem.tensors, "cos": torch.ones(1, 4, 4).double(), "sin": torch.zeros(1, 4, 4).double()}
    turned, unturned = mix(problem), mix(Problem(still, 8, 2))
    for got, raw in zip(turned[:2], unturned[:2], strict=True):
        torch.testing.assert_close(got[..., 4:], raw[..., 4:])  # never turned
        torch.testing.assert_close(got.norm(dim=-1), raw.norm(dim=-1))
        for i in (0, 1):  # dimension i pairs with i + 2
            pair = torch.complex(raw[..., i], raw[..., i + 2])
            angle = torch.complex(problem.tensors["cos"][0, :, i], problem.tensors["sin"][0, :, i])
            product = pair * angle[None, :, None]
            torch.testing.assert_close(got[..., i], product.real)
            torch.testing.assert_close(got[..., i + 2], product.imag)
    assert not torch.allclose(turned[0][:, 1:], unturned[0][:, 1:])


def test_mean_comes_from_the_latents_before_the_convolution() -> None:
    """Without convolutions, q is half of q + k, and k half of k + the mean of its group's queries."""
    problem = draw(4, 2, 6, 2, 2, 1, 5, 4, torch.float64)
    for name in ("grouped_weight", "grouped_bias"):
        problem.tensors[name] = torch.zeros_like(problem.tensors[name])
    problem.tensors["cos"], problem.tensors["sin"] = torch.ones(1, 5, 2).double(), torch.zeros(1, 5, 2).double()
    raw_q, raw_k = problem.tensors["query"].view(1, 5, 4, 6), problem.tensors["key"].view(1, 5, 2, 6)
    query, key, _ = mix(problem)
    want_q = raw_q + raw_k[:, :, [0, 0, 1, 1]]
    want_k = raw_k + torch.stack([raw_q[:, :, :2].mean(2), raw_q[:, :, 2:].mean(2)], dim=2)
    torch.testing.assert_close(query, torch.nn.functional.normalize(want_q, dim=-1) * 6**0.5)
    want_k = torch.nn.functional.normalize(want_k, dim=-1) * 6**0.5
    torch.testing.assert_close(key, want_k * problem.tensors["temperature"][:, None])


def test_a_zero_vector_stays_zero_and_has_finite_gradients() -> None:
    """Neither the norm of nothing nor its gradient may be NaN."""
    problem = draw(2, 1, 4, 2, 2, 1, 3, 1, torch.float32)
    leaves = {}
    for name in (*INPUTS, "depthwise_bias", "grouped_bias"):
        problem.tensors[name] = leaves[name] = torch.zeros_like(problem.tensors[name]).requires_grad_()
    outputs = mix(problem)
    assert all(not out[..., :1].any() for out in outputs[:2])
    for gradient in torch.autograd.grad(sum(out.sum() for out in outputs), list(leaves.values()), allow_unused=True):
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_norm_temperature_and_rotation_once(dtype: torch.dtype) -> None:
    """Without the convolutions (whose products run in the narrow dtype) the result is the exact one, rounded once."""
    problem = draw(4, 2, 16, 2, 2, 2, 6, 9, dtype)
    for name in ("grouped_weight", "grouped_bias"):
        problem.tensors[name] = torch.zeros_like(problem.tensors[name])
    cos, sin = naive_zaya.rotary_tables(range(6), 50.0, 8)
    problem.tensors["cos"], problem.tensors["sin"] = cos[None].float(), sin[None].float()
    exact = Problem({k: v.detach().double() for k, v in problem.tensors.items()}, 16, 2)
    want = naive(exact, [Document(0, 0, 6), Document(1, 0, 6)])
    for got, wide in zip(mix(problem), want, strict=True):
        assert got.dtype == dtype
        # half a unit in the last place of each number, and fp32 noise
        bound = wide.abs() * torch.finfo(dtype).eps / 2 * 1.01 + 1e-6
        assert ((got.double() - wide).abs() <= bound).all()


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_empty_batches_and_sequences(rows: int, length: int) -> None:
    problem = draw(4, 2, 6, 2, 2, rows, length, 1, torch.float32)
    past = torch.zeros(rows, 36, 2), torch.zeros(rows, 6)
    for reach in (None, torch.zeros(rows, length, dtype=torch.int64)):
        query, key, value = mix(problem, reach=reach)
        assert query.shape == (rows, length, 4, 6)
        assert key.shape == value.shape == (rows, length, 2, 6)
        (query.sum() + key.sum() + value.sum()).backward()
    raw = torch.cat([problem.tensors["query"], problem.tensors["key"]], -1)
    after = ops.next_states(raw, problem.tensors["value_delayed"], past, states=ops.SegmentStates(*past))
    assert [tuple(t.shape) for t in after] == [(rows, 36, 2), (rows, 6)]


def test_garbage_in_padding_stays_there() -> None:
    """A padding token's numbers may be anything, infinite or NaN too; documents beside it do not notice."""
    rows, length, documents, _ = layout("pads-and-documents")
    clean = draw(4, 2, 6, 3, 2, rows, length, 12, torch.float64)
    real = torch.zeros(rows, length, dtype=torch.bool)
    for d in documents:
        real[d.row, d.start : d.start + d.length] = True
    dirty = Problem(dict(clean.tensors), clean.head_dim, clean.look_back)
    for name, garbage in zip(INPUTS, (torch.nan, torch.inf, torch.nan, -torch.inf), strict=True):
        dirty.tensors[name] = torch.where(real[..., None], clean.tensors[name], garbage)
    reach, _ = describe(documents, rows, length, clean.look_back)
    for got, want in zip(mix(dirty, reach=reach), mix(clean, reach=reach), strict=True):
        torch.testing.assert_close(got[real], want[real], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------ no dead part
def parts() -> list[str]:
    """Every parameter of attention, every tap of the convolutions apart."""
    names = [n for n, _ in ZayaForCausalLM(tiny_config(num_hidden_layers=1, attention_bias=True)).named_parameters()]
    found = []
    for name in names:
        if "self_attn" not in name:
            continue
        if "conv_qk" in name and name.endswith("weight"):
            found += [f"{name}[..., {tap}]" for tap in range(2)]
        else:
            found.append(name)
    return found


@pytest.mark.parametrize("part", parts())
def test_zeroing_any_part_of_attention_changes_the_logits(part: str) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=1, attention_bias=True)))
    ids = random_ids(1, 6)
    with torch.no_grad():
        before = model(ids).logits
        name, _, tap = part.partition("[..., ")
        parameter = model.get_parameter(name)
        (parameter[..., int(tap[:-1])] if tap else parameter).zero_()
        after = model(ids).logits
    assert (after - before).abs().max() > 1e-2


@torch.no_grad()
def test_only_differences_of_positions_matter_and_they_do() -> None:
    model = redraw(ZayaForCausalLM(tiny_config()))
    ids = random_ids(1, 6)
    plain = model(ids).logits
    shifted = model(ids, position_ids=torch.arange(6)[None] + 100).logits
    torch.testing.assert_close(shifted, plain, rtol=0, atol=2e-4)
    slower = {"hybrid": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
    other = ZayaForCausalLM(tiny_config(rope_parameters=slower)).eval()
    other.load_state_dict(model.state_dict())
    assert (other(ids).logits - plain).abs().max() > 1e-2


def test_second_derivatives(test_seed: int) -> None:
    """A Hessian-vector product by the operators and by their definitions; eager attention, which has one."""
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2, attn_implementation="eager")), test_seed).double()
    ids = random_ids(2, 7, seed=test_seed)
    positions = torch.cat([torch.arange(4), torch.arange(3)])[None]
    found = []
    for ops_chosen in ("auto", "reference"):
        with ops.selection.use(ops_chosen):
            loss = model(ids, position_ids=positions, labels=ids, use_cache=False, skip_logits=False).loss
            parameters = [p for n, p in model.named_parameters() if "lm_head" not in n]
            first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            total = sum(g.square().sum() for g in first if g is not None)
            found.append(torch.autograd.grad(total, parameters, allow_unused=True))
    for (name, _), got, want in zip(model.named_parameters(), *found, strict=False):
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_frozen_weights_keep_and_compute_nothing_for_themselves() -> None:
    """One trained projection, everything else frozen: what is saved is no more than the definitions save."""
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2))).requires_grad_(False).train()
    trained = model.model.layers[0].self_attn.qkv_proj.q_proj.weight.requires_grad_()
    ids, found = random_ids(2, 32), {}
    for ops_chosen in ("auto", "reference"):
        saved: dict[int, int] = {}

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with ops.selection.use(ops_chosen), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(ids, labels=ids, use_cache=False, skip_logits=False).loss
        trained.grad = None
        loss.backward()
        found[ops_chosen] = sum(saved.values()), trained.grad
    torch.testing.assert_close(found["auto"][1], found["reference"][1], rtol=1e-4, atol=1e-5)
    assert found["auto"][0] <= 1.1 * found["reference"][0]  # it was 1.9 times as much
