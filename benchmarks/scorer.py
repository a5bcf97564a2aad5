"""Our scorer against lm-eval's `hf` model: the same models, requests, machine and threads, in one process, in turn.

Two kinds of requests, of real prose: HellaSwag-like (a context of 35 to 70 words and four endings of 15 to 30) and
MMLU-like (five solved questions that a subject shares, a question, four letters). The models are narrow, but have the
vocabularies of the published ones. lm-eval gets the batch size that is its best among several. For ZAYA there is a
second comparison: lm-eval with transformers' own class, which is what it loads where zaya_hf is not installed.
Answers are compared before anything is timed: log-likelihoods to max(1e-4, 2e-6 |LL|), and equal greedy flags. Peak
memory is that of a process per side. Prints one JSON object with ratios.

    python benchmarks/scorer.py --table --output benchmarks/results/scorer.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pydoc_data.topics
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from upstream.memory import _memory
from upstream.pair import build as build_zaya
from upstream.pair import draw, share
from upstream.timing import Times, Work, alternate, machine, sample

from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.atomic import write_json
from zaya_hf.evaluation.scorer import Scorer
from zaya_hf.quickstart.bpe import train_tokenizer

FAMILIES = ("zaya", "qwen3", "gemma3", "llama", "olmoe")
KINDS = ("hellaswag", "mmlu")
VOCABULARIES = {"zaya": 262_272, "qwen3": 151_936, "gemma3": 262_208, "llama": 128_256, "olmoe": 50_304}
AIMS = {"zaya": {"hellaswag": 4.0, "mmlu": 6.0}}
PEERS_AIM = 2.0
SEED = 0
_WORDS = 2048  # of the tokenizer
_QUESTIONS_PER_SUBJECT = 50


def build(family: str, args: argparse.Namespace) -> PreTrainedModel:
    """A random fp32 model of the family."""
    heads = max(args.hidden // 64, 2)
    common: dict[str, Any] = {
        "vocab_size": args.vocabulary or VOCABULARIES[family],
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(heads // 4, 1),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    dense = {"intermediate_size": 3 * args.hidden, "head_dim": 64}
    makers: dict[str, Callable[[], PreTrainedModel]] = {
        # Half the attention heads: CCA's queries are compressed to half the width.
        "zaya": lambda: ZayaForCausalLM(
            ZayaConfig(
                **common | {"num_attention_heads": max(heads // 2, 1), "num_key_value_heads": max(heads // 4, 1)},
                head_dim=64,
                num_experts=16,
                moe_intermediate_size=2 * args.hidden,
                router_hidden_size=args.hidden // 8,
            )
        ),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common, **dense)),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(**common, **dense, sliding_window=512, query_pre_attn_scalar=64)
        ),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**common, **dense)),
        "olmoe": lambda: OlmoeForCausalLM(
            OlmoeConfig(**common, intermediate_size=args.hidden // 2, num_experts=16, num_experts_per_tok=4)
        ),
    }
    torch.manual_seed(SEED)
    model = makers[family]()
    return draw(model, SEED) if family == "zaya" else model.eval()  # type: ignore[return-value]


def prose() -> list[str]:
    """Words of the language reference, which every Python installation has."""
    text = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return re.findall(r"[A-Za-z']+[.,;:]?", text)


def requests(kind: str, questions: int, words: list[str]) -> list[Instance]:
    """lm-eval's requests of `questions` questions."""
    chance = random.Random(SEED)

    def some(low: int, high: int) -> str:
        size = chance.randint(low, high)
        first = chance.randrange(len(words) - size)
        return " ".join(words[first : first + size])

    def question() -> str:
        options = "".join(f"\n{letter}. {some(3, 12)}" for letter in "ABCD")
        return f"{some(15, 50)}{options}\nAnswer:"

    pairs = []
    examples = ""
    for number in range(questions):
        if kind == "hellaswag":
            context = some(35, 70)
            pairs += [(context, " " + some(15, 30)) for _ in range(4)]
            continue
        if number % _QUESTIONS_PER_SUBJECT == 0:
            solved = "".join(f"{question()} {chance.choice('ABCD')}\n\n" for _ in range(5))
            examples = f"The following are multiple choice questions (with answers) about {some(2, 3)}.\n\n{solved}"
        context = examples + question()
        pairs += [(context, f" {letter}") for letter in "ABCD"]
    return [Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs]


def compare(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """How far answers are apart.

    Raises:
        SystemExit: too far.
    """
    worst, share = 0.0, 0.0
    for one, other in zip(ours, theirs, strict=True):
        apart = abs(one[0] - other[0])
        worst, share = max(worst, apart), max(share, apart / max(1e-4, 2e-6 * abs(other[0])))
        if one[1] != other[1]:
            raise SystemExit(f"greedy flags differ: {one} against {other}")
    if not share <= 1:
        raise SystemExit(f"log-likelihoods differ by {worst}, {share:.2f} of what is allowed")
    return {"largest_difference_nats": worst, "share_of_allowed": round(share, 3)}


def best_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: list[Instance], sizes: list[int]
) -> tuple[int, dict[str, float]]:
    """lm-eval's fastest batch size on half of the requests, and the seconds of all."""
    half = asked[: max(len(asked) // 2, 1)]
    seconds = {str(size): round(sample(Work(theirs(model, tokenizer, half, size))), 3) for size in sizes}
    return int(min(seconds, key=lambda size: seconds[size])), seconds


def theirs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: list[Instance], size: int) -> Any:
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size, max_length=4096)
    return lambda: lm.loglikelihood(asked, disable_tqdm=True)


def peak(args: argparse.Namespace, family: str, kind: str, side: str, size: int) -> int:
    """MiB that a process of this side takes at most, beyond what it had before the first request."""
    command = [sys.executable, __file__, "--child", side, "--families", family, "--kinds", kind, "--batch", str(size)]
    for name in ("hidden", "layers", "vocabulary", "token_budget", "questions", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(ended.stdout)["mib"])


def child(args: argparse.Namespace) -> None:
    family, kind = args.families[0], args.kinds[0]
    words = prose()
    tokenizer = train_tokenizer([" ".join(words)], _WORDS)
    model, asked = build(family, args), requests(kind, args.questions, words)
    if args.child == "ours":
        lm: Any = Scorer(model, tokenizer=tokenizer, token_budget=args.token_budget, max_length=4096)
    else:
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch, max_length=4096)
    before = _memory("VmRSS")
    lm.loglikelihood(asked, disable_tqdm=True)
    print(json.dumps({"mib": round((_memory("VmHWM") - before) / 2**20)}))


def measure(args: argparse.Namespace, family: str, kind: str, words: list[str], tokenizer: Any) -> dict[str, Any]:
    model, asked = build(family, args), requests(kind, args.questions, words)
    scorer = Scorer(model, tokenizer=tokenizer, token_budget=args.token_budget, max_length=4096)
    if scorer.why_not is not None:
        raise SystemExit(scorer.why_not)
    found = scorer.loglikelihood(asked, disable_tqdm=True)
    counts = dict(scorer.counts)
    size, tried = best_batch(model, tokenizer, asked, args.batch_sizes)
    check = compare(found, theirs(model, tokenizer, asked, size)())
    works = {
        "ours": Work(lambda: scorer.loglikelihood(asked, disable_tqdm=True)),
        "lm_eval": Work(theirs(model, tokenizer, asked, size)),
    }
    if family == "zaya":
        stock: Any = build_zaya("stock", model.config)
        share(stock, model.state_dict())
        check["stock"] = compare(found, theirs(stock, tokenizer, asked, size)())
        works["lm_eval_stock"] = Work(theirs(stock, tokenizer, asked, size))
    times: dict[str, Times] = alternate(works, args.seconds)
    row: dict[str, Any] = {
        "family": family,
        "kind": kind,
        "questions": args.questions,
        "requests": len(asked),
        "tokens_given": counts["tokens_given"],
        "tokens_computed": counts["tokens_computed"],
        "ours_seconds": round(times["ours"].median, 3),
        "lm_eval_seconds": round(times["lm_eval"].median, 3),
        "lm_eval_batch_size": size,
        "lm_eval_seconds_by_batch_size": tried,
        "samples": len(times["ours"].samples),
        "ratio": round(times["lm_eval"].median / times["ours"].median, 2),
        "aim": AIMS.get(family, {}).get(kind, PEERS_AIM),
        "check": check,
    }
    if "lm_eval_stock" in times:
        row["lm_eval_stock_seconds"] = round(times["lm_eval_stock"].median, 3)
        row["ratio_stock"] = round(times["lm_eval_stock"].median / times["ours"].median, 2)
    if not args.no_memory:
        row["peak_mib"] = {side: peak(args, family, kind, side, size) for side in ("ours", "lm_eval")}
    return row


def table(result: dict[str, Any]) -> str:
    lines = [
        "| model | requests | ours | lm-eval `hf` | batch | ratio | stock class | peak memory ours / lm-eval |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        mib = row.get("peak_mib")
        memory = f"{mib['ours']} / {mib['lm_eval']} MiB" if mib else ""
        lines.append(
            f"| {row['family']} | {row['kind']}, {row['requests']} | {row['ours_seconds']:.2f} s "
            f"| {row['lm_eval_seconds']:.2f} s | {row['lm_eval_batch_size']} | {row['ratio']:.2f} "
            f"| {row.get('ratio_stock', '')} | {memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    for name, default in (("hidden", 512), ("layers", 4), ("questions", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=0, help="of all models; default: of each the published one")
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring, per side and row")
    parser.add_argument("--no-memory", action="store_true", help="start no processes for peak memory")
    parser.add_argument("--table", action="store_true", help="print a Markdown table instead of JSON")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON here")
    parser.add_argument("--child", choices=("ours", "lm_eval"), help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if args.child:
        child(args)
        return
    words = prose()
    tokenizer = train_tokenizer([" ".join(words)], _WORDS)
    sizes = ("hidden", "layers", "vocabulary", "token_budget")
    result: dict[str, Any] = {
        "machine": machine(quick=True),
        **{name: getattr(args, name) for name in sizes},
        "dtype": "float32",
        "rows": [],
    }
    for family in args.families:
        for kind in args.kinds:
            result["rows"].append(measure(args, family, kind, words, tokenizer))
            print(f"{family} {kind}: {result['rows'][-1]['ratio']}", file=sys.stderr)
            if args.output:
                write_json(args.output, result)
    print(table(result) if args.table else json.dumps(result, indent=2))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
