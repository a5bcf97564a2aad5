"""Heads for labels of rows, tokens and answers: from a base checkpoint, with padding on either side, trained, saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers import ZayaConfig as NativeConfig
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.zaya.modeling_zaya import ZayaPreTrainedModel as NativeBase

import zaya_hf
from original_checkpoints import original_config, original_tensors, write_checkpoint
from saved_models import differing, edit_config, tiny_model
from zaya_hf import (
    ZayaForCausalLM,
    ZayaForQuestionAnswering,
    ZayaForSequenceClassification,
    ZayaForTokenClassification,
)
from zaya_hf.testing import random_ids, redraw, tiny_config

HEADS = {
    ZayaForSequenceClassification: (AutoModelForSequenceClassification, {"score.weight"}),
    ZayaForTokenClassification: (AutoModelForTokenClassification, {"score.weight", "score.bias"}),
    ZayaForQuestionAnswering: (AutoModelForQuestionAnswering, {"qa_outputs.weight", "qa_outputs.bias"}),
}
CLOSE = {"atol": 1e-5, "rtol": 0}


@pytest.fixture(autouse=True)
def _no_stock_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*transformers' own zaya class.*")
        yield


def classifier(cls: type = ZayaForSequenceClassification, labels: int = 3, **changes: Any) -> Any:
    return redraw(cls(tiny_config(num_labels=labels, **changes)))


def scores(output: Any) -> torch.Tensor:
    return output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A language model in the combined layout."""
    folder = tmp_path_factory.mktemp("base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny_model(tie_word_embeddings=False).save_pretrained(folder)
    return folder


# ----------------------------------------------------------------------------------------------- from a base checkpoint
@pytest.mark.parametrize("auto", [True, False], ids=["auto", "class"])
@pytest.mark.parametrize("cls", HEADS)
def test_a_base_checkpoint_gets_a_new_head_and_a_warning_that_names_it(base, cls, auto):
    auto_class, head = HEADS[cls]
    options = {} if cls is ZayaForQuestionAnswering else {"num_labels": 5}
    with pytest.warns(UserWarning, match="newly initialised") as said:
        model, info = (auto_class if auto else cls).from_pretrained(base, output_loading_info=True, **options)
    assert type(model) is cls
    [warning] = [str(w.message) for w in said if "newly initialised" in str(w.message)]
    assert all(name in warning for name in head)
    assert "lm_head" not in warning
    assert set(info["missing_keys"]) == head
    assert not info["mismatched_keys"]
    want = ZayaForCausalLM.from_pretrained(base)
    assert differing(model.model, want.model) == []
    ids = random_ids(2, 7)
    hidden = want.model(ids).last_hidden_state
    if cls is ZayaForSequenceClassification:
        torch.testing.assert_close(model(ids).logits, hidden[:, -1] @ model.score.weight.T, **CLOSE)
        assert model(ids).logits.shape == (2, 5)
    else:
        head_of = model.score if cls is ZayaForTokenClassification else model.qa_outputs
        torch.testing.assert_close(scores(model(ids)), head_of(hidden), **CLOSE)


@pytest.mark.parametrize("dialect", ["A", "B"])
@pytest.mark.parametrize("cls", HEADS)
def test_a_base_checkpoint_in_the_original_layout(tmp_path, cls, dialect):
    base_model = tiny_model()
    folder = write_checkpoint(
        tmp_path, original_tensors(base_model, dialect), original_config(base_model.config, dialect)
    )
    with pytest.warns(UserWarning, match="newly initialised"):
        model = HEADS[cls][0].from_pretrained(folder)
    assert type(model) is cls
    assert differing(model.model, base_model.model) == []


@pytest.mark.parametrize("cls", HEADS)
def test_saved_and_loaded_bitwise_without_a_warning(tmp_path, cls):
    model = classifier(cls, labels=2, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert HEADS[cls][1] <= names
    assert not any(name.startswith("lm_head") for name in names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = HEADS[cls][0].from_pretrained(tmp_path)
    assert type(loaded) is cls
    assert differing(loaded, model) == []
    assert loaded.config.id2label == {0: "no", 1: "yes"}
    assert loaded.config.architectures == [cls.__name__]
    assert loaded.config.problem_type is None


def test_a_classifier_s_backbone_and_a_language_model_of_it(tmp_path):
    """The other way round: `score` is of no use to them and is left out; the head they need is new."""
    model = classifier(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    assert differing(AutoModel.from_pretrained(tmp_path), model.model) == []
    edit_config(tmp_path, tie_word_embeddings=True)
    lm = ZayaForCausalLM.from_pretrained(tmp_path)
    assert differing(lm.model, model.model) == []
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


def test_a_head_of_another_width_is_named(tmp_path):
    classifier(labels=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"of a wrong shape: score.weight \[3, 64\] where \[4, 64\] is expected"):
        ZayaForSequenceClassification.from_pretrained(tmp_path, num_labels=4)
    model = ZayaForSequenceClassification.from_pretrained(tmp_path, num_labels=4, ignore_mismatched_sizes=True)
    assert model.score.weight.shape == (4, 64)


def test_saving_says_that_transformers_has_no_such_class(tmp_path):
    model = classifier()
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1.0
    assert [switch for switch, _ in model.stock_differences()] == ["ZayaForSequenceClassification"]
    with pytest.warns(UserWarning, match="ZayaForSequenceClassification: it has no such class"):
        model.save_pretrained(tmp_path)


def test_transformers_has_none_of_these_classes():
    """Where it gets one, the folders should load there, and `stock_differences` should no longer say otherwise."""
    import transformers.models.zaya.modeling_zaya as native

    assert not [name for name in vars(native) if name.endswith(("Classification", "QuestionAnswering"))]


# ---------------------------------------------------------------------------------------------------------- which token
def padded(lengths: tuple[int, ...], side: str, filler: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of rows of these lengths, padded to the longest."""
    width = max(lengths)
    ids = torch.full((len(lengths), width), filler)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(width - length, None) if side == "left" else slice(0, length)
        ids[row, place] = random_ids(1, length, seed=row)[0]
        mask[row, place] = 1
    return ids, mask


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("given", ["ids", "ids without a mask", "embeddings"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_is_read_at_its_last_token(side, given, implementation):
    model = classifier(
        attn_implementation=implementation, layer_types=["hybrid", "hybrid_sliding"] * 2, sliding_window=3
    )
    lengths = (3, 7, 1)
    ids, mask = padded(lengths, side)
    if given == "embeddings":
        got = model(inputs_embeds=model.model.embed_tokens(ids), attention_mask=mask).logits
    else:
        got = model(ids, attention_mask=mask if given == "ids" else None).logits
    alone = torch.cat([model(random_ids(1, length, seed=row)).logits for row, length in enumerate(lengths)])
    torch.testing.assert_close(got, alone, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_mask_decides_also_where_the_padding_is_a_word_and_a_word_is_padding(side):
    """Both would mislead a head that looks for `pad_token_id` among the ids."""
    model = classifier()
    ids, mask = padded((3, 7), side, filler=9)
    ids[1, -1 if side == "right" else 6] = 0
    alone = torch.cat([model(ids[row : row + 1, mask[row].bool()], attention_mask=mask[row : row + 1, mask[row].bool()])
                       .logits for row in range(2)])  # fmt: skip
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, alone, **CLOSE)


def test_padding_inside_a_row_is_a_word_without_a_mask():
    model = classifier()
    ids = torch.tensor([[5, 0, 6, 7, 0, 0]])
    inside = model(ids[:, :4], attention_mask=torch.ones(1, 4)).logits
    torch.testing.assert_close(model(ids).logits, inside, **CLOSE)
    assert not torch.allclose(inside, model(torch.tensor([[5, 6, 7]])).logits, atol=1e-3)


def test_embeddings_without_a_mask_are_all_tokens():
    model = classifier()
    ids = random_ids(2, 5)
    torch.testing.assert_close(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits, **CLOSE)


def test_without_a_pad_token_a_batch_needs_a_mask():
    model = classifier(pad_token_id=None)
    ids, mask = padded((3, 7), "right")
    with pytest.raises(
        ValueError, match=r"^2 rows, and nothing says what is padding: give attention_mask or set .*\.$"
    ):
        model(ids)
    alone = torch.cat([model(random_ids(1, length, seed=row)).logits for row, length in enumerate((3, 7))])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, alone, **CLOSE)


def test_packed_rows_are_refused_by_rows_and_right_by_tokens():
    first, second = random_ids(1, 4), random_ids(1, 5, seed=1)
    packed, positions = torch.cat([first, second], 1), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    borders = torch.tensor([0, 4, 9], dtype=torch.int32)
    forms: list[dict[str, Any]] = [
        {"position_ids": positions},
        {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders},
        {"seq_idx": torch.tensor([[0] * 4 + [1] * 5])},
    ]
    by_row, by_token = classifier(), classifier(ZayaForTokenClassification)
    alone = torch.cat([by_token(first).logits, by_token(second).logits], 1)
    for form in forms:
        with pytest.raises(ValueError, match=r"^row 0 holds 2 documents, but a row has one label: give every document"):
            by_row(packed, **form)
        torch.testing.assert_close(by_token(packed, **form).logits, alone, **CLOSE)


def test_rows_without_tokens_are_refused():
    with pytest.raises(ValueError, match="the rows have no tokens"):
        classifier()(torch.empty(2, 0, dtype=torch.long))


def test_a_row_of_padding_disturbs_no_other():
    model = classifier()
    ids, mask = padded((3, 5), "right")
    mask[0] = 0
    output = model(ids, attention_mask=mask)
    assert output.logits.isfinite().all()
    torch.testing.assert_close(output.logits[1:], model(random_ids(1, 5, seed=1)).logits, **CLOSE)


def test_a_text_in_two_calls():
    model = classifier()
    ids = random_ids(2, 9)
    first = model(ids[:, :6], use_cache=True)
    assert first.past_key_values is first.cache
    assert model(ids).cache is None
    again = model(ids[:, 6:], past_key_values=first.cache, attention_mask=torch.ones(2, 9))
    torch.testing.assert_close(again.logits, model(ids).logits, **CLOSE)


@pytest.mark.parametrize("cls", [ZayaForTokenClassification, ZayaForQuestionAnswering])
def test_tokens_in_two_calls(cls):
    model, ids = classifier(cls), random_ids(2, 9)
    for name in ("cache", "past_key_values"):
        cache = DynamicCache(config=model.config)
        parts = [scores(model(part, **{name: cache})) for part in (ids[:, :6], ids[:, 6:])]
        torch.testing.assert_close(torch.cat(parts, 1), scores(model(ids)), **CLOSE)


def test_hidden_states_routers_and_tuples():
    for cls in HEADS:
        model = classifier(cls, attn_implementation="eager")
        output = model(random_ids(2, 5), output_hidden_states=True, output_attentions=True, output_router_logits=True)
        assert len(output.hidden_states) == 5
        assert len(output.attentions) == 4
        assert [logits.shape for logits in output.router_logits] == [(10, 5)] * 4
        assert int(output.tokens_per_slot.sum()) == 40
        assert output.router_slots[0].shape == (2, 5)
        assert isinstance(model(random_ids(2, 5), return_dict=False), tuple)


# --------------------------------------------------------------------------------------- as transformers' generic heads
class StockForSequenceClassification(GenericForSequenceClassification, NativeBase):
    pass


class StockForTokenClassification(GenericForTokenClassification, NativeBase):
    pass


def stock_config(model: Any) -> NativeConfig:
    fields = NativeConfig().to_dict().keys() - {"model_type", "transformers_version"}
    extra = {"num_labels", "problem_type", "classifier_dropout"}
    return NativeConfig(**{name: getattr(model.config, name, None) for name in fields | extra})


LABELS = {
    "single": (3, torch.tensor([2, 0]), None),
    "regression": (1, torch.tensor([0.5, -2.0]), None),
    "several numbers": (3, torch.tensor([[0.5, -2.0, 1], [3, 4, 5]]), "regression"),
    "several labels": (3, torch.tensor([[0.0, 1, 1], [1, 0, 0]]), None),
    "whole numbers": (1, torch.tensor([2, 5]), None),
    "named": (3, torch.tensor([1, 1]), "single_label_classification"),
}


@pytest.mark.parametrize("kind", LABELS)
def test_logits_loss_and_names_are_those_of_the_generic_head(kind):
    width, labels, problem = LABELS[kind]
    ours = classifier(labels=width, problem_type=problem)
    stock = StockForSequenceClassification(stock_config(ours)).eval()
    assert set(stock.state_dict()) == set(ours.state_dict())
    stock.load_state_dict(ours.state_dict())
    ids, mask = padded((4, 6), "right")
    got = ours(ids, attention_mask=mask, labels=labels)
    stock_labels = labels.float() if kind == "whole numbers" else labels  # there: an error about dtypes in training
    want = stock(ids, attention_mask=mask, labels=stock_labels)
    torch.testing.assert_close(got.logits, want.logits, **CLOSE)
    torch.testing.assert_close(got.loss, want.loss, **CLOSE)
    assert ours.config.problem_type == problem  # the generic head writes what it guessed into the config


def test_token_logits_and_loss_are_those_of_the_generic_head():
    ours = classifier(ZayaForTokenClassification, classifier_dropout=0.25)
    assert ours.dropout.p == 0.25
    stock = StockForTokenClassification(stock_config(ours)).eval()
    stock.load_state_dict(ours.state_dict())
    ids, mask = padded((4, 6), "right")
    labels = torch.randint(0, 3, ids.shape).masked_fill(mask == 0, -100)
    got, want = (model(ids, attention_mask=mask, labels=labels) for model in (ours, stock))
    torch.testing.assert_close(got.logits[mask.bool()], want.logits[mask.bool()], **CLOSE)
    torch.testing.assert_close(got.loss, want.loss, **CLOSE)
    # padding has no label, whatever a collator puts there
    filled = labels.masked_fill(mask == 0, 1)
    torch.testing.assert_close(ours(ids, attention_mask=mask, labels=filled).loss, want.loss, **CLOSE)


@pytest.mark.parametrize(("options", "rate", "bias"), [({}, 0.1, True), ({"hidden_dropout": 0.0}, 0.0, True),
                                                       ({"token_classification_bias": False}, 0.1, False)])  # fmt: skip
def test_extra_keys_of_the_token_head(tmp_path, options, rate, bias):
    model = classifier(ZayaForTokenClassification, **options)
    model.save_pretrained(tmp_path)
    loaded = ZayaForTokenClassification.from_pretrained(tmp_path)
    assert (loaded.dropout.p, loaded.score.bias is not None) == (rate, bias)


def test_answers():
    model = classifier(ZayaForQuestionAnswering)
    ids = random_ids(3, 6)
    start, end = torch.tensor([1, 0, 9]), torch.tensor([3, 2, -1])
    output = model(ids, start_positions=start, end_positions=end)
    want = [F.cross_entropy(s[:2], p[:2]) for s, p in ((output.start_logits, start), (output.end_logits, end))]
    torch.testing.assert_close(output.loss, sum(want) / 2, **CLOSE)
    with pytest.raises(ValueError, match="give both start_positions and end_positions"):
        model(ids, start_positions=start)
    assert float(model(ids, start_positions=start + 99, end_positions=end + 99).loss.detach()) == 0.0


# --------------------------------------------------------------------------------------------------------------- labels
@pytest.mark.parametrize(
    ("width", "labels", "problem", "said"),
    [
        (3, torch.tensor([0, 3]), None, r"labels contain 3; expected 0 \.\.\. 2, or -100 for none"),
        (3, torch.tensor([0, -1]), None, "labels contain -1"),
        (3, torch.tensor([0, 1, 2]), None, r"labels have shape \[3\]; expected \[2\] or \[2, 1\]"),
        (3, torch.tensor([0.0, 1.0]), None, r"labels have shape \[2\]; expected \[2, 3\]"),
        (3, torch.tensor([0.0, 1.0]), "single_label_classification", "labels have dtype torch.float32; expected int64"),
        (1, torch.zeros(2, 4), None, r"labels have shape \[2, 4\]; expected \[2\] or \[2, 1\]"),
        (3, torch.zeros(2, 3).long(), None, r"labels have shape \[2, 3\]; .*; floats or bools for several labels"),
        (3, torch.tensor([[0.0, 1, 7], [0, 1, 1]]), None, r"labels contain 7; expected 0 \.\.\. 1, for each label"),
        (3, torch.tensor([[0.0, 1, float("nan")], [0, 1, 1]]), None, "labels contain nan; expected 0"),
    ],
)
def test_wrong_labels_are_named(width, labels, problem, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        classifier(labels=width, problem_type=problem)(random_ids(2, 4), labels=labels)


def test_wrong_token_labels_are_named():
    model = classifier(ZayaForTokenClassification)
    for labels in (torch.full((2, 4), 3), torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match=r"^labels "):
            model(random_ids(2, 4), labels=labels)


def test_what_is_no_tensor_or_no_problem_type_is_named():
    model = classifier()
    with pytest.raises(TypeError, match=r"^labels are a list; expected a tensor\.$"):
        model(random_ids(2, 4), labels=[0, 1])
    with pytest.raises(TypeError, match=r"^labels are a list; expected a tensor\.$"):
        classifier(ZayaForTokenClassification)(random_ids(2, 4), attention_mask=torch.ones(2, 4), labels=[[0] * 4] * 2)
    answers = classifier(ZayaForQuestionAnswering)
    for wrong, error in (([1, 2], TypeError), (torch.tensor([1.0, 2.0]), ValueError)):
        with pytest.raises(error, match=r"^end_positions (are a list|have dtype torch.float32); expected "):
            answers(random_ids(2, 4), start_positions=torch.tensor([1, 2]), end_positions=wrong)
    model.config.problem_type = "ranking"
    with pytest.raises(ValueError, match=r"^config.problem_type is 'ranking'; expected regression, "):
        model(random_ids(2, 4), labels=torch.tensor([0, 1]))


def test_bools_are_several_labels():
    model, ids, flags = classifier(), random_ids(2, 4), torch.tensor([[True, False, True], [False, False, True]])
    torch.testing.assert_close(model(ids, labels=flags).loss, model(ids, labels=flags.float()).loss, **CLOSE)


@pytest.mark.parametrize(
    "wrong", [{"classifier_dropout": 2.0}, {"hidden_dropout": "x"}, {"token_classification_bias": "no"}], ids=str
)
def test_wrong_extra_keys_are_named(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=rf"^ZayaConfig: {name}={value!r} is wrong: it must be "):
        tiny_config(**wrong)


def test_rows_without_a_label_count_for_nothing():
    model = classifier()
    ids = random_ids(3, 4)
    some = model(ids, labels=torch.tensor([1, -100, 2])).loss
    torch.testing.assert_close(some, model(ids[[0, 2]], labels=torch.tensor([1, 2])).loss, **CLOSE)
    none = model(ids, labels=torch.full((3,), -100)).loss
    none.backward()
    assert float(none.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kind", LABELS)
def test_micro_batches_add_up_to_the_batch(kind):
    width, labels, problem = LABELS[kind]
    model, ids = classifier(labels=width, problem_type=problem), random_ids(2, 4)
    whole = model(ids, labels=labels).loss
    parts = [model(ids[i : i + 1], labels=labels[i : i + 1], num_items_in_batch=labels.numel()).loss for i in range(2)]
    torch.testing.assert_close(sum(parts), whole, **CLOSE)


def test_loss_in_bf16_is_fp32():
    for cls in (ZayaForSequenceClassification, ZayaForTokenClassification):
        model = classifier(cls).to(torch.bfloat16)
        labels = torch.zeros(2, dtype=torch.long) if cls is ZayaForSequenceClassification else torch.zeros(2, 4).long()
        output = model(random_ids(2, 4), labels=labels)
        assert output.logits.dtype == torch.bfloat16
        assert output.loss.dtype == torch.float32


def test_a_loss_of_the_user_s_own():
    model = classifier()
    seen = {}
    model.loss_function = lambda **given: seen.update(given) or given["pooled_logits"].sum()
    loss = model(random_ids(2, 4), labels=torch.tensor([0, 1]), num_items_in_batch=7).loss
    assert {"logits", "labels", "pooled_logits", "config"} <= set(seen)
    assert seen["num_items_in_batch"] == 7
    assert float(loss.detach()) == float(seen["pooled_logits"].sum().detach())


# ------------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("cls", HEADS)
def test_gradient_checkpointing_is_exact(cls, use_reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = classifier(cls).train()
        if cls is ZayaForTokenClassification:
            model.dropout.p = 0.0
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        ids, mask = padded((4, 6), "right")
        scores(model(ids, attention_mask=mask)).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-5)


def test_a_few_steps_fit_the_labels():
    model = classifier(labels=2, initializer_range=0.02).train()
    ids, labels = random_ids(4, 6), torch.tensor([0, 1, 1, 0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    assert model.eval()(ids).logits.argmax(-1).tolist() == labels.tolist()


@pytest.fixture
def _fresh_accelerate():
    """A Trainer leaves accelerate's choices for all of a process behind."""
    yield
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_fresh_accelerate")
def test_trainer_with_accumulation_takes_the_steps_of_the_whole_batch(tmp_path):
    rows = [{"input_ids": random_ids(1, 5, seed=i)[0], "labels": torch.tensor(i % 3)} for i in range(4)]
    trained = []
    for size, accumulation in ((4, 1), (1, 4)):
        model = classifier()
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            learning_rate=1e-2,
            optim="sgd",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        trained.append(model)
    start = classifier()
    assert differing(trained[0], start)  # something was learned
    for (name, one), other in zip(trained[0].named_parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=name)


def test_an_adapter_trains_the_head_and_comes_back(base, tmp_path):
    peft = pytest.importorskip("peft")
    load = lambda: ZayaForSequenceClassification.from_pretrained(base, num_labels=3)  # noqa: E731
    with pytest.warns(UserWarning, match="newly initialised"):
        adapted = peft.get_peft_model(
            load(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj_current"])
        )
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    assert any("score" in name for name, p in adapted.named_parameters() if p.requires_grad)
    want = adapted(random_ids(2, 5)).logits
    adapted.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="newly initialised"):
        again = peft.PeftModel.from_pretrained(load(), tmp_path)
    torch.testing.assert_close(again.eval()(random_ids(2, 5)).logits, want, **CLOSE)


# ------------------------------------------------------------------------------------------------------------ elsewhere
def test_resized_embeddings_and_inputs():
    for cls in HEADS:
        model = classifier(cls)
        assert model.get_input_embeddings() is model.model.embed_tokens
        model.resize_token_embeddings(140, mean_resizing=False)
        assert scores(model(torch.tensor([[5, 139]]))).isfinite().all()


def test_native_config_and_unregistered_auto_classes(base):
    native = NativeConfig(**{**tiny_config().to_dict(), "num_labels": 4})
    assert ZayaForSequenceClassification(native).score.out_features == 4
    zaya_hf.unregister()
    try:
        config = AutoConfig.from_pretrained(base)
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            AutoModelForSequenceClassification.from_config(config)
    finally:
        zaya_hf.register()
    assert isinstance(
        AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(base)), ZayaForSequenceClassification
    )


def test_text_classification_pipeline(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    model = classifier(labels=2, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    model.save_pretrained(tmp_path)
    words = ["<pad>", "<eos>", "<bos>"] + [f"w{index}" for index in range(3, 128)]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    assert type(classify.model) is ZayaForSequenceClassification
    for found, ids in zip(classify(["w5 w9 w100", "w7"], batch_size=2), ([[5, 9, 100]], [[7]]), strict=True):
        want = model(torch.tensor(ids)).logits[0].softmax(-1)
        by_label = {entry["label"]: entry["score"] for entry in found}
        assert by_label == pytest.approx({"no": float(want[0]), "yes": float(want[1])}, abs=1e-5)


def test_heads_are_plain_linear_layers():
    """What adapters and quantisers look for by type and name."""
    assert type(classifier().score) is nn.Linear
    assert ZayaForSequenceClassification.base_model_prefix == "model"
