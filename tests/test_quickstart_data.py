"""Batches by number, windows, and the two measures that are computed without lm-eval."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from zaya_hf import ZayaForCausalLM
from zaya_hf.quickstart import bpe, data
from zaya_hf.quickstart.recipe import Recipe
from zaya_hf.testing import redraw, tiny_config

TEXT = Path(__file__).read_text(encoding="utf-8")
RECIPE = Recipe(sequence_length=32)


@pytest.fixture(scope="module")
def prepared() -> data.Data:
    tokenizer = bpe.train_tokenizer([TEXT], 320)
    stream = bpe.encode_documents(tokenizer, [TEXT, TEXT[::2]])
    return data.Data(tokenizer, stream, stream)


def is_sums(row: torch.Tensor, prepared: data.Data) -> bool:
    text = prepared.tokenizer.decode(row[1:])
    return row[0] == prepared.tokenizer.eos_token_id and set(text) <= set("0123456789+-=\n")


class TestBatches:
    def test_a_batch_is_decided_by_seed_and_step_alone(self, prepared: data.Data) -> None:
        first, again = data.Batches(prepared, RECIPE, 3), data.Batches(prepared, RECIPE, 3)
        late = first(17)["input_ids"]
        assert torch.equal(again(17)["input_ids"], late)
        assert not torch.equal(first(18)["input_ids"], late)
        assert not torch.equal(data.Batches(prepared, RECIPE, 4)(17)["input_ids"], late)

    def test_it_does_not_touch_the_global_generator(self, prepared: data.Data) -> None:
        before = torch.get_rng_state()
        data.Batches(prepared, RECIPE, 0)(0)
        assert torch.equal(torch.get_rng_state(), before)

    @pytest.mark.parametrize("share", [0.0, 0.4, 0.3, 1.0])
    def test_the_share_of_sums_is_kept_over_any_stretch(self, prepared: data.Data, share: float) -> None:
        recipe = Recipe(sequence_length=32, arithmetic_share=share)
        batches = data.Batches(prepared, recipe, 0)
        sums = [sum(is_sums(row, prepared) for row in batches(step)["input_ids"]) for step in range(20)]
        for start in (0, 7):
            expected = share * recipe.batch_size * (20 - start)
            assert abs(sum(sums[start:]) - expected) <= 1
        assert max(sums) - min(sums) <= 1

    def test_text_rows_are_windows_of_the_stream(self, prepared: data.Data) -> None:
        recipe = Recipe(sequence_length=32, arithmetic_share=0.0)
        batch = data.Batches(prepared, recipe, 0)(0)
        assert batch["input_ids"].shape == (8, 32)
        assert torch.equal(batch["labels"], batch["input_ids"])
        every = prepared.stream.unfold(0, 32, 1)
        for row in batch["input_ids"]:
            assert (every == row).all(dim=1).any()

    def test_every_window_can_be_drawn(self, prepared: data.Data) -> None:
        short = data.Data(prepared.tokenizer, torch.arange(34), prepared.validation)
        batches = data.Batches(short, Recipe(sequence_length=32, arithmetic_share=0.0), 0)
        assert {int(row[0]) for step in range(20) for row in batches(step)["input_ids"]} == {0, 1, 2}


def test_the_validation_loss_is_that_of_batches_of_validation_text_and_sums(
    prepared: data.Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_VALIDATION_BATCHES", 3)
    model = redraw(ZayaForCausalLM(tiny_config(vocab_size=320)), seed=2).train()
    unseen = data.Data(prepared.tokenizer, prepared.stream, prepared.stream.flip(0))
    losses = []
    for step in range(3):
        ids = data.Batches(data.Data(prepared.tokenizer, unseen.validation, unseen.validation), RECIPE, 0)(step)
        with torch.no_grad():
            logits = model.eval()(input_ids=ids["input_ids"]).logits[:, :-1].double()
        losses.append(F.cross_entropy(logits.flatten(0, 1), ids["input_ids"][:, 1:].flatten()).item())
    assert data.validation_loss(model.train(), unseen, RECIPE) == pytest.approx(sum(losses) / 3, rel=1e-5)


def test_the_unigram_measure_is_that_of_token_frequencies(prepared: data.Data, tmp_path: Path) -> None:
    pieces = tmp_path / "bits.jsonl"
    pieces.write_text('{"text": "def é"}\n{"text": "import"}\n', encoding="utf-8")
    counts = torch.bincount(prepared.stream, minlength=320).double() + 1
    ids = [i for text in ("def é", "import") for i in prepared.tokenizer(text)["input_ids"]]
    bits = -sum(math.log2(counts[i] / counts.sum()) for i in ids)
    measured = data._unigram_bits_per_byte(prepared.tokenizer, prepared.stream, pieces)
    assert measured == pytest.approx(bits / (len("def é".encode()) + len("import")))
