"""The steps of `zaya quickstart`, in order: text, tokenizer, training, saving, and loading in fresh processes.

Everything is written to a folder beside the output folder, which it replaces at the end: an error, Ctrl-C or SIGTERM
leaves nothing behind. What a killed process left is removed by the next run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

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
# At this size a second thread makes a step 1.4 times faster on an idle machine, but many times slower on a busy one,
# where each of the many small operations waits for the later of the two. And so the numbers depend on no core count.
_THREADS = 1
_PROMPT = "def "
_COMPARED_WINDOWS = 8
# Everything that a working folder holds at any time.
_WORKING_FILES = frozenset({"model", "ids.safetensors", "logits.safetensors", "results.json"})


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya quickstart`; `args` has steps, seed and out. Returns the exit code."""
    settings = Settings(steps=args.steps, seed=args.seed)
    out: Path = args.out
    working = out.with_name(f".{out.name}.{os.getpid()}")
    _sweep(out)
    _refuse_foreign_folder(out)
    _say("quickstart", f"trains a tiny ZAYA model for {settings.steps} steps, saves it to {out}/model, loads it again")
    _say("", f"offline, one thread; the default of {Settings.steps} steps takes one to two minutes on one CPU core")
    threads_before = torch.get_num_threads()
    try:
        working.mkdir(parents=True)
        torch.set_num_threads(_THREADS)
        results = _make(working, settings, show_progress=_draws_bars(sys.stderr))
        text = json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False)
        (working / "results.json").write_text(text + "\n", encoding="utf-8")
        _replace(out, working)
    finally:
        torch.set_num_threads(threads_before)
        shutil.rmtree(working, ignore_errors=True)
    _say("saved", f"{out}/model, and all figures in {out}/results.json")
    _say("sample", f'continues the prompt "{_PROMPT}"; nonsense is expected of a model this small:')
    print(f"\n{results['sample']}\n")
    _say("next", f'{_zaya_command()} generate {shlex.quote(str(out / "model"))} --prompt "{_PROMPT}"')
    _say("", f"{_zaya_command()} doctor")
    return 0


def _say(what: str, text: str) -> None:
    print(f"{what:<10} {text}", flush=True)


def _draws_bars(stream: TextIO) -> bool:
    """Whether a progress bar can be drawn: on a terminal, and not on one that says it has no columns or lines, as under
    some build services."""
    if not stream.isatty():
        return False
    size = os.get_terminal_size(stream.fileno())
    return size.columns > 0 and size.lines > 0


def _zaya_command() -> str:
    """How a shell in this folder calls the `zaya` of this Python."""
    python = Path(sys.executable)
    script = next((path for path in (python.with_name("zaya"), python.with_name("zaya.exe")) if path.is_file()), None)
    shown = python if script is None else script
    if shown.is_relative_to(Path.cwd()):
        shown = shown.relative_to(Path.cwd())
    return shlex.quote(str(shown)) + (" -m zaya_hf" if script is None else "")


def _sweep(out: Path) -> None:
    """Remove what earlier runs for `out` left because they were killed; an output that one had moved aside comes back.

    Only folders whose process is gone and that hold what a quickstart writes.
    """
    if os.name != "posix" or not out.parent.is_dir():  # elsewhere asking for a process by signal 0 may end it
        return
    ours = re.compile(rf"\.{re.escape(out.name)}\.(\d+)(\.old)?")
    for path in out.parent.iterdir():
        match = ours.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir() or _is_running(int(match[1])):
            continue
        if match[2] and not out.exists():
            path.rename(out)
        elif {child.name for child in path.iterdir()} <= _WORKING_FILES or _is_our_output(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Whether a process other than this one has that number: this one has no folder yet when it asks."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def _refuse_foreign_folder(out: Path) -> None:
    """An existing folder is replaced only if an earlier quickstart made it."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not _is_our_output(out):
        raise ValueError(f"{out} exists and is not the output of an earlier quickstart: give another --out")


def _is_our_output(folder: Path) -> bool:
    try:
        made_by: str = json.loads((folder / "results.json").read_text(encoding="utf-8"))["made_by"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return made_by == _MAKER


def _replace(out: Path, new: Path) -> None:
    """Put `new` in the place of `out`; at no time is there a half-written folder of that name."""
    old = new.with_name(new.name + ".old")
    try:
        if out.exists():
            out.rename(old)
        new.rename(out)
    except BaseException:  # Ctrl-C between the two, too
        if old.exists() and not out.exists():
            old.rename(out)
        raise
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
    step_tokens = settings.batch_size * settings.sequence_length
    tokens = settings.steps * step_tokens
    _say("training", f"{settings.steps} steps of {step_tokens:,} tokens")

    def report(steps: int, loss: float) -> None:
        _say("", f"{steps} of {settings.steps} steps, loss {loss:.3f}")

    trained = train(model, stream, settings, show_progress, None if show_progress else report)
    held_out["after"] = bits_per_byte(model, windows, entry_bytes)
    _say(
        "trained",
        f"{tokens / 1e6:.2f} M tokens in {trained.seconds:.0f} s, {trained.tokens_per_second:,.0f} tokens/s",
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
