"""Balancing inside transformers' `Trainer` and TRL's `SFTTrainer`: the biases are those of a loop written by hand.

With plain SGD and no clipping a loop of six lines computes what `Trainer` does, to the bit where the batches are whole.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rank_processes import run_ranks
from test_trainer import LR, ROWS, a_model, a_tokenizer, arguments, padded, rows
from zaya_hf.testing import TINY
from zaya_hf.training import lora_targets
from zaya_hf.training.balancing import BiasBalancer
from zaya_hf.training.callback import BalancingCallback
from zaya_hf.training.config import BalancingConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
RULE: dict[str, Any] = {"controller": "pid", "kp": 0.1, "ki": 0.3}
KEYS = {
    "router_load_entropy",
    "router_max_violation",
    "router_skip_rate",
    "router_dead_experts",
    "router_bias_min",
    "router_bias_max",
}


def biases(model: Any) -> Tensor:
    """``[layers, E + 1]``, a copy."""
    return torch.stack([layer.mlp.gate.balancing_biases for layer in model.get_decoder().layers]).clone()


def by_hand(steps: int, **rule: Any) -> tuple[Tensor, list[dict[str, Any]]]:
    """Biases after SGD on all rows at each step, and the panel of every step."""
    model = a_model().train()
    balancer = BiasBalancer.for_model(model, BalancingConfig(**rule))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    assert balancer is not None
    panels = []
    for _ in range(steps):
        output = model(**padded(rows()), output_router_logits=True)
        output.loss.backward()
        balancer.observe(output.tokens_per_slot)
        balancer.step()
        optimizer.step()
        optimizer.zero_grad()
        panels.append(balancer.panel())
    return biases(model), panels


def train(model: Any, where: Path, *callbacks: TrainerCallback, resume: bool = False, **options: Any) -> Any:
    given = {"max_steps": 3, **options}
    trainer = Trainer(
        model, TrainingArguments(**arguments(where, **given)), padded, rows(), rows(), callbacks=list(callbacks)
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("rule", [RULE, {}, {"controller": "sign", "skip_target": 0.2}], ids=["pid", "adamw", "sign"])
def test_biases_are_those_of_a_loop(rule: dict[str, Any], tmp_path: Path) -> None:
    model = a_model()
    train(model, tmp_path, BalancingCallback(**rule))
    expected, _ = by_hand(3, **rule)
    assert torch.equal(biases(model), expected)
    assert not torch.equal(expected, biases(a_model()))


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
        {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
        {"bf16": True, "max_steps": 1},
    ],
    ids=["2 x 2", "4 x 1", "evaluation", "reentrant", "non-reentrant", "bf16"],
)
def test_every_token_counts_once(options: dict[str, Any], tmp_path: Path) -> None:
    callback = BalancingCallback(controller="frozen")
    train(a_model(), tmp_path, callback, **options)
    last = torch.tensor(callback.state()["balancing"]["last"])
    assert last.sum(-1).tolist() == [sum(len(row) for row in ROWS)] * 4


def test_accumulated_steps_are_whole_ones(tmp_path: Path) -> None:
    model, expected = a_model(), by_hand(1, **RULE)[0]
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    train(model, tmp_path, BalancingCallback(**RULE), **options)
    assert torch.equal(biases(model), expected)


def test_forwards_that_teach_nothing_do_not_count(tmp_path: Path) -> None:
    """As those of a generating trainer, which may leave the model in training mode."""

    class Scoring(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                assert model(**inputs).tokens_per_slot is None
            return super().compute_loss(model, inputs, *args, **kwargs)

    model = a_model()
    callback = BalancingCallback(**RULE)
    Scoring(model, TrainingArguments(**arguments(tmp_path)), padded, rows(), callbacks=[callback]).train()
    assert torch.equal(biases(model), by_hand(1, **RULE)[0])


def test_a_step_that_fp16_skips_moves_nothing() -> None:
    model, callback = a_model().train(), BalancingCallback(**RULE)
    control = SimpleNamespace(n_gpu=1), TrainerState(), TrainerControl()
    callback.on_train_begin(*control, model=model)
    for skipped in (True, False):
        model(**padded(rows()))
        callback.on_optimizer_step(*control, optimizer=SimpleNamespace(step_was_skipped=skipped))
        assert torch.equal(biases(model), biases(a_model()) if skipped else by_hand(1, **RULE)[0])


def test_the_logs_show_what_the_routers_do(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Tracker(TrainerCallback):
        def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = train(a_model(), tmp_path, BalancingCallback(**RULE), Tracker(), eval_strategy="steps", eval_steps=1)
    panels = by_hand(3, **RULE)[1]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [set(entry) & KEYS for entry in logged] == [KEYS] * 3
    for entry, panel in zip(logged, panels, strict=True):
        assert entry["router_load_entropy"] == pytest.approx(sum(panel["load_entropy"]) / 4)
        assert entry["router_max_violation"] == max(panel["max_violation"])
        assert entry["router_skip_rate"] == pytest.approx(sum(panel["skip_rate"]) / 4)
        assert entry["router_dead_experts"] == sum(panel["dead_experts"])
        assert entry["router_bias_min"] == min(panel["bias_min"])
        assert entry["router_bias_max"] == max(panel["bias_max"])
    assert [entry["router_bias_max"] for entry in seen if "loss" in entry] == [e["router_bias_max"] for e in logged]
    assert not any(KEYS & set(entry) for entry in seen if "loss" not in entry)


def test_after_training_the_model_is_as_it_was(tmp_path: Path) -> None:
    model = a_model()
    train(model, tmp_path, BalancingCallback(**RULE), max_steps=1)
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks
    assert model.train()(**padded(rows())).tokens_per_slot is None


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("rule", [RULE, {}], ids=["pid", "adamw"])
def test_a_resumed_run_is_one_that_was_not_interrupted(rule: dict[str, Any], restore: bool, tmp_path: Path) -> None:
    """With and without Trainer's own restoring of callbacks, which builds new ones."""
    saving = {"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": restore}
    train(a_model(), tmp_path, BalancingCallback(**rule), max_steps=2, **saving)
    resumed = a_model()
    # Trainer warns that the steps of the checkpoint's run were others.
    trainer = train(resumed, tmp_path, BalancingCallback(**rule), max_steps=4, resume=True, **saving)
    assert trainer.state.global_step == 4
    assert torch.equal(biases(resumed), by_hand(4, **rule)[0])


def test_a_resumed_adapter_has_its_biases(tmp_path: Path) -> None:
    """They are of the base model, so in no file of the adapter's."""
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        model = a_model()
        return peft.get_peft_model(model, peft.LoraConfig(**lora_targets(model), r=2, task_type="CAUSAL_LM"))

    saving = {"save_strategy": "steps", "save_steps": 2}
    straight, resumed = adapted(), adapted()
    with pytest.warns(UserWarning, match="biases of the base model, which an adapter's folder does not have"):
        train(straight, tmp_path / "a", BalancingCallback(**RULE), max_steps=4)
    train(adapted(), tmp_path / "b", BalancingCallback(**RULE), max_steps=2, **saving)
    train(resumed, tmp_path / "b", BalancingCallback(**RULE), max_steps=4, resume=True, **saving)
    assert torch.equal(biases(resumed.get_base_model()), biases(straight.get_base_model()))
    assert not torch.equal(biases(straight.get_base_model()), biases(a_model()))


def test_a_checkpoint_of_a_run_without_it(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    train(a_model(), tmp_path, max_steps=1, **saving)
    model = a_model()
    train(model, tmp_path, BalancingCallback(**RULE), max_steps=2, resume=True, **saving)
    assert not torch.equal(biases(model), biases(a_model()))
    again = a_model()
    train(again, tmp_path, BalancingCallback(**RULE), max_steps=3, resume=True, **saving)
    assert not torch.equal(biases(again), biases(model))


def two_ranks(folder: Path) -> None:
    """Each with its half of the rows; runs in every process."""
    model, expected = a_model(), by_hand(2, **RULE)[0]
    train(model, folder, BalancingCallback(**RULE), max_steps=2, per_device_train_batch_size=2)
    gathered = [torch.zeros_like(expected) for _ in range(2)]
    torch.distributed.all_gather(gathered, biases(model))
    assert torch.equal(gathered[0], gathered[1])
    assert torch.equal(gathered[0], expected)


def test_two_processes_are_one(tmp_path: Path) -> None:
    run_ranks(two_ranks, tmp_path)


def test_trl(tmp_path: Path) -> None:
    """Packed rows: every token of every document."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    settings = trl.SFTConfig(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        packing=True,
        max_length=32,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    model, callback = a_model(), BalancingCallback(**RULE)
    data = datasets.Dataset.from_list([{"input_ids": row} for row in ROWS])
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=a_tokenizer(), callbacks=[callback])
    trainer.train()
    last = torch.tensor(callback.state()["balancing"]["last"])
    assert last.sum(-1).tolist() == [sum(len(row) for row in ROWS)] * 4
    assert not torch.equal(biases(model), biases(a_model()))
    assert set(trainer.state.log_history[0]) >= KEYS


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"controller": "p"}, "balancing, controller: .*'adamw', 'sign', 'pid' or 'frozen'"),
            ({"lr": -1.0}, r"balancing, lr: .*greater than 0\."),
            ({"rate": 1.0}, "balancing, rate: "),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as raised:
            BalancingCallback(**options)
        assert "\n" not in str(raised.value)

    def test_a_config_and_its_fields(self) -> None:
        with pytest.raises(TypeError, match=r"either a config or its fields \(ki, lr\)"):
            BalancingCallback(BalancingConfig(), lr=0.1, ki=0.1)

    def test_transformers_own_class(self, tmp_path: Path) -> None:
        model = transformers.ZayaForCausalLM(transformers.ZayaConfig(**TINY))
        with pytest.raises(ValueError, match=r"found 0 of zaya_hf\.ZayaModel in ZayaForCausalLM; expected one"):
            train(model, tmp_path, BalancingCallback())

    def test_two_of_them(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="Trainer has 2 callbacks of type BalancingCallback; expected one"):
            train(a_model(), tmp_path, BalancingCallback(), BalancingCallback())

    def test_threads(self) -> None:
        with pytest.raises(ValueError, match="the 2 threads of DataParallel: start one process per GPU"):
            BalancingCallback().on_train_begin(SimpleNamespace(n_gpu=2), None, None, model=a_model())
