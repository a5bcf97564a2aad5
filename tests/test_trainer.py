"""transformers' Trainer and TRL's trainers on ZAYA: what they compute is what whole, separate rows would give.

With plain SGD a step changes each weight by its gradient, so that a comparison of weights is one of gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from rank_processes import run_ranks
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LENGTHS = (12, 3, 7, 9)
ROWS = [random_ids(1, length, seed=length)[0].tolist() for length in LENGTHS]
LR = 0.5


def a_model(**changes: Any) -> ZayaForCausalLM:
    model = redraw(ZayaForCausalLM(tiny_config(**changes)))
    assert isinstance(model, ZayaForCausalLM)
    return model


def arguments(where: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(where),
        "use_cpu": True,
        "max_steps": 1,
        "optim": "sgd",
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 1,
        **options,
    }


def padded(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows padded on the right, as a causal collator makes them."""
    longest = max(len(feature["input_ids"]) for feature in features)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for feature in features:
        ids, missing = list(feature["input_ids"]), longest - len(feature["input_ids"])
        batch["input_ids"].append(ids + [0] * missing)
        batch["attention_mask"].append([1] * len(ids) + [0] * missing)
        batch["labels"].append(list(feature.get("labels", ids)) + [-100] * missing)
    return {name: torch.tensor(value) for name, value in batch.items()}


def rows(labels: list[list[int]] | None = None) -> list[dict[str, Any]]:
    labels = ROWS if labels is None else labels
    return [{"input_ids": ids, "labels": targets} for ids, targets in zip(ROWS, labels, strict=True)]


def expected_weights(model: ZayaForCausalLM, data: list[dict[str, Any]], **inputs: Any) -> dict[str, Tensor]:
    """After one step on the mean over all targets of rows that are run one by one."""
    model = model.train()
    targets = sum(sum(label != -100 for label in row["labels"][1:]) for row in data)
    for index, row in enumerate(data):
        own = {name: value[index : index + 1] for name, value in inputs.items()}
        given = {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([row["labels"]]), **own}
        model(**given, num_items_in_batch=targets).loss.backward()
    return {n: (p - LR * p.grad).detach() for n, p in model.named_parameters() if p.grad is not None}


def train(model: Any, data: Any, where: Path, collator: Any = padded, **options: Any) -> Any:
    trainer = Trainer(model, TrainingArguments(**arguments(where, **options)), collator, data)
    trainer.train()
    return trainer


def assert_weights(model: Any, expected: dict[str, Tensor]) -> None:
    got = dict(model.named_parameters())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name].detach(), value, atol=1e-5, rtol=1e-5, msg=name)


# --------------------------------------------------------------------------------------------------- HF Trainer: loss
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
    ],
    ids=["whole", "2 x 2", "4 x 1", "reentrant", "non-reentrant"],
)
def test_step_is_that_of_the_whole_batch(options: dict[str, Any], tmp_path: Path) -> None:
    model = a_model()
    few = [ROWS[0][:3] + [-100] * 9, *ROWS[1:]]  # rows with very different numbers of targets
    train(model, rows(few), tmp_path, **options)
    assert_weights(model, expected_weights(a_model(), rows(few)))


@pytest.mark.parametrize("extra", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}], ids=str)
def test_flattened_rows_are_separate_rows(extra: dict[str, Any], tmp_path: Path) -> None:
    model = a_model()
    train(model, rows(), tmp_path, DataCollatorWithFlattening(**extra))
    assert_weights(model, expected_weights(a_model(), rows()))


def test_flattening_without_positions(tmp_path: Path) -> None:
    """`seq_idx` alone tells the documents, too."""
    model = a_model()
    train(model, rows(), tmp_path, DataCollatorWithFlattening(return_position_ids=False, return_seq_idx=True))
    assert_weights(model, expected_weights(a_model(), rows()))


@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}], ids=["all", "every second"])
def test_activation_checkpointing_changes_no_gradient(options: dict[str, Any]) -> None:
    batch = padded(rows())

    def gradients(model: ZayaForCausalLM) -> dict[str, Tensor]:
        model.train()(**batch).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected, model = gradients(a_model()), a_model()
    model.activation_checkpointing_enable(**options)
    assert model.is_activation_checkpointing
    got = gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-7, rtol=1e-6, msg=name)


def test_batch_without_targets_costs_nothing(tmp_path: Path) -> None:
    model = a_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = train(model, rows([[-100] * length for length in LENGTHS]), tmp_path)
    assert trainer.state.log_history[0]["loss"] == 0.0
    assert trainer.state.log_history[0]["grad_norm"] == 0.0
    assert_weights(model, before)


def test_label_smoothing_and_a_loss_of_ones_own_get_logits(tmp_path: Path) -> None:
    """Both take the labels away, so the model gives logits in training."""
    seen = []

    def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        seen.append(tuple(outputs.logits.shape))
        shifted = labels[:, 1:].reshape(-1)
        return torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), shifted, ignore_index=-100, reduction="sum"
        ) / int(num_items_in_batch)

    model = a_model()
    args = TrainingArguments(**arguments(tmp_path))
    Trainer(model, args, padded, rows(), compute_loss_func=own_loss).train()
    assert seen == [(4, 12, 128)]
    assert_weights(model, expected_weights(a_model(), rows()))

    smoothed = train(a_model(), rows(), tmp_path, label_smoothing_factor=0.1)
    plain = train(a_model(), rows(), tmp_path)
    assert smoothed.state.log_history[0]["loss"] != pytest.approx(plain.state.log_history[0]["loss"], rel=1e-3)


def test_experts_of_a_rollout_are_a_column_of_the_data(tmp_path: Path) -> None:
    ids = random_ids(4, 8)
    slots = torch.randint(-1, 5, (4, 8, 4), generator=torch.Generator().manual_seed(3))
    data = [
        {"input_ids": i.tolist(), "labels": i.tolist(), "routed_experts": s.tolist()}
        for i, s in zip(ids, slots, strict=True)
    ]
    model = a_model()
    train(model, data, tmp_path, default_data_collator)
    assert_weights(model, expected_weights(a_model(), data, routed_experts=slots))
    with pytest.raises(AssertionError):
        assert_weights(model, expected_weights(a_model(), data))


# ---------------------------------------------------------------------------------------------- HF Trainer: all else
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "router records"])
def test_evaluation_gives_logits_to_compute_metrics(recorded: bool, tmp_path: Path) -> None:
    """Neither caches nor router records get among the predictions."""
    shapes = []

    def metrics(prediction: Any) -> dict[str, float]:
        shapes.append((prediction.predictions.shape, prediction.label_ids.shape))
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"accuracy": float(right[prediction.label_ids[:, 1:] != -100].mean())}

    model = a_model(output_router_logits=recorded)
    args = TrainingArguments(**arguments(tmp_path, per_device_eval_batch_size=3))
    trainer = Trainer(model, args, padded, eval_dataset=rows(), compute_metrics=metrics)
    result = trainer.evaluate()
    assert shapes == [((4, 12, 128), (4, 12))]
    batch = padded(rows())
    with torch.no_grad():
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
    targets = batch["labels"][:, 1:]
    right = (logits[:, :-1].argmax(-1) == targets)[targets != -100]
    assert result["eval_accuracy"] == pytest.approx(float(right.float().mean()))
    predictions = trainer.predict(rows()).predictions  # type: ignore[arg-type]
    torch.testing.assert_close(torch.tensor(predictions[2, :7]), logits[2, :7], atol=1e-5, rtol=0)


def test_resumed_training_is_uninterrupted_training(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    whole = train(a_model(), rows(), tmp_path / "whole", max_steps=4, save_strategy="steps", save_steps=2, **options)
    resumed = Trainer(
        a_model(), TrainingArguments(**arguments(tmp_path / "again", max_steps=4, **options)), padded, rows()
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, got), expected in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, expected), name
    whole.save_model(str(tmp_path / "saved"))
    saved = ZayaForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), whole.model.parameters(), strict=True))
    ids = torch.tensor([ROWS[0]])
    torch.testing.assert_close(saved(ids).logits, whole.model.eval()(ids).logits, atol=1e-5, rtol=0)


def test_bf16_keeps_balancing_biases_apart(tmp_path: Path) -> None:
    close = torch.tensor([8.0, 8.003, 8.006, 8.009, 0.0])  # in bf16 only two values are left of these
    model = a_model()
    model.model.layers[1].mlp.gate.balancing_biases.copy_(close)
    trainer = train(model, rows(), tmp_path, bf16=True, bf16_full_eval=True)
    assert torch.isfinite(torch.tensor(trainer.state.log_history[0]["loss"]))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    trainer.evaluate(rows())  # type: ignore[arg-type]
    assert model.lm_head.weight.dtype == torch.bfloat16
    biases = model.model.layers[1].mlp.gate.balancing_biases
    assert biases.dtype == torch.float32
    assert torch.equal(biases, close)


# ------------------------------------------------------------------------------------------------------------ TRL
def a_tokenizer() -> PreTrainedTokenizerFast:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, **{f"w{index}": index for index in range(3, 128)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="left"
    )


def sft(model: Any, where: Path, peft_config: Any = None, **options: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    options = {"bf16": False, "max_length": None, **options}
    trainer = trl.SFTTrainer(
        model,
        trl.SFTConfig(**arguments(where, **options)),
        train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in ROWS]),
        processing_class=a_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_free": True},
        {"padding_free": True, "pad_to_multiple_of": 8},
        {"packing": True, "max_length": 16},
        {"padding_free": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ],
    ids=["padded", "padding-free", "to a multiple", "packed", "accumulated"],
)
def test_sft_step_is_that_of_separate_rows(options: dict[str, Any], tmp_path: Path) -> None:
    model = a_model()
    trainer = sft(model, tmp_path, **options)
    assert_weights(model, expected_weights(a_model(), rows()))
    log = trainer.state.log_history[0]
    assert 0 <= log["mean_token_accuracy"] <= 1
    assert log["entropy"] > 0


def test_sft_with_the_lora_recipe(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from zaya_hf.training import lora_targets

    model = a_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = peft.LoraConfig(**lora_targets(model), r=2, task_type="CAUSAL_LM")
    trainer = sft(model, tmp_path, config, padding_free=True, max_steps=2, bf16=True)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # zero before the first step
            assert float(parameter.detach().abs().max()) > 0, name
        elif "lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(parameter, before[plain]), name


def test_grpo_improves_the_reward(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(token >= 64 for token in tokens) / len(tokens) for tokens in completion_ids]

    options = {
        "bf16": False,
        "max_steps": 6,
        "optim": "adamw_torch",
        "learning_rate": 2e-2,
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 4,
        "temperature": 1.0,
    }
    prompts = ["w5 w6 w7 w8", "w9 w10"]
    model = a_model()
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**arguments(tmp_path, **options)),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=a_tokenizer(),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 6
    assert sum(rewards[-2:]) > sum(rewards[:2])


# ------------------------------------------------------------------------------------------------------------- DDP
def _joined_batch() -> tuple[Tensor, Tensor]:
    """Four rows and their slots: nobody takes expert 3 in any layer, and the last two rows skip all of layer 0."""
    ids = random_ids(4, 9, seed=5)
    slots = torch.randint(0, 3, (4, 9, 4), generator=torch.Generator().manual_seed(5))
    slots[2:, :, 0] = 4
    return ids, slots


def _ddp_gradients(rank: int, where: str) -> None:
    ids, slots = (part[2 * rank : 2 * rank + 2] for part in _joined_batch())
    model = a_model().train()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # a second step fails where the first one left a parameter without its gradient
        model.zero_grad()
        loss = wrapped(input_ids=ids, labels=ids, routed_experts=slots, num_items_in_batch=4 * 8).loss * 2
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    torch.save({"loss": loss.detach() / 2, "gradients": gradients, **dict(model.named_buffers())}, f"{where}/{rank}.pt")


def _ddp_trainer(rank: int, where: str) -> None:
    model = a_model()
    options = {"per_device_train_batch_size": 2, "ddp_find_unused_parameters": False, "max_steps": 2}
    train(model, rows() + rows(), Path(where) / "run", **options)
    torch.save(dict(model.named_parameters()), f"{where}/trained-{rank}.pt")


def _worker(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, where = torch.distributed.get_rank(), str(folder)
    _ddp_gradients(rank, where)
    _ddp_trainer(rank, where)
    torch.distributed.barrier()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("ddp")
    run_ranks(_worker, where)
    return where


def test_ddp_gradients_with_experts_that_nobody_takes(two_processes: Path) -> None:
    results = [torch.load(two_processes / f"{rank}.pt") for rank in (0, 1)]
    ids, slots = _joined_batch()
    model = a_model().train()
    loss = model(input_ids=ids, labels=ids, routed_experts=slots).loss
    loss.backward()
    mean = sum(result["loss"] for result in results)
    torch.testing.assert_close(mean, loss.detach(), atol=1e-6, rtol=1e-6)
    for name, parameter in model.named_parameters():
        first, second = (result["gradients"][name] for result in results)
        assert torch.equal(first, second), name
        torch.testing.assert_close(first, parameter.grad, atol=1e-6, rtol=1e-5, msg=name)
        if ".experts." in name:
            assert bool((first[3] == 0).all()), name
            assert bool((first[:3] != 0).any()), name
    for name, buffer in model.named_buffers():
        assert torch.equal(results[0][name], buffer), name
        assert torch.equal(results[1][name], buffer), name


def test_trainer_in_two_processes(two_processes: Path, tmp_path: Path) -> None:
    model = a_model()
    options = {"per_device_train_batch_size": 4, "max_steps": 2}
    train(model, rows() + rows(), tmp_path, **options)
    expected = {n: p.detach() for n, p in model.named_parameters()}
    for rank in (0, 1):
        got = torch.load(two_processes / f"trained-{rank}.pt")
        for name, value in expected.items():
            torch.testing.assert_close(got[name].detach(), value, atol=1e-4, rtol=1e-4, msg=f"{rank} {name}")
