"""The steps of `zaya quickstart`, in order: text, tokenizer, training, saving, and loading in fresh processes.

Everything is written to a folder beside the output folder, which it replaces at the end: an error or Ctrl-C leaves
nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

import zaya_hf
from zaya_hf.configuration_zaya import ZayaConfig
from zaya_hf.modeling_zaya import ZayaForCausalLM
from zaya_hf.quickstart import bpe, corpus, probe
from zaya_hf.quickstart.train import Settings, bits_per_byte, held_out_windows, train, unigram_bits_per_byte

# How far logits may be apart in fp32, as a share of the largest logit: rounding grows with the numbers added up.
# (Logits of this model reach 23. Both classes are then up to 1.5e-5 from the same model in float64, 7e-7 of that.)
TOLERANCE = 1e-5
_MAKER = "zaya quickstart"
# At this size a second thread gains little on an idle machine and loses much on a busy one, where each of the many
# small operations waits for the slower of the two. And the numbers do not depend on how many cores there are.
_THREADS = 1
_PROMPT = "def "
_COMPARED_WINDOWS = 8


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya quickstart`; `args` has steps, seed and out. Returns the exit code."""
    settings = Settings(steps=args.steps, seed=args.seed)
    out: Path = args.out
    _refuse_foreign_folder(out)
    working = out.with_name(f".{out.name}.{os.getpid()}")
    working.mkdir(parents=True)
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(_THREADS)
        results = _make(working, settings, show_progress=sys.stderr.isatty())
        text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
        (working / "results.json").write_text(text + "\n", encoding="utf-8")
        _replace(out, working)
    finally:
        torch.set_num_threads(threads_before)
        shutil.rmtree(working, ignore_errors=True)
    _say("saved", f"{out}/model, and all figures in {out}/results.json")
    print(f"\n{results['sample']}")
    return 0


def _say(what: str, text: str) -> None:
    print(f"{what:<10} {text}", flush=True)


def _refuse_foreign_folder(out: Path) -> None:
    """An existing folder is replaced only if an earlier quickstart made it."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        made_here = json.loads((out / "results.json").read_text(encoding="utf-8"))["made_by"] == _MAKER
    except (OSError, ValueError, KeyError, TypeError):
        made_here = False
    if not made_here:
        raise ValueError(f"{out} exists and is not the output of an earlier quickstart: give another --out")


def _replace(out: Path, new: Path) -> None:
    """Put `new` in the place of `out`; at no time is there a half-written folder of that name."""
    old = new.with_name(new.name + ".old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _make(folder: Path, settings: Settings, show_progress: bool) -> dict[str, Any]:
    """Train, save into `folder`/model, check; the content of results.json."""
    text = corpus.load_corpus()
    megabytes = f"{text.train_bytes / 1e6:.1f} MB to train on, {text.held_out_bytes / 1e6:.2f} MB held out"
    _say("text", f"{text.origin}: {megabytes}")

    tokenizer = bpe.train_tokenizer(text.train, settings.vocab_size)
    entry_bytes = bpe.bytes_per_entry(tokenizer)
    stream = bpe.encode_documents(tokenizer, text.train)
    windows = held_out_windows(
        bpe.encode_documents(tokenizer, text.held_out), settings.sequence_length, settings.held_out_windows
    )
    bytes_per_token = text.train_bytes / len(stream)
    _say("tokenizer", f"{len(tokenizer):,} entries, {bytes_per_token:.2f} bytes per token")

    model = _build_model(settings, tokenizer)
    total, active = _parameter_counts(model)
    _say("model", f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M of them active for a token")

    held_out = {
        "bytes": int(entry_bytes[windows[:, 1:]].sum()),
        "unigram": unigram_bits_per_byte(stream, windows, entry_bytes),
        "before": bits_per_byte(model, windows, entry_bytes),
    }
    trained = train(model, stream, settings, show_progress)
    held_out["after"] = bits_per_byte(model, windows, entry_bytes)
    tokens = settings.steps * settings.batch_size * settings.sequence_length
    _say(
        "training",
        f"{settings.steps} steps, {tokens / 1e6:.2f} M tokens, {trained.seconds:.0f} s, "
        f"{trained.tokens_per_second:,.0f} tokens/s",
    )
    _say(
        "held out",
        f"{held_out['before']:.3f} bits per byte before, {held_out['after']:.3f} after "
        f"(token frequencies alone: {held_out['unigram']:.3f})",
    )

    _save(model, tokenizer, folder / "model")
    compared = windows[:_COMPARED_WINDOWS]
    with torch.no_grad():
        expected = model(input_ids=compared, use_cache=False).logits
    prompt = tokenizer(_PROMPT, return_tensors="pt")["input_ids"]
    loaded = _compare(folder, expected, compared, prompt, settings.seed)
    sample = loaded["zaya_hf"].pop("sample")
    return {
        "made_by": _MAKER,
        "settings": settings.as_dict() | {"threads": _THREADS},
        "versions": _versions(),
        "corpus": {
            "origin": text.origin,
            "sha256": text.sha256,
            "train_bytes": text.train_bytes,
            "held_out_bytes": text.held_out_bytes,
        },
        "tokenizer": {"entries": len(tokenizer), "bytes_per_token": bytes_per_token},
        "model": {"parameters": total, "active_parameters": active},
        "bits_per_byte": held_out,
        "training": {
            "tokens": tokens,
            "seconds": trained.seconds,
            "tokens_per_second": trained.tokens_per_second,
            "losses": trained.losses,
        },
        "loaded": loaded,
        "sample": sample,
    }


def _build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> ZayaForCausalLM:
    torch.manual_seed(settings.seed)
    shape = {
        name: getattr(settings, name)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "moe_intermediate_size",
            "num_experts",
            "router_hidden_size",
        )
    }
    return ZayaForCausalLM(
        ZayaConfig(
            **shape,
            max_position_embeddings=4 * settings.sequence_length,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def _parameter_counts(model: ZayaForCausalLM) -> tuple[int, int]:
    """(all, active for one token): of a layer's experts, a token uses one."""
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return total, total - experts + experts // model.config.num_experts


def _save(model: ZayaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        top_k=40,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers_logging.disable_progress_bar()  # a bar for one file of a few megabytes
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _compare(
    folder: Path, expected: torch.Tensor, ids: torch.Tensor, prompt: torch.Tensor, seed: int
) -> dict[str, dict[str, Any]]:
    """Load the saved model in fresh processes, without and with zaya_hf, and compare their logits with `expected`.

    Raises:
        RuntimeError: a process failed, or logits are further apart than TOLERANCE.
    """
    inputs, output = folder / "ids.safetensors", folder / "logits.safetensors"
    numbers = {"threads": torch.tensor(_THREADS), "seed": torch.tensor(seed)}
    save_file({"ids": ids.contiguous(), "prompt": prompt, **numbers}, inputs)
    reports = {}
    for which, name in (("stock", "transformers without zaya_hf"), ("zaya_hf", "zaya_hf")):
        report = _run_probe([str(folder / "model"), str(inputs), str(output), which])
        difference = (load_file(output)["logits"] - expected).abs().max().item()
        limit = TOLERANCE * max(1.0, expected.abs().max().item())
        if not difference <= limit:
            raise RuntimeError(
                f"{name} loads the saved model, but its logits are up to {difference:.1e} from the trained model's; "
                f"at most {limit:.1e} was expected"
            )
        _say("loaded", f"by {name} in a fresh process: logits equal within {difference:.1e} (limit {limit:.1e})")
        reports[which] = report | {"max_logit_difference": difference, "limit": limit}
    inputs.unlink()
    output.unlink()
    return reports


def _run_probe(arguments: list[str]) -> dict[str, Any]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, probe.__file__, *arguments], env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(f"loading the saved model in a fresh process failed ({arguments[-1]}): {reason[0]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _versions() -> dict[str, str]:
    installed = {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"zaya_hf": zaya_hf.__version__, "python": platform.python_version()} | installed
