"""The model of a run: fresh, from checkpoints of every layout, with overrides of a phase, and with adapters."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ZayaConfig as StockConfig
from transformers import ZayaForCausalLM as StockZaya

from chat_folders import chat_tokenizer
from original_checkpoints import original_config, original_tensors, write_checkpoint
from saved_models import differing, edit_config, tiny_model
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import TINY, random_ids, redraw
from zaya_hf.training.config import OptimizerConfig, TrainingConfig
from zaya_hf.training.models import build, config_of
from zaya_hf.training.optim import optimizer_for

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

IDS = random_ids(2, 16)
SMALL = {**TINY, "num_hidden_layers": 2}
LORA = {"r": 4, "alpha": 8.0}


def settings(model: dict[str, Any], **changes: Any) -> TrainingConfig:
    values = {
        "out": "run",
        "steps": 10,
        "model": model,
        "data": {"sources": [{"path": "texts"}], "sequence_length": 16},
        "batch": {"rows": 2},
        "optimizer": {"lr": 0.01},
        "balancing": {"controller": "frozen" if model.get("lora") else "adamw"},
    }
    return TrainingConfig.model_validate(values | changes)


def losses_of_training(model: Any, steps: int = 6) -> list[float]:
    model.train()
    optimizer = optimizer_for(model, OptimizerConfig(lr=5e-3))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


def saved(folder: Path, **changes: Any) -> Path:
    tiny_model(**{"num_hidden_layers": 2, **changes}).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------------------------------------- fresh models
class TestFresh:
    def test_the_seed_decides_the_weights_and_nothing_else_is_drawn(self) -> None:
        torch.manual_seed(5)
        expected_next = torch.rand(3)
        torch.manual_seed(5)
        one = build(settings({"config": SMALL}, seed=3))
        assert torch.equal(torch.rand(3), expected_next)
        torch.rand(100)
        same, other = (build(settings({"config": SMALL}, seed=seed)) for seed in (3, 4))
        assert differing(one, same) == []
        assert "model.embed_tokens.weight" in differing(one, other)
        assert isinstance(one, ZayaForCausalLM)
        assert not one.training

    def test_dtype(self) -> None:
        model = build(settings({"config": SMALL, "dtype": "bfloat16"}))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {b.dtype for n, b in model.named_buffers() if "balancing" in n} == {torch.float32}

    def test_sizes_and_ids_come_from_the_tokenizer_where_the_config_leaves_them_out(self) -> None:
        tokenizer = chat_tokenizer()
        given = {"vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"}
        config = {name: value for name, value in SMALL.items() if name not in given}
        model = build(settings({"config": config}), tokenizer=tokenizer)
        assert model.config.vocab_size == len(tokenizer)
        for name in given - {"vocab_size"}:
            assert getattr(model.config, name) == getattr(tokenizer, name)
        own = build(settings({"config": {**config, "vocab_size": 500, "eos_token_id": 7}}), tokenizer=tokenizer)
        assert (own.config.vocab_size, own.config.eos_token_id) == (500, 7)
        assert build(settings({"config": config}), vocab_size=99).config.vocab_size == 99

    def test_a_vocabulary_of_unknown_size(self) -> None:
        config = {name: value for name, value in SMALL.items() if name != "vocab_size"}
        with pytest.raises(ValueError, match="no vocab_size, and there is no tokenizer to take it from"):
            build(settings({"config": config}))

    @pytest.mark.parametrize("dialect", ["ours", "A", "C"])
    def test_a_config_file_of_any_layout(self, dialect: str, tmp_path: Path) -> None:
        model = tiny_model(num_hidden_layers=2)
        values = model.config.to_dict() if dialect == "ours" else original_config(model.config, dialect)
        (tmp_path / "config.json").write_text(json.dumps(values | {"torch_dtype": "bfloat16"}))
        for path in (tmp_path, tmp_path / "config.json"):
            built = build(settings({"config": str(path)}))
            assert {n: p.shape for n, p in built.named_parameters()} == {
                n: p.shape for n, p in model.named_parameters()
            }
            assert built.dtype == torch.float32

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({**SMALL, "num_expert": 4}, "model.config.num_expert: .* did you mean num_experts?"),
            ({**SMALL, "zzz": 4}, "model.config.zzz: a ZAYA config has no such field$"),
            ({**SMALL, "head_dim": 3}, "model.config: ZayaConfig: head_dim=3"),
            ({**SMALL, "dtype": "bfloat16"}, r"model.config.dtype: give model\.dtype"),
            ("nowhere", "model.config: there is no file nowhere"),
        ],
    )
    def test_a_wrong_config(self, config: Any, message: str) -> None:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            build(settings({"config": config}))

    def test_a_tokenizer_with_more_ids_than_the_model(self) -> None:
        with pytest.raises(ValueError, match=r"the tokenizer has ids up to 323, but the model of .* knows 128"):
            build(settings({"config": SMALL}), tokenizer=chat_tokenizer())


# ---------------------------------------------------------------------------------------------------- checkpoints
class TestCheckpoints:
    def test_a_folder_that_stock_transformers_saved(self, tmp_path: Path) -> None:
        stock = redraw(StockZaya(StockConfig(**SMALL)))
        stock.save_pretrained(tmp_path)
        model = build(settings({"checkpoint": str(tmp_path)}))
        assert isinstance(model, ZayaForCausalLM)
        losses = losses_of_training(model)
        assert losses[-1] < losses[0] - 0.3

    @pytest.mark.parametrize("dialect", ["A", "B", "C"])
    def test_a_folder_of_the_original_layout(self, dialect: str, tmp_path: Path) -> None:
        saved_model = tiny_model(num_hidden_layers=2)
        write_checkpoint(tmp_path, original_tensors(saved_model, dialect), original_config(saved_model.config, dialect))
        model = build(settings({"checkpoint": str(tmp_path)}))
        assert differing(model, saved_model) == []
        losses = losses_of_training(model)
        assert losses[-1] < losses[0] - 0.3

    def test_dtype(self, tmp_path: Path) -> None:
        model = build(settings({"checkpoint": str(saved(tmp_path)), "dtype": "bfloat16"}))
        assert model.dtype == torch.bfloat16

    @pytest.mark.parametrize("where", ["model", "checkpoints/step-7/model"])
    def test_a_run_folder(self, where: str, tmp_path: Path) -> None:
        from zaya_hf.training.checkpoint import CheckpointStore

        if where == "model":
            saved(tmp_path / "model")
        else:
            CheckpointStore(tmp_path / "checkpoints").save(7, lambda folder: saved(folder / "model") and None, {})
        model = build(settings({"checkpoint": str(tmp_path)}))
        assert differing(model, tiny_model(num_hidden_layers=2)) == []

    def test_going_on_takes_the_weights_of_the_start(self, tmp_path: Path) -> None:
        first, later = saved(tmp_path / "first"), tmp_path / "later"
        trained = tiny_model(seed=9, num_hidden_layers=2)
        trained.save_pretrained(later)
        model = build(settings({"checkpoint": str(first)}), start=later)
        assert differing(model, trained) == []
        fresh = build(settings({"config": SMALL}), start=later)
        assert differing(fresh, trained) == []

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            build(settings({"checkpoint": str(tmp_path / "nowhere")}))

    def test_a_tokenizer_of_another_model(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="it is the tokenizer of another model"):
            build(settings({"checkpoint": str(saved(tmp_path))}), tokenizer=chat_tokenizer())

    @pytest.mark.parametrize("lora", [None, LORA])
    def test_activation_checkpointing(self, lora: Any, tmp_path: Path) -> None:
        options = {"checkpoint": str(saved(tmp_path)), "lora": lora}
        models = [build(settings(options, activation_checkpointing=on)) for on in (False, True)]
        gradients = []
        for model in models:
            model.train()
            model(input_ids=IDS, labels=IDS).loss.backward()
            gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert [any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) for model in models] == [
            False,
            True,
        ]
        assert gradients[0].keys() == gradients[1].keys() != set()
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- overrides
class TestOverrides:
    def test_a_rope_base_reaches_the_tables(self, tmp_path: Path) -> None:
        folder = saved(tmp_path, layer_types=["hybrid", "hybrid_sliding"], sliding_window=8)
        changes = {"rope_theta": 1e6, "max_position_embeddings": 4096}
        options = settings({"checkpoint": str(folder), "overrides": changes})
        model = build(options)
        rope = model.config.rope_parameters
        assert rope["hybrid"] == {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        assert rope["hybrid_sliding"]["rope_theta"] == 1e4
        assert model.config.max_position_embeddings == 4096
        frequencies = model.model.rotary.frequencies("hybrid", torch.device("cpu"))
        torch.testing.assert_close(frequencies, 1 / 1e6 ** (torch.arange(0, 8, 2) / 8))
        before = build(settings({"checkpoint": str(folder)}))
        assert differing(model, before) == []
        assert (logits(model) - logits(before)).abs().max() > 1e-3
        assert config_of(options.model).to_dict()["rope_parameters"] == rope

        model.save_pretrained(tmp_path / "saved")  # the next phase, or the same one going on
        again = build(options, start=tmp_path / "saved")
        assert torch.equal(logits(again), logits(model))

    def test_rope_parameters_are_merged(self, tmp_path: Path) -> None:
        changes = {"rope_parameters": {"hybrid": {"partial_rotary_factor": 0.25}}}
        model = build(settings({"checkpoint": str(saved(tmp_path)), "overrides": changes}))
        assert model.config.rope_parameters["hybrid"] == {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.25,
        }
        assert len(model.model.rotary.frequencies("hybrid", torch.device("cpu"))) == 2

    def test_of_a_folder_of_the_original_layout(self, tmp_path: Path) -> None:
        model = tiny_model(num_hidden_layers=2)
        write_checkpoint(tmp_path, original_tensors(model), original_config(model.config))
        built = build(settings({"checkpoint": str(tmp_path), "overrides": {"rope_theta": 1e5}}))
        assert built.config.rope_parameters["hybrid"]["rope_theta"] == 1e5
        assert differing(built, model) == []

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"max_position_embedings": 9}, "model.overrides.max_position_embedings: .* mean max_position_embeddings?"),
            ({"dtype": "bfloat16"}, r"model.overrides.dtype: give model\.dtype"),
            ({"attention_dropout": 2.0}, "model.overrides: ZayaConfig: attention_dropout=2.0"),
            ({"rope_theta": -1.0}, "model.overrides: ZayaConfig: .*rope_theta"),
            ({"rope_parameters": {"rope_theta": 1.0}}, "model.overrides.rope_parameters: give one dict per layer type"),
            (
                {"hidden_size": 96},
                r"\(hidden_size\) changes shapes, .*weight is \[128, 64\], and would be \[128, 96\]",
            ),
            ({"num_hidden_layers": 3, "layer_types": None}, r"changes shapes, .*layers\.2\..* is not there"),
            ({"tie_word_embeddings": False}, r"tie_word_embeddings=false, but there is no lm_head\.weight"),
            ({"rope_parameters": 3}, "model.overrides.rope_parameters: give one dict per layer type"),
        ],
    )
    def test_wrong_ones(self, overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            build(settings({"checkpoint": str(saved(tmp_path)), "overrides": overrides}))
        assert "\n" not in str(caught.value)

    def test_an_end_of_turn_also_ends_generation(self, tmp_path: Path) -> None:
        model = build(settings({"checkpoint": str(saved(tmp_path)), "overrides": {"eos_token_id": [1, 7]}}))
        assert model.config.eos_token_id == [1, 7]
        assert model.generation_config.eos_token_id == [1, 7]
        assert model.generation_config.bos_token_id == 2

    def test_rows_longer_than_the_context(self, tmp_path: Path) -> None:
        data = {"sources": [{"path": "texts"}], "sequence_length": 600}
        options = {"checkpoint": str(saved(tmp_path))}
        with pytest.raises(ValueError, match=r"is 600, .* a context of 512: set model\.overrides\.max_position_embed"):
            build(settings(options, data=data))
        build(settings({**options, "overrides": {"max_position_embeddings": 600}}, data=data))
        with pytest.raises(ValueError, match=r"set model\.config\.max_position_embeddings"):
            build(settings({"config": SMALL}, data=data))

    def test_a_rope_base_without_full_attention(self, tmp_path: Path) -> None:
        folder = saved(tmp_path, layer_types=["hybrid_sliding"] * 2, sliding_window=8)
        with pytest.raises(ValueError, match=r"no layer of .* has full attention; give rope_parameters"):
            build(settings({"checkpoint": str(folder), "overrides": {"rope_theta": 1e6}}))

    def test_a_wrong_config_file_is_named(self, tmp_path: Path) -> None:
        edit_config(saved(tmp_path), head_dim=3)
        with pytest.raises(ValueError, match=r"config\.json: ZayaConfig: head_dim=3"):
            build(settings({"checkpoint": str(tmp_path)}))


# ---------------------------------------------------------------------------------------------------- LoRA
class TestLora:
    @pytest.fixture(autouse=True)
    def _peft(self) -> None:
        pytest.importorskip("peft")

    def test_it_learns_and_leaves_the_base_as_it_is(self, tmp_path: Path) -> None:
        base = tiny_model(num_hidden_layers=2)
        options = settings({"checkpoint": str(saved(tmp_path)), "lora": {**LORA, "layers": [1]}}, seed=1)
        model = build(options)
        assert torch.equal(logits(model), logits(base))  # adapters begin at nothing
        losses = losses_of_training(model, steps=12)
        assert losses[-1] < losses[0] - 0.1
        with model.disable_adapter():
            assert torch.equal(logits(model), logits(base))
        inner = {n.replace(".base_layer", ""): t for n, t in model.get_base_model().state_dict().items()}
        assert [n for n, t in base.state_dict().items() if not torch.equal(t, inner[n])] == []
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert trained
        assert all(".layers.1." in name and "lora_" in name for name in trained)

    def test_the_seed_decides_the_adapters(self, tmp_path: Path) -> None:
        saved(tmp_path)
        one, same, other = (
            build(settings({"checkpoint": str(tmp_path), "lora": LORA}, seed=seed)) for seed in (1, 1, 2)
        )
        assert differing(one, same) == []
        assert differing(one, other) != []

    def test_it_goes_on_from_the_adapter_alone(self, tmp_path: Path) -> None:
        options = settings({"checkpoint": str(saved(tmp_path / "base")), "lora": LORA})
        straight = build(options)
        losses_of_training(straight, steps=3)
        straight.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        again = build(options, start=tmp_path / "adapter")
        assert differing(again, straight) == []
        assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in straight.parameters()]
        assert losses_of_training(again, steps=3) == losses_of_training(straight, steps=3)

    def test_an_adapter_as_a_checkpoint_is_merged(self, tmp_path: Path) -> None:
        base = settings({"checkpoint": str(saved(tmp_path / "base")), "lora": LORA})
        adapted = build(base)
        losses_of_training(adapted, steps=3)
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        options = {"checkpoint": str(tmp_path / "adapter"), "overrides": {"max_position_embeddings": 1024}}
        merged = build(settings(options))
        assert type(merged) is ZayaForCausalLM
        assert merged.config.max_position_embeddings == 1024
        assert all(p.requires_grad for p in merged.parameters())
        torch.testing.assert_close(logits(merged), logits(adapted), atol=1e-5, rtol=0)
        assert config_of(settings(options).model).max_position_embeddings == 1024
        with pytest.raises(ValueError, match="is an adapter itself: merge it into its base model first"):
            build(settings({"checkpoint": str(tmp_path / "adapter"), "lora": LORA}))

    def test_biases_that_move_are_no_part_of_an_adapter(self) -> None:
        with pytest.raises(ValueError, match=r"set balancing\.controller to frozen"):
            settings({"checkpoint": "nowhere", "lora": LORA}, balancing={"controller": "sign"})

    def test_a_fresh_model_has_nothing_to_adapt(self) -> None:
        with pytest.raises(ValueError, match="lora adapts a checkpoint"):
            settings({"config": SMALL, "lora": LORA})

    def test_layers_that_are_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="there is no layer 5"):
            build(settings({"checkpoint": str(saved(tmp_path)), "lora": {**LORA, "layers": [5]}}))

    def test_without_peft(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        options = settings({"checkpoint": str(saved(tmp_path)), "lora": LORA})
        real = builtins.__import__

        def without(name: str, *rest: Any) -> Any:
            if name == "peft":
                raise ModuleNotFoundError("No module named 'peft'")
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ModuleNotFoundError, match="need PEFT: pip install peft"):
            build(options)
