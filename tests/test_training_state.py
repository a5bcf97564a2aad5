"""The state of a run in files: everything that the next step depends on, to the bit; what is missing stops the run."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM

import zaya_hf
from zaya_hf.testing import redraw, tiny_config
from zaya_hf.training import rng
from zaya_hf.training.balancing import BiasBalancer
from zaya_hf.training.checkpoint import CheckpointStore
from zaya_hf.training.config import BalancingConfig, TrainingConfig
from zaya_hf.training.distributed import make_accelerator
from zaya_hf.training.ema import ExponentialMovingAverage
from zaya_hf.training.lora import lora_targets
from zaya_hf.training.optim import build_optimizer
from zaya_hf.training.parts import Progress, Run, StepSettings
from zaya_hf.training.same_run import RunIdentity
from zaya_hf.training.state import RunCheckpoints, export_model


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return make_accelerator()


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "attention_dropout": 0.2}


def make_run(accelerator: Accelerator, seed: int = 0, *, lora: bool = False, ema: bool = True, **changes: Any) -> Run:
    """A run whose every part remembers something; `seed` is that of the initial weights."""
    torch.manual_seed(seed)
    model = redraw(zaya_hf.ZayaForCausalLM(tiny_config(**{**SMALL, **changes})), seed)
    if lora:
        from peft import LoraConfig, get_peft_model

        redraw(model, 0)  # the same base model in every run
        targets = lora_targets(model)
        model = get_peft_model(model, LoraConfig(**targets, r=2, lora_alpha=4, task_type="CAUSAL_LM"))
    optimizer = build_optimizer(model, muon_lr=1e-2, adamw_lr=1e-2)
    balancer = BiasBalancer.for_model(model, BalancingConfig(lr=1e-2))
    average = ExponentialMovingAverage(model, 0.9) if ema else None
    model, optimizer = accelerator.prepare(model, optimizer)
    settings = StepSettings(steps=10, rows=2)
    return Run(accelerator, model, optimizer, lambda step: 1.0, None, settings, balancer=balancer, ema=average)  # type: ignore[arg-type]


def advance(run: Run, steps: int) -> list[float]:
    """So many steps on random data with dropout; their losses."""
    losses = []
    run.model.train()
    for _ in range(steps):
        ids = torch.randint(3, 128, (2, 12))
        output = run.model(input_ids=ids, labels=ids, output_router_logits=True)
        assert run.balancer is not None
        run.balancer.observe(output.tokens_per_slot)
        run.accelerator.backward(output.loss)
        run.balancer.step()
        run.optimizer.step()
        run.optimizer.zero_grad()
        if run.ema is not None:
            run.ema.update()
        losses.append(output.loss.item() + random.random() + float(np.random.rand()))
        run.guard.judge(losses[-1], 1.0, step=run.progress.step, window=run.progress.window)
        run.progress.step += 1
        run.progress.tokens += 24
    return losses


def everything(run: Run) -> dict[str, Tensor]:
    """All tensors of a run by name."""
    model = run.accelerator.unwrap_model(run.model)
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            for part, tensor in run.optimizer.state[parameter].items():
                found[f"optimizer.{names[id(parameter)]}.{part}"] = tensor
    if run.ema is not None:
        found |= {f"ema.{name}": tensor for name, tensor in run.ema.state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])] == []


def checkpoints(folder: Path, **options: Any) -> RunCheckpoints:
    return RunCheckpoints(CheckpointStore(folder, keep=2), **options)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a full disk: no file can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# ------------------------------------------------------------------------------------------------------------- going on
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_goes_on_bit_for_bit(accelerator: Accelerator, lora: bool, tied: bool, tmp_path: Path) -> None:
    run = make_run(accelerator, 0, lora=lora, tie_word_embeddings=tied)
    rng.seed_all(5)
    advance(run, 3)
    run.progress.skip([7, 8])
    checkpoints(tmp_path).save(run)
    saved = everything(run)
    expected = advance(run, 3)
    after = everything(run)
    state_after = run.guard.state_dict()

    other = make_run(accelerator, 1, lora=lora, tie_word_embeddings=tied)
    rng.seed_all(6)
    advance(other, 1)
    assert checkpoints(tmp_path).restore(other)
    assert_equal(everything(other), saved)
    assert other.progress == Progress(step=3, tokens=72, skipped_windows=[(7, 9)])
    assert advance(other, 3) == expected
    assert_equal(everything(other), after)
    assert other.guard.state_dict() == state_after
    names = {name.rsplit(".", 1)[-1] for name in saved}
    # Of LoRA's matrices all are AdamW's.
    muon = set() if lora else {"momentum_buffer"}
    assert {"exp_avg", "exp_avg_sq", "step", "balancing_biases"} | muon <= names

    assert checkpoints(tmp_path).restore(run)  # the same objects, gone back
    assert advance(run, 3) == expected
    if not lora and tied:
        model = accelerator.unwrap_model(run.model)
        assert model.lm_head.weight is model.get_input_embeddings().weight


def test_the_model_in_it_loads(accelerator: Accelerator, tmp_path: Path) -> None:
    run = make_run(accelerator)
    advance(run, 1)
    checkpoints(tmp_path).save(run)
    for part, state in (("model", run.model.state_dict()), ("ema", run.ema.state_dict())):  # type: ignore[union-attr]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1" / part, dtype=torch.float32)
        assert_equal(dict(loaded.state_dict()), dict(state))


def test_weights_in_bf16_keep_averages_and_biases_in_fp32(accelerator: Accelerator, tmp_path: Path) -> None:
    def make(seed: int) -> Run:
        model = redraw(zaya_hf.ZayaForCausalLM(tiny_config(**SMALL)), seed).to(torch.bfloat16)
        optimizer = build_optimizer(model)
        balancer, ema = BiasBalancer.for_model(model, BalancingConfig(lr=1e-2)), ExponentialMovingAverage(model, 0.9)
        settings = StepSettings(steps=10, rows=2)
        return Run(accelerator, model, optimizer, lambda step: 1.0, None, settings, balancer=balancer, ema=ema)  # type: ignore[arg-type]

    run, other = make(0), make(1)
    advance(run, 2)
    checkpoints(tmp_path).save(run)
    assert checkpoints(tmp_path).restore(other)
    saved = everything(other)
    assert_equal(saved, everything(run))
    kinds = {name.split(".")[0]: tensor.dtype for name, tensor in saved.items() if "q_proj" in name}
    assert kinds == {"model": torch.bfloat16, "optimizer": torch.bfloat16, "ema": torch.float32}
    assert {t.dtype for name, t in saved.items() if name.endswith("balancing_biases")} == {torch.float32}


def test_the_description(accelerator: Accelerator, tmp_path: Path) -> None:
    run = make_run(accelerator, ema=False)
    run.progress = Progress(step=4, tokens=100, skipped_windows=[(2, 3)])
    checkpoints(tmp_path, facts=lambda: {"more": 1}).save(run)
    told = json.loads((tmp_path / "step-4" / "trainer.json").read_text(encoding="utf-8"))
    assert (told["step"], told["next_sample"], told["world_size"], told["more"]) == (4, 10, 1, 1)
    assert told["progress"]["skipped_windows"] == [[2, 3]]
    assert told["versions"]["torch"] == torch.__version__


def test_without_a_checkpoint_nothing_changes(accelerator: Accelerator, tmp_path: Path) -> None:
    run = make_run(accelerator)
    before = everything(run)
    assert not checkpoints(tmp_path).restore(run)
    assert_equal(everything(run), before)


def test_going_back_forgets_what_is_newer(accelerator: Accelerator, tmp_path: Path) -> None:
    run = make_run(accelerator, ema=False)
    told: list[dict[str, Any]] = []
    kept = checkpoints(tmp_path, restored=told.append)
    for _ in range(2):
        advance(run, 2)
        kept.save(run)
    assert kept.restore(run, at_most=3)
    assert run.progress.step == 2
    assert [description["step"] for description in told] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
    assert not kept.restore(run, at_most=1)
    assert run.progress.step == 2


# -------------------------------------------------------------------------------------------------------- what is wrong
@pytest.fixture(scope="module")
def saved(accelerator: Accelerator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run = make_run(accelerator)
    advance(run, 1)
    checkpoints(folder).save(run)
    return folder


def without(*parts: str) -> Callable[[Path], None]:
    """Take parts out of a checkpoint, and out of its manifest too, as if they had never been written."""

    def change(folder: Path) -> None:
        path = folder / "step-1" / "manifest.json"
        manifest = json.loads(path.read_text(encoding="utf-8"))
        for part in parts:
            place = folder / "step-1" / part
            shutil.rmtree(place) if place.is_dir() else place.unlink()
            manifest["files"] = {n: e for n, e in manifest["files"].items() if n.split("/")[0] != part}
        path.write_text(json.dumps(manifest), encoding="utf-8")

    return change


@pytest.mark.parametrize("part", ["model", "ema", "optimizer", "balancing.pt"])
def test_what_is_missing_is_named(accelerator: Accelerator, part: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    without(part)(folder)
    run = make_run(accelerator, 1)
    before = everything(run)
    with pytest.raises(ValueError, match=f"step-1 has no {part}, which this run needs to go on"):
        checkpoints(folder).restore(run)
    assert_equal(everything(run), before)


def test_every_damaged_file_is_found(accelerator: Accelerator, saved: Path, tmp_path: Path) -> None:
    files = [path.relative_to(saved) for path in saved.rglob("*") if path.is_file()]
    assert {path.parts[1] for path in files} == {
        "model", "ema", "optimizer", "balancing.pt", "rng-0.pt", "trainer.json", "manifest.json"
    }  # fmt: skip
    run = make_run(accelerator, 1)
    for number, path in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        content = (folder / path).read_bytes()
        (folder / path).write_bytes(content[: len(content) // 2])
        said: list[str] = []
        assert not checkpoints(folder, say=said.append).restore(run), path
        assert "/".join(path.parts[1:]) in said[0]


def test_another_model_does_not_fit(accelerator: Accelerator, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"the weights have no model\.layers\.2\.|has shape"):
        checkpoints(saved).restore(make_run(accelerator, num_hidden_layers=3))


def test_another_optimizer_does_not_fit(accelerator: Accelerator, saved: Path) -> None:
    run = make_run(accelerator)
    model = accelerator.unwrap_model(run.model)
    run.optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"optimizer has no \S+\.exp_avg, which the optimizer has"):
        checkpoints(saved).restore(run)


@pytest.mark.parametrize("size", [100, 30_000, 150_000, 300_000])
def test_a_full_disk(accelerator: Accelerator, size: int, tmp_path: Path) -> None:
    """Whichever file it is that does not fit."""
    run = make_run(accelerator)
    kept = checkpoints(tmp_path)
    kept.save(run)
    advance(run, 1)
    with largest_file(size), pytest.raises(OSError, match="step-1 could not be written") as caught:
        kept.save(run)
    assert "\n" not in str(caught.value)
    assert "step-0 stays as it is" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
    kept.save(run)
    assert kept.restore(run)


# -------------------------------------------------------------------------------------------------------- the same run?
def config(**changes: Any) -> TrainingConfig:
    values: dict[str, Any] = {
        "out": "runs/a",
        "steps": 100,
        "model": {"config": {"hidden_size": 32}},
        "data": {"sources": [{"path": "a.txt"}, {"path": "b.txt"}], "sequence_length": 16},
        "batch": {"rows": 4},
        "optimizer": {"lr": 0.02},
    }
    for key, value in changes.items():
        section = values
        *path, last = key.split("__")
        for part in path:
            section = section[int(part)] if isinstance(section, list) else section.setdefault(part, {})
        section[last] = value
    return TrainingConfig.model_validate(values)


def identity(**changes: Any) -> dict[str, Any]:
    source = {"name": "a", "weight": 1.0, "documents": 3, "tokens": 9, "rows": 2, "fingerprint": "f", "files": {}}
    return {
        "order_version": 1,
        "seed": 0,
        "length": 16,
        "packing": "contiguous",
        "sources": [source | changes],
    }


def description(now: RunIdentity) -> dict[str, Any]:
    from zaya_hf.training.state import versions

    return json.loads(json.dumps(now.facts() | {"versions": versions()}))  # type: ignore[no-any-return]


class TestTheSameRun:
    before = description(RunIdentity(config(), identity()))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("out", "elsewhere"),
            ("logging__every", 7),
            ("logging__trackers", ["wandb"]),
            ("checkpoint__every", 7),
            ("evaluation__every", 7),
            ("evaluation__lm_eval", {"tasks": ["a"], "every": 2}),
            ("guard__wall_clock_minutes", 3.0),
            ("data__workers", 2),
            ("data__cache", "c"),
            ("data__held_out", [{"path": "h.txt"}]),
            ("data__sources__0__path", "moved.txt"),
            ("batch__micro_rows", 2),
            ("activation_checkpointing", True),
        ],
    )
    def test_what_decides_no_number_may_change(self, key: str, value: Any) -> None:
        assert RunIdentity(config(**{key: value}), identity()).accepts(self.before)

    @pytest.mark.parametrize(
        ("key", "value", "told"),
        [
            ("steps", 200, "steps was 100 and is 200"),
            ("optimizer__lr", 0.01, r"optimizer\.lr was 0\.02 and is 0\.01"),
            ("model__config__hidden_size", 64, r"model\.config\.hidden_size was 32 and is 64"),
            ("data__sources__1__weight", 2.0, r"data\.sources\.1\.weight was 1\.0 and is 2\.0"),
            ("data__sources", [{"path": "a.txt"}], r"data\.sources\.1\.\w+ was"),
            ("batch__rows", 8, r"batch\.rows was 4 and is 8"),
            ("ema_decay", 0.9, r"ema_decay was None and is 0\.9"),
            ("guard__spike_z", None, r"guard\.spike_z was 8\.0 and is None"),
            ("precision", "bfloat16", "precision was 'float32'"),
        ],
    )
    def test_what_decides_numbers_may_not(self, key: str, value: Any, told: str) -> None:
        now = config(**{key: value})
        with pytest.raises(ValueError, match=f"the run in runs/a has other settings: {told}") as caught:
            RunIdentity(now, identity()).accepts(self.before)
        assert "\n" not in str(caught.value)
        accepted = now.model_copy(update={"accept_changes": [key.replace("__", ".")]})
        assert RunIdentity(accepted, identity()).accepts(self.before)

    def test_sections_can_be_accepted(self) -> None:
        now = config(optimizer__lr=0.01, optimizer__momentum=0.5, accept_changes=["optimizer"])
        assert RunIdentity(now, identity()).accepts(self.before)

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("optimizer.lrs", r"there is no setting optimizer\.lrs; did you mean optimizer\.lr\?"),
            ("optimizer.l", r"there is no setting optimizer\.l; did"),
            ("zzzzzzz", "there is no setting zzzzzzz$"),
        ],
    )
    def test_a_setting_that_there_is_not_cannot_be_accepted(self, name: str, told: str) -> None:
        with pytest.raises(ValueError, match=told):
            RunIdentity(config(accept_changes=["data", name]), identity()).accepts(self.before)

    def test_many_differences(self) -> None:
        now = config(optimizer={"lr": 1.0, "momentum": 0.1, "weight_decay": 0.5, "eps": 1.0, "ns_steps": 3}, seed=7)
        with pytest.raises(ValueError, match="; 1 more\\. Give it the old ones"):
            RunIdentity(now, identity()).accepts(self.before)

    def test_the_length_in_tokens(self) -> None:
        assert RunIdentity(config(steps=None, tokens=6400), identity()).accepts(self.before)
        with pytest.raises(ValueError, match="steps was 100 and is 101"):
            RunIdentity(config(steps=None, tokens=6401), identity()).accepts(self.before)

    def test_data(self) -> None:
        other = identity(fingerprint="g", files={"a.txt": "1"})
        with pytest.raises(ValueError, match=r"source 'a'|a\.txt"):
            RunIdentity(config(), other).accepts(self.before)
        assert RunIdentity(config(accept_changes=["data"]), other).accepts(self.before)

    def test_other_versions_are_told(self) -> None:
        said: list[str] = []
        before = self.before | {"versions": self.before["versions"] | {"torch": "2.0.0"}}
        assert RunIdentity(config(), identity(), said.append).accepts(before)
        assert said == [f"torch was 2.0.0 and is {torch.__version__}: from here on the last digits may differ"]


# ------------------------------------------------------------------------------------------------------- random numbers
def draw() -> list[float]:
    numbers = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]
    return [*numbers, float(torch.rand(())), float(torch.randn(()))]


def test_all_generators_go_on(tmp_path: Path) -> None:
    rng.seed_all(1)
    draw()  # numpy and Python keep the second of two normal numbers
    torch.save(rng.capture(), tmp_path / "rng.pt")
    expected = [draw() for _ in range(3)]
    rng.seed_all(2)
    assert draw() != expected[0]
    rng.restore(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_streams_are_their_own() -> None:
    seen = set()
    for stream in [(0,), (1,), (0, 1), (1, 0), (0, 0, 1), (2**40,)]:
        rng.seed_all(3, *stream)
        first = draw()
        rng.seed_all(3, *stream)
        assert draw() == first
        seen |= set(first)
    assert len(seen) == 6 * 6


def test_a_further_process_has_random_numbers_of_its_own(accelerator: Accelerator, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(saved, folder)
    without("rng-0.pt")(folder)
    run = make_run(accelerator)
    assert checkpoints(folder, seed=4).restore(run)
    first = draw()
    rng.seed_all(4, 1, 0)
    assert draw() == first


# --------------------------------------------------------------------------------------------------------------- export
class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").touch()


@pytest.mark.parametrize("averaged", [False, True])
def test_the_final_model(accelerator: Accelerator, averaged: bool, tmp_path: Path) -> None:
    run = make_run(accelerator)
    advance(run, 2)
    folder = tmp_path / "model"
    (folder / "old").mkdir(parents=True)
    export_model(run, folder, Tokenizer(), averaged=averaged)
    assert run.ema is not None
    expected = run.ema.state_dict() if averaged else dict(run.model.state_dict())
    assert_equal(dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()), expected)
    assert (folder / "tokenizer.json").exists()
    assert not (folder / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_averages_that_there_are_not(accelerator: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the run keeps none"):
        export_model(make_run(accelerator, ema=False), tmp_path / "model", averaged=True)
