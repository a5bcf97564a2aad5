"""The scorer against lm-eval's own `hf` model and against plain forward passes, and what lm-eval gets wrong."""

from __future__ import annotations

import copy
import json
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rank_processes import run_ranks
from tiny_families import FAMILIES, SIZES, build
from zaya_hf.evaluation import forests, generating
from zaya_hf.evaluation.journal import Journal, work_through
from zaya_hf.evaluation.scorer import Scorer
from zaya_hf.quickstart import bpe

TEXT = Path(__file__).read_text(encoding="utf-8")
WORDS = TEXT.split()
LENGTH = 100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """317 words and three special tokens."""
    tokenizer = bpe.train_tokenizer([TEXT, "x=-1\ny=-2\n" * 99], vocab_size=317)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<think>", "</think>"]})
    assert len(tokenizer) == 320
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="lm_eval")


def ask(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def some(chance: random.Random, low: int, high: int) -> str:
    size = chance.randint(low, high)
    first = chance.randrange(len(WORDS) - size)
    return " ".join(WORDS[first : first + size])


def choices(seed: int) -> list[Instance]:
    """Questions, half with common examples, of three answers each; one without a context, one with spaces at its end,
    and one whose answers are single tokens."""
    chance = random.Random(seed)
    examples, asked = some(chance, 8, 8), []
    for number in range(7):
        context = (examples + " " if number % 2 else "") + some(chance, 1, 8) + ("  " if number == 3 else "")
        asked += [ask("loglikelihood", context, " " + some(chance, 1, 3)) for _ in range(3)]
    asked += [ask("loglikelihood", examples, letter) for letter in "ABC"]
    asked += [ask("loglikelihood", "", some(chance, 2, 3)), ask("loglikelihood", "", "A")]
    chance.shuffle(asked)
    return asked


def prompts(seed: int, settings: dict[str, Any], count: int = 9) -> list[Instance]:
    chance = random.Random(seed)
    examples = some(chance, 8, 8)
    texts = [(examples + " " if i % 2 else "") + some(chance, 1, 6) for i in range(count)]
    return [ask("generate_until", text, dict(settings)) for text in texts]


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_are_those_of_lm_eval(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """In float64, where nothing but the order of sums differs; case 32 of public reports: sizes change no score."""
    model = build(family)
    asked = choices(0)
    rolling = [ask("loglikelihood_rolling", " ".join(WORDS[:size])) for size in (1, 5, 60)]
    answers = prompts(1, {"until": ["\n\n", "e"], "max_gen_toks": 9})
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=LENGTH)
    expected = (
        theirs.loglikelihood(asked, disable_tqdm=True),
        theirs.loglikelihood_rolling(rolling, disable_tqdm=True),
        theirs.generate_until(answers, disable_tqdm=True),
    )
    assert len(set(expected[2])) > 3
    for budget, rows in ((1, 1), (60, 3), (4096, 64)):
        ours = Scorer(model, tokenizer=tokenizer, max_length=LENGTH, token_budget=budget, rows=rows)
        assert ours.why_not is None
        found = ours.loglikelihood(asked, disable_tqdm=True)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected[0]], rel=1e-9)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected[0]]
        assert ours.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(expected[1], rel=1e-9)
        assert ours.generate_until(answers, disable_tqdm=True) == expected[2]


@pytest.mark.parametrize("family", ["zaya", "olmoe"])
def test_greedy_flags_are_right_where_they_are_true(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = build(family)
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH)
    asked = []
    for size in range(1, 12):
        context = tokenizer(" ".join(WORDS[:size]))["input_ids"]
        ids = torch.tensor([context])
        new = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
        asked += [(None, context, new), (None, context, [*new[:2], (new[2] + 1) % 320])]
    flags = [greedy for _, greedy in scorer._loglikelihood_tokens(asked, disable_tqdm=True)]
    assert flags == [True, False] * 11


def test_fp32_is_within_what_is_promised(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("zaya").float()
    asked = choices(3)
    ours = Scorer(model, tokenizer=tokenizer, max_length=LENGTH).loglikelihood(asked, disable_tqdm=True)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, max_length=LENGTH).loglikelihood(asked, True)
    for (found, flag), (expected, wanted) in zip(ours, theirs, strict=True):
        assert abs(found - expected) <= max(1e-4, 2e-6 * abs(expected))
        assert flag == wanted


def test_shared_contexts_are_computed_once(tokenizer: PreTrainedTokenizerFast) -> None:
    scorer = Scorer(build("zaya"), tokenizer=tokenizer, max_length=LENGTH)
    context = " ".join(WORDS[:20])
    scorer.loglikelihood([ask("loglikelihood", context, f" {letter}") for letter in "ABCD"], disable_tqdm=True)
    size = len(tokenizer(context)["input_ids"])
    counts = scorer.counts
    assert counts["requests"] == 4
    assert counts["tokens_computed"] <= size + 8 < counts["tokens_given"]


def test_a_row_ends_at_its_own_stop_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """lm-eval's rows run on until all have stopped, and what follows a special token is kept: its batches of one are
    right, and those that follow are what batches must give."""
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[317] *= 3  # <|im_end|> is now likely
    answers = prompts(5, {"until": ["<|im_end|>", "\n\n\n"], "max_gen_toks": 12}, count=12)
    alone = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=LENGTH)
    expected = alone.generate_until(answers, disable_tqdm=True)
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH)
    found = scorer.generate_until(answers, disable_tqdm=True)
    facts = list(scorer.answer_facts.values())
    stopped = [fact.finish == "stop" for fact in facts]
    assert any(stopped)
    assert not all(stopped)
    assert {fact.tokens == 12 for fact, ended in zip(facts, stopped, strict=True) if not ended} == {True}
    assert found == expected
    batched = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=12, max_length=LENGTH)
    if batched.generate_until(answers, disable_tqdm=True) == expected:
        pytest.skip("lm-eval's batches are right by now")


@pytest.mark.parametrize("rows", [1, 5])
def test_stop_strings_are_cut_off(rows: int, tokenizer: PreTrainedTokenizerFast) -> None:
    scorer = Scorer(build("qwen3"), tokenizer=tokenizer, max_length=LENGTH, rows=rows)
    free = scorer.generate_until(prompts(2, {"until": [], "max_gen_toks": 20}), disable_tqdm=True)
    assert {fact.finish for fact in scorer.answer_facts.values()} <= {"length", "eos"}
    stops = sorted({text[4:6] for text in free if len(text) > 6})
    scorer.start(None)
    cut = scorer.generate_until(prompts(2, {"until": stops, "max_gen_toks": 20}), disable_tqdm=True)
    for whole, text in zip(free, cut, strict=True):
        places = [whole.index(stop) for stop in stops if stop in whole]
        assert text == (whole[: min(places)] if places else whole)
    shorter = [fact for fact in scorer.answer_facts.values() if fact.finish == "stop"]
    assert shorter
    assert all(fact.tokens < 20 for fact in shorter)


def test_truncation_is_counted_and_never_leaves_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    """Case 35: a prompt of 40 tokens where 8 fit keeps its end; a budget beyond the length is refused."""
    scorer = Scorer(build("llama"), tokenizer=tokenizer, max_length=16)
    long, short = " ".join(WORDS[:30]), "x"
    texts = scorer.generate_until(
        [ask("generate_until", text, {"until": [], "max_gen_toks": 8}) for text in (long, short)], disable_tqdm=True
    )
    kept = tokenizer.decode(tokenizer(long)["input_ids"][-8:])
    again = scorer.generate_until([ask("generate_until", kept, {"until": [], "max_gen_toks": 8})], disable_tqdm=True)
    assert again == texts[:1]
    assert [scorer.answer_facts[text, 0].prompt_truncated for text in (long, short)] == [True, False]
    assert scorer.counts["truncated_prompts"] == 1
    assert scorer.counts["truncated_answers"] == sum(f.finish == "length" for f in scorer.answer_facts.values()) > 0

    scorer.start(None)
    (found,) = scorer.loglikelihood([ask("loglikelihood", long, " x")], disable_tqdm=True)
    theirs = HFLM(pretrained=build("llama"), tokenizer=tokenizer, max_length=16)
    assert found[0] == pytest.approx(theirs.loglikelihood([ask("loglikelihood", long, " x")], True)[0][0], rel=1e-9)
    assert scorer.counts["truncated_prompts"] == 1
    for budget in (16, 32):
        with pytest.raises(ValueError, match=f"max_gen_toks {budget} leaves no room for a prompt in max_length 16"):
            scorer.generate_until([ask("generate_until", short, {"max_gen_toks": budget})], disable_tqdm=True)
    with pytest.raises(ValueError, match=r"a continuation has \d+ tokens, but max_length is 16"):
        scorer.loglikelihood([ask("loglikelihood", "x", " " + long)], disable_tqdm=True)
    with pytest.raises(ValueError, match="no token"):
        scorer.loglikelihood([ask("loglikelihood", "x", "")], disable_tqdm=True)


@pytest.mark.parametrize("context", ["", " ", "A", "A  "])
def test_bos_comes_once(context: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Case 33: what the model is given begins with one BOS, also where a template has written it; continuations have
    none."""
    writes_bos = copy.deepcopy(tokenizer)
    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    writes_bos.backend_tokenizer.post_processor = processor
    scorer = Scorer(build("zaya"), tokenizer=writes_bos, max_length=LENGTH)
    for given in (context, bos + context):
        ((before, targets),) = scorer._encode_pairs([(given, " word")])
        assert before.count(number) == 1
        assert before[0] == number
        assert number not in targets
        assert tokenizer.decode([*before[1:], *targets]) == context + " word"
    assert [ids.count(number) for ids in scorer._encode(["a", bos + "a"])] == [1, 1]


def test_encoding_is_lm_evals(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("llama")
    for add in (None, True, False):
        ours = Scorer(model, tokenizer=tokenizer, max_length=LENGTH, add_bos_token=add)
        theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, add_bos_token=add)
        texts = ["", "a", " a  b", "é\n", tokenizer.bos_token + "a", "a" * 300, "a"]
        assert ours._encode(texts) == [theirs.tok_encode(text) for text in texts]
        pairs = [(context, text) for context in ("a", "a b ", "x\n\n", " y") for text in (" c", "c", "\nd e")]
        assert ours._encode_pairs(pairs) == [theirs._encode_pair(*pair) for pair in pairs]


# ---------------------------------------------------------------------------------------------------------- thinking
def answer(tokenizer: PreTrainedTokenizerFast, prompt: str, text: str, until: list[str], finish: str) -> Any:
    generator: Any = object.__new__(generating.TextGenerator)
    generator._tokenizer, generator._until, generator._stops = tokenizer, until, frozenset([317])
    generator._thinking = generating.Thinking("<think>", "</think>")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return generator._answer(generating.Asked((1,), prompt, 0), ids, finish)


@pytest.mark.parametrize(
    ("prompt", "text", "finish", "expected", "endless"),
    [
        ("q", "<think>a\n\nb</think>\n\n7", "eos", "7", False),
        ("q<think>\n", "a\n\nb</think>7\n\nmore", "stop", "7", False),
        ("q<think>", "a 12", "length", "", True),
        ("q", "<think>a 12", "length", "", True),
        ("q", "a 12", "length", "a 12", False),
        ("q", "<think>a</think>b</think>7<|im_end|>", "stop", "7", False),
        ("q", "<think>a</think>", "length", "", False),
    ],
)
def test_the_answer_is_what_follows_the_thought(
    prompt: str, text: str, finish: str, expected: str, endless: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    found = answer(tokenizer, prompt, text, ["\n\n"], finish)
    assert (found.text.strip(), found.thought_without_end) == (expected, endless)


def test_stop_strings_do_not_end_a_thought(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("llama")
    settings = {"until": ["e", "a", "t", " "], "max_gen_toks": 12}
    texts = [request.args[0] for request in prompts(2, settings)]
    marks = {"start": "<think>", "end": "</think>"}
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH, thinking=marks)
    found = scorer.generate_until([ask("generate_until", text + "<think>", settings) for text in texts], True)
    for text, fact in zip(found, scorer.answer_facts.values(), strict=True):
        assert fact.thought_without_end == (text == "")
        if fact.thought_without_end:
            assert fact.tokens == 12 or fact.finish == "eos"
    assert scorer.counts["thoughts_without_end"] == scorer.counts["empty_answers"] > 0
    scorer.start(None)
    scorer.generate_until([ask("generate_until", text, settings) for text in texts], True)
    assert {fact.finish for fact in scorer.answer_facts.values()} >= {"stop"}
    assert scorer.counts["thoughts_without_end"] == 0


# ---------------------------------------------------------------------------------------------------------- sampling
def test_samples_depend_on_the_seed_and_the_prompt_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("zaya")
    settings = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    asked = [request for request in prompts(4, settings) for _ in range(2)]

    def sample(asked: list[Instance], **options: Any) -> list[str]:
        return Scorer(model, tokenizer=tokenizer, max_length=LENGTH, **options).generate_until(asked, True)

    found = sample(asked)
    assert found == sample(asked, rows=3, token_budget=50)
    assert found[4:6] == sample(asked[4:6])
    assert any(one != other for one, other in zip(found[::2], found[1::2], strict=True))  # the two samples of a prompt
    assert found != sample(asked, seed=1)


def test_settings_that_only_transformers_knows_are_left_to_lm_eval(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("llama")
    answers = prompts(4, {"until": ["\n\n"], "max_gen_toks": 6, "num_beams": 2}, count=3)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH).generate_until(answers, True)
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH)
    assert scorer.generate_until(answers, True) == theirs
    assert scorer.counts["unwatched_answers"] == 3  # it is not known how many of them were cut
    assert scorer.counts["empty_answers"] == sum(not text.strip() for text in theirs)


def test_what_the_model_itself_says_of_generation_counts_as_in_lm_eval(tokenizer: PreTrainedTokenizerFast) -> None:
    answers = prompts(4, {"until": ["\n\n"], "max_gen_toks": 20}, count=3)
    found = []
    for penalty in (1.0, 1.8):
        model = build("llama")
        model.generation_config.repetition_penalty = penalty
        model.generation_config.temperature = 0.5  # of no account: nothing is drawn
        scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH)
        theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH).generate_until(answers, True)
        assert scorer.generate_until(answers, True) == theirs
        found.append((theirs, scorer.counts["unwatched_answers"]))
    assert found[0][0] != found[1][0]
    assert [unwatched for _, unwatched in found] == [0, 3]


def test_lm_eval_too_takes_thoughts_out_of_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    """Where generation is left to its code, and the mark of their end is a special token, which texts do not show."""
    model = build("llama")
    ids = iter(tokenizer(" x</think> y", add_special_tokens=False)["input_ids"])

    class Says(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(torch.full(hidden.shape[:-1], next(ids, 1)), 320).double()

    thinking = {"start": "<think>", "end": "</think>"}
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH, thinking=thinking)
    model.lm_head = Says()
    asked = ask("generate_until", "a <think>", {"until": ["zz"], "max_gen_toks": 9, "num_beams": 1})
    assert scorer.generate_until([asked], True) == ["y"]


# ------------------------------------------------------------------------------------------------- models that cannot
def test_a_model_that_fails_the_trial_is_left_to_lm_eval(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = build("llama"), choices(1)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH)
    expected = theirs.loglikelihood(asked, disable_tqdm=True)
    answers = prompts(1, {"until": ["\n\n"], "max_gen_toks": 5}, count=3)
    texts = theirs.generate_until(answers, disable_tqdm=True)
    before = model.config._attn_implementation
    real = forests.ForestReader.hidden
    monkeypatch.setattr(forests.ForestReader, "hidden", lambda *args: real(*args) * 1.01)
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH)
    assert "reads a forest of texts otherwise than the texts one by one" in str(scorer.why_not)
    assert model.config._attn_implementation == before
    assert scorer.loglikelihood(asked, disable_tqdm=True) == expected
    assert scorer.generate_until(answers, disable_tqdm=True) == texts
    assert scorer.counts["requests"] == len(asked) + 3


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 24,
        },
    ],
)
def test_texts_do_not_change_one_another_by_their_lengths(
    rope: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Rotations that depend on the longest text of a batch: a short text beside a long one would be another."""
    width = {"intermediate_size": 48, "rope_parameters": rope}
    model = LlamaForCausalLM(LlamaConfig(**SIZES | width)).double().eval()
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH)
    assert f"rope_type {rope['rope_type']}" in str(scorer.why_not)
    asked = choices(1)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH).loglikelihood(asked, disable_tqdm=True)
    assert scorer.loglikelihood(asked, disable_tqdm=True) == theirs


def test_a_cap_on_logits_is_found_in_low_precision(tokenizer: PreTrainedTokenizerFast) -> None:
    """It is smaller than what the roundings of a forest may be."""
    found = []
    for cap in (None, 8.0):
        model = build("gemma3")
        model.config.final_logit_softcapping = cap
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.6)
        found.append(Scorer(model.bfloat16(), tokenizer=tokenizer, max_length=LENGTH).why_not)
    assert found == [None, "Gemma3ForCausalLM does more to its logits than its head does"]


# ----------------------------------------------------------------------------------------------- killed and repeated
class _Killed(Exception):
    pass


def killed_after(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [calls]
    real = forests.ForestReader.hidden

    def hidden(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise _Killed
        return real(*args)

    monkeypatch.setattr(forests.ForestReader, "hidden", hidden)


def work(scorer: Scorer) -> tuple[Any, Any]:
    answers = prompts(6, {"until": ["\n\n"], "max_gen_toks": 5})
    return scorer.loglikelihood(choices(2), disable_tqdm=True), scorer.generate_until(answers, disable_tqdm=True)


@pytest.mark.parametrize("calls", [1, 4, 9])
def test_a_repeated_run_ends_bit_for_bit_like_an_undisturbed_one(
    calls: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "UNIT", 3)
    model = build("zaya").float()
    scorer = Scorer(model, tokenizer=tokenizer, max_length=LENGTH, token_budget=60)
    expected = work(scorer)
    with monkeypatch.context() as context:
        scorer.start(tmp_path / "journal")
        killed_after(calls, context)
        with pytest.raises(_Killed):
            work(scorer)
    (file,) = (tmp_path / "journal").iterdir()
    lines = file.read_bytes()
    assert lines
    file.write_bytes(lines[:-5])  # the last line was being written
    scorer.start(tmp_path / "journal")
    assert work(scorer) == expected
    scorer.start(tmp_path / "journal")
    killed_after(0, monkeypatch)  # nothing is computed any more
    assert work(scorer) == expected
    assert scorer.counts["tokens_computed"] == 0
    other = Scorer.__new__(Scorer)
    other.__dict__.update(scorer.__dict__, _token_budget=61)
    other.start(tmp_path / "journal")
    with pytest.raises(_Killed):  # other units, other roundings: their answers are not taken
        work(other)


def test_a_journal_gives_numbers_back_as_they_were(tmp_path: Path) -> None:
    values = [[math.pi, True], [-1e-300, False], [0.1 + 0.2, True]]
    journal = Journal(tmp_path / "j")
    journal.add("a", values)
    journal.close()
    (file,) = (tmp_path / "j").iterdir()
    with file.open("ab") as stream:
        stream.write(b'{"unit": "b", "res\n\xff\n[]\n' + json.dumps({"unit": "c", "results": 1}).encode())
    again = Journal(tmp_path / "j")
    assert ("a" in again, "b" in again, "c" in again) == (True, False, True)
    assert again["a"] == values
    done: list[int] = []
    assert work_through(again, ["c", "x", "a"], lambda index: index, done.append) == [1, 1, values]
    assert sorted(done) == [0, 1, 2]


def ranks(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    scorer = Scorer(build("zaya").float(), tokenizer=make_tokenizer(), max_length=LENGTH, token_budget=60)
    generating.UNIT = 3
    scorer.start(folder / "journal")
    found = work(scorer)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    computed = torch.tensor(scorer.counts["tokens_computed"])
    assert int(computed) > 0
    scorer.start(None)
    # The second unit, which the second process computes, fails: all are told.
    wanted = (ZeroDivisionError, "division") if rank else (RuntimeError, "another process failed; process 1: ZeroDiv")
    with pytest.raises(wanted[0], match=wanted[1]):
        work_through(Journal(None), ["a", "b", "c"], lambda index: 1 // (index - 1), lambda index: None)


def test_processes_share_the_work_and_all_have_the_results(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "UNIT", 3)
    run_ranks(ranks, tmp_path)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]
    scorer = Scorer(build("zaya").float(), tokenizer=tokenizer, max_length=LENGTH, token_budget=60)
    expected = json.loads(json.dumps(work(scorer)))
    assert found == [expected, expected]
    assert len(list((tmp_path / "journal").iterdir())) == 2


@pytest.mark.parametrize("wrong", [{"token_budget": 0}, {"rows": 0}])
def test_sizes_are_positive(wrong: dict[str, int], tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="both must be at least 1"):
        Scorer(build("llama"), tokenizer=tokenizer, **wrong)


def test_lm_eval_finds_it_under_its_name() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("zaya") is Scorer
    assert isinstance(get_model("hf"), Callable)  # type: ignore[arg-type]
