"""Whole runs: what a folder holds at the end, what repeats, what comes next from it, and what is refused."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import DistributedType
from transformers import AutoTokenizer

from chat_folders import save_chat_folder
from zaya_hf import ZayaForCausalLM
from zaya_hf.training import run
from zaya_hf.training.config import TrainingConfig
from zaya_hf.training.held_out import Evaluator
from zaya_hf.training.models import base_digest
from zaya_hf.training.recorder import Recorder

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "router_hidden_size": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of text, as JSON Lines."""
    folder, draw = tmp_path_factory.mktemp("texts"), random.Random(0)
    for name, letters in (("letters", "abcdefgh"), ("digits", "0123456789")):
        words = ["".join(draw.choices(letters, k=draw.randint(2, 6))) for _ in range(40)]
        records = [{"text": " ".join(draw.choices(words, k=draw.randint(5, 60)))} for _ in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def config(out: Path, texts: Path, **changes: Any) -> TrainingConfig:
    settings: dict[str, Any] = {
        "out": str(out),
        "steps": 6,
        "model": {"config": MODEL},
        "tokenizer": {"train_vocab_size": 300},
        "data": {
            "sources": [
                {"path": str(texts / "letters.jsonl"), "weight": 3.0},
                {"path": str(texts / "digits.jsonl"), "weight": 1.0},
            ],
            "held_out_fraction": 0.1,
            "sequence_length": 48,
            "packing": "best_fit",
        },
        "batch": {"rows": 4, "micro_rows": 2},
        "optimizer": {"lr": 0.02, "adamw_lr": 0.01},
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "evaluation": {"every": 3},
        "logging": {"router_panel_every": 2},
        "activation_checkpointing": True,
        "ema_decay": 0.9,
        "z_loss": 1e-4,
    }
    return TrainingConfig.model_validate(settings | changes)


def records(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "pretrained"
    assert run.main(config(out, texts)) == 0
    return out


def test_what_a_run_leaves(finished: Path) -> None:
    steps = records(finished, "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(record["targets"] > 0 and record["tokens"] > 0 for record in steps)
    assert [record["step"] for record in steps if "router" in record] == [2, 4, 6]
    evaluations = records(finished, "evaluations.jsonl")
    assert [record["step"] for record in evaluations] == [3, 6]
    assert set(evaluations[0]["sources"]) == {"letters.jsonl", "digits.jsonl"}
    assert evaluations[-1]["bits_per_byte"] < evaluations[0]["bits_per_byte"]
    assert [record["event"] for record in records(finished, "events.jsonl")][-1] == "finish"
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["step-4", "step-6"]
    assert (finished / "config.yaml").is_file()
    assert json.loads((finished / "environment.json").read_text())["model"]["parameters"] > 0


def test_the_model_of_a_run_is_that_of_its_last_checkpoint(finished: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    ids = torch.tensor([tokenizer("abc def")["input_ids"]])
    logits = {}
    for name in ("model", "model-ema", "checkpoints/step-6/model", "checkpoints/step-6/ema"):
        with torch.no_grad():
            logits[name] = ZayaForCausalLM.from_pretrained(finished / name)(ids).logits
    assert torch.equal(logits["model"], logits["checkpoints/step-6/model"])
    assert torch.equal(logits["model-ema"], logits["checkpoints/step-6/ema"])
    assert not torch.allclose(logits["model"], logits["model-ema"])


def test_a_finished_run_is_not_repeated(
    finished: Path, texts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}

    before = files()
    written = (finished / "model" / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(run, "_assemble", None)  # it takes no model to find out
    assert run.main(config(finished, texts)) == 0
    assert f"all 6 steps are done: the model is in {finished / 'model'}" in capsys.readouterr().out
    assert files() == before
    assert (finished / "model" / "model.safetensors").stat().st_mtime_ns == written


def test_the_next_phase_goes_on_from_a_run(finished: Path, texts: Path, tmp_path: Path) -> None:
    """Longer rows, another RoPE base, other shares; the tokenizer and the weights are the run's."""
    overrides = {"rope_theta": 1e6, "max_position_embeddings": 256}
    phase = config(
        tmp_path / "phase",
        texts,
        steps=1,
        model={"checkpoint": str(finished), "overrides": overrides},
        tokenizer={},
        data={"sources": [{"path": str(texts / "digits.jsonl")}], "sequence_length": 200},
        ema_decay=None,
        optimizer={"lr": 1e-9},
    )
    assert run.main(phase) == 0
    before = ZayaForCausalLM.from_pretrained(finished / "model")
    after = ZayaForCausalLM.from_pretrained(tmp_path / "phase" / "model")
    assert after.config.max_position_embeddings == 256
    assert after.config.rope_parameters["hybrid"]["rope_theta"] == 1e6
    for name, parameter in before.named_parameters():
        assert torch.allclose(parameter, after.get_parameter(name), atol=1e-6), name


def test_conversations_on_adapters(texts: Path, tmp_path: Path) -> None:
    """SFT with LoRA of a saved model: prompts are masked, and the folder at the end is an adapter."""
    base = save_chat_folder(tmp_path / "base")
    talks = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"{n} it is"}]}
        for n in range(20)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    sft = config(
        tmp_path / "sft",
        texts,
        steps=3,
        model={"checkpoint": str(base), "lora": {"r": 2}},
        tokenizer={},
        data={
            "sources": [{"path": str(tmp_path / "talks.jsonl"), "field": "messages"}],
            "sequence_length": 96,
            "packing": "best_fit",
            "chat": {},
        },
        balancing={"controller": "frozen"},
        ema_decay=None,
    )
    assert run.main(sft) == 0
    assert (tmp_path / "sft" / "model" / "adapter_model.safetensors").is_file()
    last = records(tmp_path / "sft", "metrics.jsonl")[-1]
    assert 0 < last["targets"] < last["tokens"] / 3
    adapted = ZayaForCausalLM.from_pretrained(tmp_path / "sft" / "model")
    assert any("lora" in name for name, _ in adapted.named_parameters())


def test_another_seed_is_refused_and_can_be_accepted(finished: Path, texts: Path) -> None:
    with pytest.raises(ValueError, match=r"other settings: seed (was|is) "):
        run.main(config(finished, texts, seed=1))


def test_a_run_goes_on_beyond_its_end(finished: Path, texts: Path, tmp_path: Path) -> None:
    """By a setting that may change; the model of the first end must not be taken for that of the second."""
    out = tmp_path / "longer"
    shutil.copytree(finished, out)
    finishes = [record["event"] for record in records(out, "events.jsonl")].count("finish")
    evaluator = Evaluator.run

    def seen(*arguments: Any) -> Any:
        assert not (out / "model").exists()
        return evaluator(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluator, "run", seen)
        assert run.main(config(out, texts, steps=9, accept_changes=["steps"])) == 0
    assert (out / "model" / "model.safetensors").is_file()
    assert [record["step"] for record in records(out, "evaluations.jsonl")] == [3, 6, 9]
    assert [record["event"] for record in records(out, "events.jsonl")].count("finish") == finishes + 1
    before = (out / "events.jsonl").read_bytes(), (out / "config.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"steps is 5, but the run in .* has done 9 already"):
        run.main(config(out, texts, steps=5, accept_changes=["steps"]))
    assert ((out / "events.jsonl").read_bytes(), (out / "config.yaml").read_bytes()) == before


def test_an_end_that_was_cut_short_is_made_good(finished: Path, texts: Path, tmp_path: Path) -> None:
    """Killed between the two models that a run ends with."""
    out = tmp_path / "cut"
    shutil.copytree(finished, out)
    shutil.rmtree(out / "model-ema")
    assert run.main(config(out, texts)) == 0
    weights = [(folder / "model-ema" / "model.safetensors").read_bytes() for folder in (out, finished)]
    assert weights[0] == weights[1]


def test_no_evaluation_is_there_twice(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped where one is due, which the next call makes and dies, so that the one after makes it again."""
    settings = config(tmp_path / "out", texts, steps=4, checkpoint={"every": 0}, ema_decay=None)
    step = Recorder.step

    def at(number: int, action: Callable[[], Any]) -> Callable[..., None]:
        def after(recorder: Recorder, record: dict[str, Any]) -> None:
            step(recorder, record)
            if record["step"] == number:
                action()

        return after

    def die() -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(Recorder, "step", at(2, lambda: os.kill(os.getpid(), signal.SIGUSR1)))  # seen in step 3
    assert run.main(settings) == 0
    assert not (tmp_path / "out" / "evaluations.jsonl").exists()
    monkeypatch.setattr(Recorder, "step", at(4, die))
    with pytest.raises(RuntimeError, match="killed"):
        run.main(settings)
    assert [record["step"] for record in records(tmp_path / "out", "evaluations.jsonl")] == [3]
    monkeypatch.setattr(Recorder, "step", step)
    assert run.main(settings) == 0
    assert [record["step"] for record in records(tmp_path / "out", "evaluations.jsonl")] == [3, 4]


def test_data_without_targets_is_refused(finished: Path, texts: Path, tmp_path: Path) -> None:
    """Documents of one token, which nothing comes before."""
    ids = [AutoTokenizer.from_pretrained(finished / "tokenizer").eos_token_id] * 6
    (tmp_path / "ids.bin").write_bytes(np.array(ids, dtype="<u2").tobytes())
    source = {"path": str(tmp_path / "ids.bin"), "kind": "flat", "dtype": "uint16", "name": "ones"}
    data = {"sources": [source], "sequence_length": 48}
    with pytest.raises(ValueError, match="data source 'ones' has no token to predict"):
        run.main(config(tmp_path / "out", texts, tokenizer={"path": str(finished / "tokenizer")}, data=data))
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_no_whole_checkpoint_is_no_reason_to_start_anew(finished: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "damaged"
    shutil.copytree(finished, out)
    for manifest in out.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    before = sorted(path.relative_to(out) for path in (out / "checkpoints").rglob("*"))
    with pytest.raises(ValueError, match=r"no whole checkpoint to go on from \(step-6, step-4\)"):
        run.main(config(out, texts))
    assert sorted(path.relative_to(out) for path in (out / "checkpoints").rglob("*")) == before
    assert len(records(out, "metrics.jsonl")) == 6


def test_a_model_keeps_its_tokenizer(finished: Path, texts: Path, tmp_path: Path) -> None:
    """Other text may be accepted; a tokenizer trained on it would mean other words by the same ids."""
    out, more = tmp_path / "more", tmp_path / "texts"
    shutil.copytree(finished, out)
    shutil.copytree(texts, more)
    with (more / "letters.jsonl").open("a") as file:
        file.write(json.dumps({"text": "xyz " * 400}) + "\n")
    before = (out / "tokenizer" / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match="letters"):
        run.main(config(out, more, steps=7, accept_changes=["steps"]))
    assert run.main(config(out, more, steps=7, accept_changes=["steps", "data"])) == 0
    assert (out / "tokenizer" / "tokenizer.json").read_bytes() == before
    (out / "tokenizer" / "tokenizer.json").write_bytes(before.replace(b"[", b"[ ", 1))  # the same, written otherwise
    assert run.main(config(out, more, steps=7, accept_changes=["steps", "data"])) == 0
    changed = json.loads(before)
    changed["model"]["merges"].pop()
    (out / "tokenizer" / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="began with another tokenizer"):
        run.main(config(out, more, steps=7, accept_changes=["steps", "data"]))


def test_adapters_keep_their_base_model(
    finished: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    shutil.copytree(finished, base)
    lora: dict[str, Any] = {
        "model": {"checkpoint": str(base), "lora": {"r": 2}},
        "tokenizer": {},
        "balancing": {"controller": "frozen"},
        "ema_decay": None,
        "evaluation": {},
        "optimizer": {"lr": 1e-3},
    }
    monkeypatch.chdir(tmp_path)
    lora["model"]["checkpoint"] = "base"
    assert run.main(config(tmp_path / "lora", texts, steps=1, **lora)) == 0
    adapter = json.loads((tmp_path / "lora" / "model" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(base / "model")  # also from elsewhere
    shutil.copy(base / "model-ema" / "model.safetensors", base / "model" / "model.safetensors")
    with pytest.raises(ValueError, match="began with another base model"):
        run.main(config(tmp_path / "lora", texts, steps=2, accept_changes=["steps"], **lora))
    shutil.rmtree(base / "model")
    with pytest.raises(ValueError, match="adapters need their base model to stay"):
        run.main(config(tmp_path / "other", texts, steps=1, **lora))
    monkeypatch.chdir(base / "checkpoints")
    lora["model"]["checkpoint"] = "step-6"
    with pytest.raises(ValueError, match="adapters need their base model to stay"):
        base_digest(config(tmp_path / "other", texts, steps=1, **lora))


def test_a_missing_start_is_said_before_anything_is_made(finished: Path, texts: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "model", tmp_path / "start")
    begun: dict[str, Any] = {"model": {"checkpoint": str(tmp_path / "start")}, "tokenizer": {}, "steps": 1}
    assert run.main(config(tmp_path / "out", texts, **begun)) == 0
    shutil.rmtree(tmp_path / "start")
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*start'"):
        run.main(config(tmp_path / "other", texts, **begun))
    assert not (tmp_path / "other").exists()
    # a run that has begun needs it no more
    assert run.main(config(tmp_path / "out", texts, **begun | {"steps": 2, "accept_changes": ["steps"]})) == 0


def test_a_folder_of_something_else_is_left_alone(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not the folder of an earlier run"):
        run.main(config(tmp_path, texts))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_sharding_is_refused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = run.make_accelerator()
    monkeypatch.setattr(type(accelerator), "distributed_type", property(lambda _: DistributedType.FSDP))
    with pytest.raises(
        ValueError, match="accelerate is set up for FSDP: zaya train has all of the model in each process"
    ):
        run.main(config(tmp_path / "out", texts))
    assert not (tmp_path / "out").exists()
