"""Results of a quickstart that never ran, with the shape and about the size of real ones; the same for the same
arguments."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

TITLES = {"zaya": "ZAYA1", "qwen3": "Qwen3", "gemma3": "Gemma 3", "llama": "Llama", "olmoe": "OLMoE"}
_CLASSES = {
    "zaya": "zaya_hf.modeling_zaya.ZayaForCausalLM",
    "qwen3": "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
    "gemma3": "transformers.models.gemma3.modeling_gemma3.Gemma3ForCausalLM",
    "llama": "transformers.models.llama.modeling_llama.LlamaForCausalLM",
    "olmoe": "transformers.models.olmoe.modeling_olmoe.OlmoeForCausalLM",
}
_PARAMETERS = {
    "zaya": (2_034_696, 486_408),
    "qwen3": (489_312, 489_312),
    "gemma3": (492_960, 492_960),
    "llama": (488_928, 488_928),
    "olmoe": (1_960_800, 484_704),
}
_BITS = {"zaya": 2.15, "qwen3": 2.19, "gemma3": 2.24, "llama": 2.2, "olmoe": 2.17}
_CHOICES = [
    ("zaya_quickstart_prose", "Prose: words in order", 200, 4, 0.87),
    ("zaya_quickstart_code", "Code: words in order", 200, 4, 0.96),
    ("zaya_quickstart_arithmetic_far", "Sums: far answers", 160, 4, 0.6),
    ("zaya_quickstart_arithmetic_near", "Sums: near answers", 160, 4, 0.29),
]


def wilson(correct: int, items: int, z: float) -> list[float]:
    """Wilson's interval of a share, for the normal quantile z."""
    share = correct / items
    middle = (share + z * z / (2 * items)) / (1 + z * z / items)
    half = z / (1 + z * z / items) * math.sqrt(share * (1 - share) / items + z * z / (4 * items * items))
    return [middle - half, middle + half]


def choice_score(correct: int, items: int, chance: float) -> dict[str, Any]:
    interval_99 = wilson(correct, items, 2.5758293035489004)
    return {
        "kind": "choice",
        "items": items,
        "correct": correct,
        "accuracy": correct / items,
        "chance": chance,
        "interval_95": wilson(correct, items, 1.959963984540054),
        "interval_99": interval_99,
        "above_chance": interval_99[0] > chance,
    }


def _tasks() -> list[dict[str, Any]]:
    bits = {
        "name": "zaya_quickstart_bits",
        "title": "Held-out text",
        "kind": "bits_per_byte",
        "items": 120,
        "version": 1,
        "description": "Bits the model needs for each byte of prose and code from files that it was not trained on.",
        "note": "",
    }
    choices = [
        {
            "name": name,
            "title": title,
            "kind": "choice",
            "items": items,
            "choices": choices,
            "chance": 1 / choices,
            "version": 1,
            "description": f"One right line against {choices - 1} wrong ones; the likelier one counts.",
            "note": "Guessing by length gives 0.3.",
        }
        for name, title, items, choices, _ in _CHOICES
    ]
    return [bits, *choices]


def _run(name: str, seed: int, steps: int) -> dict[str, Any]:
    rng = random.Random(f"{name} {seed} {steps}")
    progress = [step / 800 for step in range(1, steps + 1)]
    floor = _BITS[name] * 1.22 + rng.gauss(0, 0.02)
    losses = [
        floor + (6.93 - floor) * math.exp(-9 * p) + 0.9 * math.exp(-2.2 * p) * (1 - math.exp(-30 * p)) for p in progress
    ]
    losses = [loss + rng.gauss(0, 0.12) for loss in losses]
    done = min(1.0, steps / 800)
    bits = 3.55 - (3.55 - _BITS[name]) * done**0.3 + rng.gauss(0, 0.012)
    scores: dict[str, Any] = {
        "zaya_quickstart_bits": {
            "kind": "bits_per_byte",
            "items": 120,
            "bytes": 118_000,
            "bits_per_byte": bits,
            "interval_95": [bits - 0.05, bits + 0.05],
        }
    }
    for task, _, items, choices, reached in _CHOICES:
        spread = 0.13 if task.endswith("far") else 0.015
        share = 1 / choices + (reached - 1 / choices) * done**0.5 + rng.gauss(0, spread)
        correct = min(items, max(0, round(share * items)))
        scores[task] = choice_score(correct, items, 1 / choices)
    tokens, seconds = steps * 1024, steps * 0.126 * (1.4 if name in ("zaya", "olmoe") else 0.9) + rng.random()
    return {
        "seed": seed,
        "losses": losses,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "router_load": [0.5, 1.75] if name == "zaya" else None,
        "evaluation": {"seconds": 9.1, "tasks": scores},
    }


def make_results(
    models: Sequence[str] = tuple(TITLES), seeds: Sequence[int] = (0,), steps: int = 800, published: bool | None = None
) -> dict[str, Any]:
    """What results.json holds after training these models; `published` is by default whether ZAYA is among them."""
    published = "zaya" in models if published is None else published
    return {
        "made_by": "zaya quickstart",
        "format": 2,
        "command": "zaya quickstart" if len(seeds) == 1 else f"zaya quickstart --seeds {len(seeds)}",
        "created": "2026-12-01T20:30:00+00:00",
        "settings": {
            "steps": steps,
            "seeds": list(seeds),
            "vocab_size": 1024,
            "sequence_length": 128,
            "batch_size": 8,
            "hidden_size": 96,
            "layers": 4,
            "warmup_steps": 40,
            "gradient_clip": 1.0,
            "arithmetic_share": 0.4,
            "threads": 1,
            "newton_schulz_dtype": "bfloat16",
        },
        "versions": {
            "zaya_hf": "0.1.0",
            "python": "3.11.7",
            "torch": "2.13.0",
            "transformers": "5.24.0",
            "tokenizers": "0.23.1",
            "accelerate": "1.15.0",
            "lm_eval": "0.4.13",
        },
        "hardware": {"cpu": "AMD EPYC 9654 96-Core Processor", "cores": 2, "processes": 2},
        "corpus": {
            "origin": "standard library",
            "sha256": "5b0c" * 16,
            "train_bytes": 9_412_345,
            "validation_bytes": 121_004,
            "held_out_bytes": 402_118,
        },
        "arithmetic": {"train": 1800, "held_out": 200},
        "tokenizer": {"entries": 1024, "bytes_per_token": 2.41},
        "unigram_bits_per_byte": 3.55,
        "tasks": _tasks(),
        "models": [
            {
                "name": name,
                "title": TITLES[name],
                "class": _CLASSES[name],
                "parameters": _PARAMETERS[name][0],
                "active_parameters": _PARAMETERS[name][1],
                "learning_rate": 0.02,
                "adamw_learning_rate": 0.005,
                "shape": {"experts": 8, "experts_per_token": 1, "intermediate_size": 192}
                if name in ("zaya", "olmoe")
                else {"intermediate_size": 384},
                "runs": [_run(name, seed, steps) for seed in seeds],
            }
            for name in models
        ],
        "published": {
            "model": "zaya",
            "seed": seeds[0],
            "folder": "hub/zaya",
            "loaded": {
                "stock": {
                    "class": "transformers.models.zaya.modeling_zaya.ZayaForCausalLM",
                    "max_logit_difference": 2.4e-6,
                    "limit": 1e-4,
                },
                "zaya_hf": {
                    "class": "zaya_hf.modeling_zaya.ZayaForCausalLM",
                    "max_logit_difference": 0.0,
                    "limit": 1e-4,
                },
            },
            "samples": [
                {"prompt": "def ", "text": "def _set_name(self, name):\n    if not self.name:\n        return None\n"},
                {"prompt": "12 + 7 = ", "text": "12 + 7 = 19\n33 - 4 = 29\n"},
            ],
        }
        if published
        else None,
        "search": {
            "steps": 200,
            "factors": [0.5, 1.0],
            "validation_loss": {name: {"0.5": bits + 0.1625, "1.0": bits + 0.125} for name, bits in _BITS.items()},
            "chosen": dict.fromkeys(TITLES, 1.0),
        },
    }
