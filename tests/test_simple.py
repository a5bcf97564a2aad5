"""Training by a function of the step: it learns, goes on bit for bit, and stops at the first number that is none."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import zaya_hf
from zaya_hf.testing import TINY, tiny_config
from zaya_hf.training.checkpoint import CheckpointStore
from zaya_hf.training.simple import LoopSettings, TrainingLog, train

VOCABULARY, LENGTH = 32, 16
SETTINGS = LoopSettings(steps=8, warmup_steps=2, checkpoint_every=3, newton_schulz_dtype="float32")


def make_zaya(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    return zaya_hf.ZayaForCausalLM(tiny_config(**{**small, **changes}))


def make_llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, **{**config, **tokens, **changes})
    )


def make_olmoe() -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    return transformers.OlmoeForCausalLM(config)


def batch_at(step: int) -> dict[str, Tensor]:
    """Each id is its predecessor's + 5: easy to learn once the loss falls at all."""
    starts = torch.randint(3, VOCABULARY, (4, 1), generator=torch.Generator().manual_seed(step))
    ids = 3 + (starts + 5 * torch.arange(LENGTH)) % (VOCABULARY - 3)
    return {"input_ids": ids, "labels": ids}


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """accelerate collects garbage at the end of every run; what was there before this file need not be searched."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@cache
def uninterrupted(
    make: Callable[..., PreTrainedModel], settings: LoopSettings = SETTINGS, **changes: Any
) -> tuple[TrainingLog, dict[str, Tensor]]:
    """What a run without checkpoints gives; the seed of its random numbers is 1."""
    model = make(**changes)
    torch.manual_seed(1)
    log = train(model, batch_at, settings)
    return log, values(model)


class Stop(Exception):
    pass


def stop_at(step: int, error: type[BaseException]) -> Callable[[int, float], None]:
    def on_step(done: int, loss: float) -> None:
        if done == step:
            raise error

    return on_step


# ------------------------------------------------------------------------------------------------------------- learning
@pytest.mark.parametrize("make", [make_zaya, make_llama, make_olmoe])
def test_the_loss_falls(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    seen: list[tuple[int, float]] = []
    settings = LoopSettings(steps=60, warmup_steps=4)
    log = train(model, batch_at, settings, on_step=lambda done, loss: seen.append((done, loss)))
    assert log.losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert sum(log.losses[-5:]) / 5 < 0.3
    assert seen == list(enumerate(log.losses, start=1))
    assert log.tokens == 60 * 4 * LENGTH
    assert log.seconds > 0
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_the_first_loss_is_that_of_the_model_before_training() -> None:
    model = make_zaya()
    with torch.no_grad():
        expected = model(**batch_at(0)).loss.item()
    assert train(model, batch_at, SETTINGS).losses[0] == pytest.approx(expected, abs=1e-6)


def test_the_biases_are_balanced_and_the_load_is_told() -> None:
    model = make_zaya()
    before = values(model)
    log = train(model, batch_at, SETTINGS)
    for index in range(2):
        name = f"model.layers.{index}.mlp.gate.balancing_biases"
        change = model.state_dict()[name] - before[name]
        assert change[:-1].abs().max() > SETTINGS.balancing_lr
        assert change[-1] == 0
    assert log.load is not None
    assert len(log.load) == 2
    assert all(0 <= load <= 3 for load in log.load)


def test_biases_stay_where_balancing_is_off() -> None:
    model = make_zaya()
    before = values(model)
    log = train(model, batch_at, LoopSettings(steps=3, balancing_lr=0))
    after = values(model)
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        f"model.layers.{index}.mlp.gate.balancing_biases" for index in range(2)
    }
    assert log.load is not None  # it is counted all the same


def test_models_without_routers_have_no_load() -> None:
    assert train(make_llama(), batch_at, LoopSettings(steps=1)).load is None


def test_olmoes_loss_is_that_of_the_language_alone() -> None:
    """While its own auxiliary loss takes part in the training."""
    model, reference = make_olmoe(), make_olmoe()
    logits = reference(input_ids=batch_at(0)["input_ids"]).logits
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch_at(0)["labels"][:, 1:].flatten())
    with_auxiliary = reference(**batch_at(0), output_router_logits=True).loss
    assert with_auxiliary - plain > 0.5
    log = train(model, batch_at, LoopSettings(steps=2))
    assert log.losses[0] == pytest.approx(plain.item(), abs=1e-5)
    without = make_olmoe()
    without.router_aux_loss_coef = 0.0
    assert log.losses[1] != train(without, batch_at, LoopSettings(steps=2)).losses[1]


def test_the_settings_reach_the_optimizer() -> None:
    start = values(make_llama())

    def changes(**settings: Any) -> set[str]:
        model = make_llama()
        train(model, batch_at, LoopSettings(steps=1, warmup_steps=0, **settings))
        return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, start[name])}

    matrices = {name for name in start if "_proj." in name}
    assert changes() == start.keys()
    assert changes(muon_lr=0.0) == start.keys() - matrices
    assert changes(adamw_lr=0.0) == matrices


@pytest.mark.parametrize(
    "other",
    [
        {"weight_decay": 0.5},
        {"betas": (0.5, 0.6)},
        {"momentum": 0.5},
        {"adjust_lr": "match_rms_adamw"},
        {"newton_schulz_dtype": "bfloat16"},
        {"gradient_clip": 1e-3},
        {"warmup_steps": 0},
    ],
)
def test_every_setting_decides_numbers(other: dict[str, Any]) -> None:
    default = {"steps": 20, "warmup_steps": 2, "newton_schulz_dtype": "float32"}
    a = train(make_llama(), batch_at, LoopSettings(**default))
    b = train(make_llama(), batch_at, LoopSettings(**{**default, **other}))
    assert a.losses[0] == b.losses[0]
    assert a.losses != b.losses


def test_runs_in_one_process_do_not_disturb_each_other() -> None:
    first = train(make_zaya(), batch_at, SETTINGS)
    train(make_llama(), batch_at, LoopSettings(steps=2))
    model = make_zaya()
    second = train(model, batch_at, SETTINGS)
    assert first.losses == second.losses
    third = train(model, batch_at, SETTINGS)  # the same object once more
    assert third.losses[0] < second.losses[0]


# ------------------------------------------------------------------------------------------------------------- going on
DROPOUT = {"attention_dropout": 0.2}  # random numbers of their own, which have to go on too


@pytest.mark.parametrize("make", [make_zaya, make_llama])
@pytest.mark.parametrize(
    ("step", "error", "saved"),
    [(1, KeyboardInterrupt, 1), (3, KeyboardInterrupt, 3), (5, Stop, 3), (6, Stop, 3), (7, Stop, 6), (2, Stop, 0)],
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    make: Callable[..., PreTrainedModel], step: int, error: type[BaseException], saved: int, tmp_path: Path
) -> None:
    expected, expected_values = uninterrupted(make, **DROPOUT)
    model = make(**DROPOUT)
    torch.manual_seed(1)
    with pytest.raises(error):
        train(model, batch_at, SETTINGS, checkpoint=tmp_path / "c", on_step=stop_at(step, error))
    seen: list[int] = []
    asked: list[int] = []

    def counting(step: int) -> dict[str, Tensor]:
        asked.append(step)
        return batch_at(step)

    model = make(**DROPOUT)
    torch.manual_seed(1 if saved == 0 else 99)  # where it goes on, the numbers do too
    log = train(model, counting, SETTINGS, checkpoint=tmp_path / "c", on_step=lambda done, loss: seen.append(done))
    assert seen == list(range(saved + 1, 9))
    assert asked == list(range(saved, 8))
    assert log.losses == expected.losses
    assert log.load == expected.load
    assert log.tokens == expected.tokens
    assert_equal(values(model), expected_values)


def test_tied_weights_stay_tied_when_a_run_goes_on(tmp_path: Path) -> None:
    expected, _ = uninterrupted(make_llama, tie_word_embeddings=True)
    with pytest.raises(Stop):
        train(make_llama(tie_word_embeddings=True), batch_at, SETTINGS, checkpoint=tmp_path, on_step=stop_at(5, Stop))
    model = make_llama(tie_word_embeddings=True)
    assert train(model, batch_at, SETTINGS, checkpoint=tmp_path).losses == expected.losses
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_interrupted_twice(tmp_path: Path) -> None:
    expected, _ = uninterrupted(make_zaya)
    for step in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            train(make_zaya(), batch_at, SETTINGS, checkpoint=tmp_path, on_step=stop_at(step, KeyboardInterrupt))
    assert train(make_zaya(), batch_at, SETTINGS, checkpoint=tmp_path).losses == expected.losses


def test_a_finished_run_is_restored(tmp_path: Path) -> None:
    trained, restored = make_zaya(), make_zaya()
    first = train(trained, batch_at, SETTINGS, checkpoint=tmp_path)

    def never(step: int) -> dict[str, Tensor]:
        raise AssertionError("no batch is needed")

    second = train(restored, never, SETTINGS, checkpoint=tmp_path)
    assert second == first  # seconds too
    assert_equal(values(trained), values(restored))


def test_checkpoints_change_no_number(tmp_path: Path) -> None:
    model = make_zaya(**DROPOUT)
    torch.manual_seed(1)
    log = train(model, batch_at, SETTINGS, checkpoint=tmp_path)
    assert log.losses == uninterrupted(make_zaya, **DROPOUT)[0].losses


def test_only_the_newest_checkpoint_is_kept_and_all_can_go(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    names: list[list[str]] = []

    def on_step(done: int, loss: float) -> None:
        names.append(sorted(path.name for path in folder.glob("*")))

    train(make_zaya(), batch_at, SETTINGS, checkpoint=folder, on_step=on_step)
    assert names == [[], [], [], ["step-3"], ["step-3"], ["step-3"], ["step-6"], ["step-6"]]
    CheckpointStore(folder).remove()
    assert not folder.exists()


def test_a_folder_with_other_things_is_not_removed(tmp_path: Path) -> None:
    train(make_llama(), batch_at, LoopSettings(steps=1), checkpoint=tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    CheckpointStore(tmp_path).remove()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(make_llama(), batch_at, SETTINGS, on_step=stop_at(4, KeyboardInterrupt))
    assert list(tmp_path.iterdir()) == []


def test_seconds_add_up_over_interruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    whole = train(make_llama(), batch_at, SETTINGS).seconds
    with pytest.raises(KeyboardInterrupt):
        train(make_llama(), batch_at, SETTINGS, checkpoint=tmp_path, on_step=stop_at(4, KeyboardInterrupt))
    assert train(make_llama(), batch_at, SETTINGS, checkpoint=tmp_path).seconds == whole == 8 * 2


class TestCheckpointsThatDoNotFit:
    def interrupted(self, folder: Path, fingerprint: str = "one") -> None:
        stop = stop_at(4, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            train(make_zaya(), batch_at, SETTINGS, checkpoint=folder, fingerprint=fingerprint, on_step=stop)

    def first_step(self, folder: Path, fingerprint: str = "one", settings: LoopSettings = SETTINGS) -> int:
        """The number of the first step that is done, and not restored."""
        seen: list[int] = []
        model = make_zaya()
        log = train(
            model,
            batch_at,
            settings,
            checkpoint=folder,
            fingerprint=fingerprint,
            on_step=lambda done, loss: seen.append(done),
        )
        expected, expected_values = uninterrupted(make_zaya, settings)
        assert log.losses == expected.losses
        assert_equal(values(model), expected_values)
        return seen[0]

    def test_the_same_goes_on(self, tmp_path: Path) -> None:
        self.interrupted(tmp_path)
        assert self.first_step(tmp_path) == 5

    def test_how_often_checkpoints_are_written_does_not_matter(self, tmp_path: Path) -> None:
        self.interrupted(tmp_path)
        settings = LoopSettings(steps=8, warmup_steps=2, checkpoint_every=0, newton_schulz_dtype="float32")
        assert self.first_step(tmp_path, settings=settings) == 5

    def test_another_fingerprint_starts_anew_and_replaces(self, tmp_path: Path) -> None:
        self.interrupted(tmp_path)
        assert self.first_step(tmp_path, "two") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["step-8"]

    def test_other_settings_start_anew(self, tmp_path: Path) -> None:
        self.interrupted(tmp_path)
        settings = LoopSettings(steps=8, warmup_steps=2, newton_schulz_dtype="float32", weight_decay=0.5)
        assert self.first_step(tmp_path, settings=settings) == 1

    @pytest.mark.parametrize(
        "name", ["model/model.safetensors", "optimizer/__0_0.distcp", "balancing.pt", "rng-0.pt", "trainer.json"]
    )
    def test_a_damaged_one_starts_anew(self, name: str, tmp_path: Path) -> None:
        self.interrupted(tmp_path)
        file = tmp_path / "step-4" / name
        content = file.read_bytes()
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert self.first_step(tmp_path) == 1

    def test_one_that_was_not_finished_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A process that dies while it writes leaves the checkpoint before in force."""
        real = Path.replace

        def die(self: Path, target: Path) -> Path:
            if target.name == "step-6":
                raise Stop
            return real(self, target)

        monkeypatch.setattr(Path, "replace", die)
        with pytest.raises(Stop):
            train(make_zaya(), batch_at, SETTINGS, checkpoint=tmp_path, fingerprint="one")
        monkeypatch.undo()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-6.tmp"]
        assert self.first_step(tmp_path) == 4
        assert [path.name for path in tmp_path.iterdir()] == ["step-8"]

    def test_foreign_files_do_not_matter(self, tmp_path: Path) -> None:
        self.interrupted(tmp_path)
        (tmp_path / "step-x").mkdir()
        (tmp_path / "step-9").mkdir()
        assert self.first_step(tmp_path) == 5


# ------------------------------------------------------------------------------------------------------------- stopping
class TestNumbersThatAreNone:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_loss(self, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_zaya()
        losses: list[float] = []
        before: dict[str, Tensor] = {}
        real = model.loss_function

        def loss_function(*args: Any, **kwargs: Any) -> Tensor:
            before.update(values(model))
            loss: Tensor = real(*args, **kwargs)
            return loss * bad if len(losses) == 2 else loss

        model.loss_function = loss_function
        with pytest.raises(RuntimeError, match=r"the loss is (nan|inf) at step 3 of 8"):
            train(model, batch_at, SETTINGS, on_step=lambda done, loss: losses.append(loss))
        assert_equal(values(model), before)
        assert not model.training

    def test_a_gradient(self) -> None:
        model = make_zaya()
        steps: list[int] = []
        before: dict[str, Tensor] = {}

        def spoil(gradient: Tensor) -> Tensor:
            before.update(values(model))
            return gradient * math.nan if len(steps) == 2 else gradient

        handle = model.get_input_embeddings().weight.register_hook(spoil)
        with pytest.raises(RuntimeError, match="the gradient's norm is nan at step 3 of 8"):
            train(model, batch_at, SETTINGS, on_step=lambda done, loss: steps.append(done))
        handle.remove()
        assert_equal(values(model), before)

    def test_a_run_that_stopped_so_has_a_checkpoint_from_before(self, tmp_path: Path) -> None:
        model = make_llama()

        def bad_batch(step: int) -> dict[str, Tensor]:
            if step == 4:
                model.lm_head.weight.data[0, 0] = math.nan
            return batch_at(step)

        with pytest.raises(RuntimeError, match="the loss is nan at step 5 of 8"):
            train(model, bad_batch, SETTINGS, checkpoint=tmp_path)
        expected, _ = uninterrupted(make_llama)
        assert train(make_llama(), batch_at, SETTINGS, checkpoint=tmp_path).losses == expected.losses


def with_auxiliary_loss(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a model that does not use its weight itself, for a class whose weight has another name."""

    def call(**inputs: Any) -> Any:
        output = forward(**{**inputs, "output_router_logits": False})
        output.aux_loss = torch.ones(())
        return output

    return call


class TestErrors:
    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"steps": 0}, "steps is 0"),
            ({"warmup_steps": -1}, "warmup_steps is -1"),
            ({"gradient_clip": 0.0}, "gradient_clip is 0.0"),
            ({"gradient_clip": math.nan}, "gradient_clip is nan"),
            ({"balancing_lr": -1.0}, "balancing_lr is -1.0"),
            ({"checkpoint_every": -1}, "checkpoint_every is -1"),
            ({"newton_schulz_dtype": "float16"}, "newton_schulz_dtype is 'float16'"),
            ({"adjust_lr": "no"}, "adjust_lr is 'no'"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            LoopSettings(**{"steps": 1, **settings})

    def test_settings_of_the_optimizer(self) -> None:
        with pytest.raises(ValueError, match="lr is -1"):
            train(make_llama(), batch_at, LoopSettings(steps=1, muon_lr=-1))

    def test_a_place_for_checkpoints_that_is_none_shows_before_the_first_step(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file"):
            train(make_llama(), lambda step: pytest.fail("began"), SETTINGS, checkpoint=tmp_path / "file")

    def test_batches_without_labels(self) -> None:
        with pytest.raises(ValueError, match="the batch has no labels"):
            train(make_llama(), lambda step: {"input_ids": batch_at(step)["input_ids"]}, SETTINGS)

    def test_an_auxiliary_loss_of_unknown_weight(self) -> None:
        model = make_olmoe()
        del model.router_aux_loss_coef
        model.router_aux_loss_coef = None
        model.forward = with_auxiliary_loss(model.forward)
        with pytest.raises(ValueError, match="OlmoeForCausalLM adds an auxiliary loss of unknown weight"):
            train(model, batch_at, SETTINGS)

    def test_routers_that_do_not_tell_their_counts(self) -> None:
        torch.manual_seed(0)
        model = transformers.ZayaForCausalLM(transformers.ZayaConfig(**{**TINY, "num_hidden_layers": 1}))
        with pytest.raises(ValueError, match="tokens_per_slot"):
            train(model, batch_at, LoopSettings(steps=1))
        log: TrainingLog = train(model, batch_at, LoopSettings(steps=1, balancing_lr=0))
        assert log.load is None


def test_the_environment_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    before = train(make_llama(), batch_at, SETTINGS).losses
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert train(make_llama(), batch_at, SETTINGS).losses == before


def test_no_clipping_and_a_clip_that_never_bites_are_the_same() -> None:
    runs = [train(make_llama(), batch_at, LoopSettings(steps=4, gradient_clip=c)).losses for c in (math.inf, 1e6)]
    assert runs[0] == runs[1]
