"""The loss on held-out documents: against plain forward passes of single documents, and without a trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from token_folders import written
from zaya_hf import ZayaForCausalLM
from zaya_hf.testing import redraw, tiny_config
from zaya_hf.training import rng
from zaya_hf.training.config import TrainingConfig
from zaya_hf.training.data.documents import MappedArray, TokenDocuments
from zaya_hf.training.data.rows import HeldOutRows
from zaya_hf.training.ema import ExponentialMovingAverage
from zaya_hf.training.held_out import Evaluator, some_documents

LENGTH, BOS, EOS, WORDS = 16, 2, 1, 128

Documents = Callable[..., TokenDocuments]


@pytest.fixture
def documents(tmp_path: Path) -> Documents:
    """Makes documents of ids: their bytes are 3 times their tokens."""

    def make(ids: list[list[int]], name: str = "docs", known: bool = True, **changes: Any) -> TokenDocuments:
        sizes = [3 * len(document) for document in ids] if known else None
        return written(tmp_path, ids, sizes, name, **changes)

    return make


def drawn(lengths: list[int], seed: int = 0, start: int | None = BOS) -> list[list[int]]:
    random_ids = np.random.default_rng(seed)
    found = [random_ids.integers(3, WORDS, size).tolist() for size in lengths]
    return [[start, *ids[1:]] for ids in found] if start is not None else found


@pytest.fixture(scope="module")
def model() -> ZayaForCausalLM:
    return redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2)))  # type: ignore[return-value]


def evaluator(*sources: TokenDocuments, packing: Any = "best_fit", **options: Any) -> Evaluator:
    rows = [HeldOutRows(source, LENGTH, packing) for source in sources]
    return Evaluator(Accelerator(cpu=True), rows, vocab_size=WORDS, **{"start_ids": {BOS}, **options})


def nats(model: ZayaForCausalLM, ids: list[int]) -> float:
    """Of all tokens but the first, in windows of `LENGTH` tokens that each also predict the next one's first token."""
    total = 0.0
    for start in range(0, len(ids) - 1, LENGTH):
        window = torch.tensor([ids[start : start + LENGTH + 1]])
        with torch.no_grad():
            logits = model(input_ids=window[:, :-1]).logits.double()
        total -= float(torch.log_softmax(logits, -1)[0].gather(-1, window[0, 1:, None]).sum())
    return total


class TestNumbers:
    @pytest.mark.parametrize("micro_rows", [1, 3])
    def test_they_are_those_of_single_documents(
        self, model: ZayaForCausalLM, documents: Documents, micro_rows: int
    ) -> None:
        ids = drawn([5, 9, 16, 2, 40, 7, 1])
        found = evaluator(documents(ids), micro_rows=micro_rows).run(model, 7)
        total, targets = sum(nats(model, document) for document in ids), sum(len(document) - 1 for document in ids)
        assert (found["kind"], found["step"], found["targets"]) == ("held_out", 7, targets)
        assert found["loss"] == pytest.approx(total / targets, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
        assert found["bytes"] == 3 * sum(map(len, ids))
        assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / found["bytes"], rel=1e-5)

    def test_a_first_token_that_is_text_costs_a_uniform_guess(
        self, model: ZayaForCausalLM, documents: Documents
    ) -> None:
        ids = drawn([5, 9], start=None)
        found = evaluator(documents(ids)).run(model, 0)
        total = sum(nats(model, document) for document in ids) + 2 * math.log(WORDS)
        assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / (3 * 14), rel=1e-5)
        assert found["targets"] == 12

    def test_sources_are_told_apart_and_weigh_by_their_targets(
        self, model: ZayaForCausalLM, documents: Documents
    ) -> None:
        first, second = documents(drawn([9, 12]), "one"), documents(drawn([5] * 9, seed=1), "two")
        both = evaluator(first, second).run(model, 0)
        single = [evaluator(source).run(model, 0) for source in (first, second)]
        for name, alone in zip(("one", "two"), single, strict=True):
            assert both["sources"][name] == alone["sources"][name]
        targets = [alone["targets"] for alone in single]
        mean = sum(alone["loss"] * n for alone, n in zip(single, targets, strict=True)) / sum(targets)
        assert both["loss"] == pytest.approx(mean)
        assert both["loss"] != pytest.approx((single[0]["loss"] + single[1]["loss"]) / 2, rel=1e-3)

    @pytest.mark.parametrize("why", ["no bytes", "not all are targets"])
    def test_bits_per_byte_are_none_where_they_cannot_be_told(
        self, model: ZayaForCausalLM, documents: Documents, tmp_path: Path, why: str
    ) -> None:
        ids = drawn([6, 6])
        mask = np.array([0, 0, 1, 1, 0, 1] * 2, np.uint8)
        mask.tofile(tmp_path / "targets.bin")
        changes = {"target_shards": [MappedArray(tmp_path / "targets.bin", "u1", 12)]} if "targets" in why else {}
        unknown = documents(ids, "unknown", known=why != "no bytes", **changes)
        found = evaluator(documents(ids, "known"), unknown).run(model, 0)
        assert found["bits_per_byte"] is None
        assert found["sources"]["unknown"]["bits_per_byte"] is None
        assert found["sources"]["known"]["bits_per_byte"] > 0
        assert found["sources"]["unknown"]["targets"] == (6 if changes else 10)

    def test_a_loss_beyond_all_bounds(self, documents: Documents) -> None:
        model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2)))
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1e4)
        found = evaluator(documents(drawn([9]))).run(model, 0)
        assert found["loss"] > 700
        assert found["perplexity"] == math.inf

    def test_sources_of_one_name_all_stay(self, model: ZayaForCausalLM, documents: Documents) -> None:
        sizes = {"a": [5], "b": [9], "c": [7], "d": [3]}
        names = ["x", "x", "x (2)", "x"]
        sources = [
            replace(documents(drawn(lengths), file), name=name)
            for (file, lengths), name in zip(sizes.items(), names, strict=True)
        ]
        found = evaluator(*sources).run(model, 0)["sources"]
        assert {name: numbers["targets"] for name, numbers in found.items()} == {
            "x": 4, "x (3)": 8, "x (2)": 6, "x (4)": 2,
        }  # fmt: skip

    def test_no_source_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="at least one held-out source"):
            evaluator()


class TestProcesses:
    @pytest.mark.parametrize("world", [2, 3])
    def test_any_number_of_them_has_the_same_result(
        self, model: ZayaForCausalLM, documents: Documents, world: int
    ) -> None:
        """The shares of all processes, summed as gloo would; and each process goes through as many batches."""
        source = documents(drawn([5, 9, 16, 2, 40, 7, 1]))
        alone = evaluator(source, micro_rows=2).run(model, 0)
        shares, batches = [], []
        rows = HeldOutRows(source, LENGTH, "best_fit")
        for rank in range(world):
            one = evaluator(source, micro_rows=2)
            one._accelerator = process = _Process(rank, world)  # type: ignore[assignment]
            one.run(model, 0)
            shares.append(process.reduced)
            batches.append(len(list(rows.batches(rank, world, 2))))
        nats_and_targets = sum(shares)[0].tolist()
        assert len(set(batches)) == 1
        assert nats_and_targets[1] == alone["targets"]
        assert nats_and_targets[0] / nats_and_targets[1] == pytest.approx(alone["loss"], rel=1e-6)


class _Process:
    """What an evaluator asks of an accelerator, in one process that says it is one of several."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world: int) -> None:
        self.process_index, self.num_processes = rank, world

    def reduce(self, values: torch.Tensor, _: str) -> torch.Tensor:
        self.reduced = values
        return values

    def autocast(self) -> Any:
        return torch.autocast("cpu", enabled=False)


class TestNoTrace:
    def test_modes_random_numbers_and_gradients(self, documents: Documents) -> None:
        model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2)))
        model.train()
        model.model.layers[0].eval()
        modes = [module.training for module in model.modules()]
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        one = evaluator(documents(drawn([9, 5])))

        def numbers() -> list[float]:
            return [random.random(), np.random.random(), float(torch.rand(()))]

        rng.seed_all(0)
        expected = numbers()
        rng.seed_all(0)
        model.forward = _drawing(model.forward)  # type: ignore[method-assign]
        one.run(model, 0)
        assert numbers() == expected
        assert [module.training for module in model.modules()] == modes
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())

    def test_dropout_is_off(self, model: ZayaForCausalLM, documents: Documents) -> None:
        one = evaluator(documents(drawn([9, 5])))
        dropout = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2, attention_dropout=0.5)))
        assert one.run(dropout.train(), 0)["loss"] == one.run(model, 0)["loss"]

    def test_a_failure_leaves_none_either(self, documents: Documents) -> None:
        model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2))).train()

        def fail(**_: Any) -> None:
            raise RuntimeError("out of memory")

        model.forward = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            evaluator(documents(drawn([9]))).run(model, 0)
        assert all(module.training for module in model.modules())


def _drawing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass that takes random numbers."""

    def run(**batch: Any) -> Any:
        rng.seed_all(random.getrandbits(30))
        return forward(**batch)

    return run


def test_averaged_weights_are_evaluated_as_well(documents: Documents) -> None:
    model = redraw(ZayaForCausalLM(tiny_config(num_hidden_layers=2)))
    source = documents(drawn([9, 5]))
    before = evaluator(source).run(model, 0)["loss"]
    ema = ExponentialMovingAverage(model, 0.5)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.05)
    found = evaluator(source, ema=ema).run(model, 1)
    assert found["ema"]["loss"] == before
    assert found["loss"] == evaluator(source).run(model, 1)["loss"] != before


def test_bfloat16_is_autocast_as_in_training(model: ZayaForCausalLM, documents: Documents) -> None:
    source = documents(drawn([9, 12, 14]))
    wide = evaluator(source).run(model, 0)["loss"]
    one = evaluator(source)
    one._accelerator = _Autocast(0, 1)  # type: ignore[assignment]
    narrow = one.run(model, 0)["loss"]
    assert narrow != wide
    assert narrow == pytest.approx(wide, rel=0.05)  # bf16 has 8 bits


class _Autocast(_Process):
    def autocast(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)


class TestSomeDocuments:
    def test_those_that_fit(self, documents: Documents) -> None:
        source = documents(drawn([20, 5, 9, 40, 3, 8]))
        found = some_documents(source, 2, LENGTH)
        assert LENGTH <= int(found.lengths.sum()) <= 2 * LENGTH
        assert found.lengths.tolist() == some_documents(source, 2, LENGTH).lengths.tolist()

    def test_all_if_there_is_room(self, documents: Documents) -> None:
        source = documents(drawn([20, 5]))
        assert some_documents(source, 2, LENGTH) is source
        assert some_documents(source, None, LENGTH) is source

    def test_the_beginning_of_one_if_none_fits(self, model: ZayaForCausalLM, documents: Documents) -> None:
        ids = drawn([40, 30, 50])
        found = some_documents(documents([*ids, []]), 1, LENGTH)
        assert found.lengths.tolist() == [LENGTH]
        assert found.tokens(0).tolist() in [document[:LENGTH] for document in ids]
        result = evaluator(found).run(model, 0)
        assert (result["targets"], result["bits_per_byte"]) == (LENGTH - 1, None)

    def test_of_a_run_s_config(self, model: ZayaForCausalLM, documents: Documents) -> None:
        """Rows are shared between sources by their tokens; a source whose documents are longer is cut."""
        config = TrainingConfig(
            out="x",
            steps=1,
            model={"config": {}},
            data={"sources": [{"path": "x"}], "sequence_length": LENGTH},
            batch={"rows": 4, "micro_rows": 2},
            optimizer={"lr": 1e-3},
            evaluation={"rows": 6},
        )
        tokenizer: Any = SimpleNamespace(pad_token_id=0, bos_token_id=BOS, eos_token_id=EOS)
        short, long = documents(drawn([8] * 16), "short"), documents(drawn([64, 64], seed=1), "long")
        found = Evaluator.of_run(config, Accelerator(cpu=True), [short, long], tokenizer, vocab_size=WORDS)
        sources = found.run(model, 0)["sources"]
        assert sources["short"]["targets"] == 6 * 7  # of 3 rows
        assert sources["short"]["bytes"] == 3 * 48
        assert sources["long"]["targets"] == 3 * LENGTH - 1
        assert sources["long"]["bits_per_byte"] is None
