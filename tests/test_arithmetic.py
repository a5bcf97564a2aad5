"""Sums to train on and held-out ones: the split, the wrong answers, and the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from zaya_hf.quickstart import arithmetic, bpe
from zaya_hf.quickstart.arithmetic import HELD_OUT, TRAINING, Sum, far_answers, near_answers
from zaya_hf.resources import resource


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    code = Path(__file__).read_text(encoding="utf-8")
    return bpe.train_tokenizer([code, "x =-1\ny =-2\nz=-3\n\n\n" * 99], vocab_size=420)


class TestSplit:
    def test_every_sum_is_on_one_side(self) -> None:
        assert (len(TRAINING), len(HELD_OUT)) == (1800, 200)
        texts = {str(item) for item in TRAINING + HELD_OUT}
        assert texts == {f"{a}+{b}={a + b}" for a in range(100) for b in range(10)} | {
            f"{a}-{b}={a - b}" for a in range(100) for b in range(10)
        }

    def test_no_held_out_sum_is_trained_on_in_the_other_order(self) -> None:
        trained = {item.question for item in TRAINING}
        turned = {f"{item.second}+{item.first}" for item in HELD_OUT if item.sign == "+" and item.first < 10}
        assert len(turned) > 3
        assert not trained & turned

    def test_it_is_the_same_everywhere(self) -> None:
        """Held-out sums of another version or machine must stay held out, or its scores do not compare."""
        assert [item.question for item in HELD_OUT[:5]] == ["7-5", "32+0", "50-5", "37+9", "31+1"]

    def test_held_out_sums_are_like_all(self) -> None:
        plus = sum(item.sign == "+" for item in HELD_OUT)
        assert 70 < plus < 130
        assert 30 < sum(item.first for item in HELD_OUT) / 200 < 70
        assert any(item.value < 0 for item in HELD_OUT)


@pytest.mark.parametrize("answers", [far_answers, near_answers])
def test_wrong_answers_are_wrong_different_as_long_and_possible(answers: Callable[[Sum], list[str]]) -> None:
    possible = {item.value for item in TRAINING + HELD_OUT}
    for item in TRAINING + HELD_OUT:
        found = answers(item)
        assert len(set(found)) == 3
        assert str(item.value) not in found
        assert {len(answer) for answer in found} == {len(str(item.value))}
        assert {int(answer) for answer in found} <= possible


def test_far_answers_are_far_where_they_can_be() -> None:
    for item in HELD_OUT:
        if len(str(item.value)) == 2:
            assert all(abs(int(answer) - item.value) > 10 for answer in far_answers(item)), item


def test_near_answers_are_near() -> None:
    for item in HELD_OUT:
        distances = [abs(int(answer) - item.value) for answer in near_answers(item)]
        if 20 <= item.value < 89:
            assert set(distances) <= {1, 10}, item
        assert max(distances) <= 10 or item.value < 0, item
    assert sorted(near_answers(Sum(99, "+", 0))) == ["89", "97", "98"]
    assert sorted(near_answers(Sum(9, "-", 9))) == ["1", "2", "3"]


def test_the_right_answer_is_not_always_the_middle_one() -> None:
    ranks = [sorted([item.value, *map(int, near_answers(item))]).index(item.value) for item in HELD_OUT]
    assert max(ranks.count(rank) for rank in range(4)) < 120


class TestRows:
    def test_they_are_an_eos_and_training_sums(self, tokenizer: PreTrainedTokenizerFast) -> None:
        rows = arithmetic.rows(tokenizer, 5, 129, torch.Generator().manual_seed(0))
        assert rows.shape == (5, 129)
        assert rows.dtype == torch.int64
        assert (rows[:, 0] == tokenizer.eos_token_id).all()
        trained = {str(item) for item in TRAINING}
        for row in rows:
            *lines, cut = tokenizer.decode(row[1:]).split("\n")
            assert len(lines) > 10
            assert set(lines) <= trained
            assert any(line.startswith(cut) for line in trained)

    def test_they_are_what_the_tokenizer_makes_of_the_text(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert "=-" in tokenizer.get_vocab()
        assert "ĊĊ" in tokenizer.get_vocab()
        rows = arithmetic.rows(tokenizer, 20, 129, torch.Generator().manual_seed(1))
        texts = [tokenizer.decode(row[1:]) for row in rows]
        assert any("=-" in text for text in texts)
        for text, row in zip(texts, rows, strict=True):
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == row[1:].tolist()

    def test_the_generator_decides_them(self, tokenizer: PreTrainedTokenizerFast) -> None:
        def draw(seed: int) -> torch.Tensor:
            return arithmetic.rows(tokenizer, 2, 64, torch.Generator().manual_seed(seed))

        assert torch.equal(draw(3), draw(3))
        assert not torch.equal(draw(3), draw(4))
        generator = torch.Generator().manual_seed(3)
        first = arithmetic.rows(tokenizer, 2, 64, generator)
        assert not torch.equal(first, arithmetic.rows(tokenizer, 2, 64, generator))

    def test_another_tokenizer_has_other_ids(self, tokenizer: PreTrainedTokenizerFast) -> None:
        other = bpe.train_tokenizer(["no sums here"], vocab_size=262)
        arithmetic.rows(tokenizer, 1, 64, torch.Generator().manual_seed(0))
        (row,) = arithmetic.rows(other, 1, 64, torch.Generator().manual_seed(0))
        assert other.decode(row[1:]).split("\n")[0] in {str(item) for item in TRAINING}

    def test_no_rows_and_short_rows(self, tokenizer: PreTrainedTokenizerFast) -> None:
        assert arithmetic.rows(tokenizer, 0, 128, torch.Generator()).shape == (0, 128)
        assert arithmetic.rows(tokenizer, 3, 1, torch.Generator()).tolist() == [[1], [1], [1]]


@pytest.mark.parametrize(("name", "answers"), [("far", far_answers), ("near", near_answers)])
def test_the_task_says_how_far_one_comes_without_adding(name: str, answers: Callable[..., list[str]]) -> None:
    """Taking the answer nearest to the first number is a baseline that the accuracy has to be read against."""
    right = 0.0
    for item in HELD_OUT:
        distances = {value: abs(int(value) - item.first) for value in (str(item.value), *answers(item))}
        nearest = [value for value, distance in distances.items() if distance == min(distances.values())]
        right += (str(item.value) in nearest) / len(nearest)
    text = resource("eval", "tasks", "quickstart", f"arithmetic_{name}.yaml").read_text(encoding="utf-8")
    assert f"is right in {100 * right / len(HELD_OUT):.0f} % of these" in " ".join(text.split())
