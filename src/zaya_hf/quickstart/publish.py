"""The trained model as a folder to publish, checked by loading it in fresh processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from zaya_hf.quickstart import probe

# How far logits may be apart in fp32, as a share of the largest logit: rounding grows with the numbers added up.
# (Logits of this model reach 23. Both classes are then up to 1.5e-5 from the same model in float64, 7e-7 of that.)
TOLERANCE = 1e-5
LOADERS = {"stock": "transformers without zaya_hf", "zaya_hf": "zaya_hf"}
PROMPTS = ("def ", "The ", "37+8=")


def publish(model: Path, logits: Path, folder: Path, threads: int, seed: int) -> dict[str, Any]:
    """Copy the saved `model` to `folder` and load it there without and with zaya_hf, each in a fresh process.

    Args:
        logits: file with `ids`, int64 [rows, length], and the `logits` that the trained model gave for them before it
            was saved, computed with as many threads.

    Returns:
        What `results.json` says under `published`, less the names: `loaded` and `samples`.

    Raises:
        RuntimeError: a process failed, or logits are further apart than `TOLERANCE`.
    """
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trained = load_file(logits)
    expected = trained["logits"]
    inputs, output = folder / ".ids.safetensors", folder / ".logits.safetensors"
    prompts = {f"prompt{i}": tokenizer(p, return_tensors="pt")["input_ids"] for i, p in enumerate(PROMPTS)}
    numbers = {"threads": torch.tensor(threads), "seed": torch.tensor(seed)}
    loaded: dict[str, dict[str, Any]] = {}
    try:
        save_file({"ids": trained["ids"], **prompts, **numbers}, inputs)
        for which, name in LOADERS.items():
            report = _run_probe([str(folder), str(inputs), str(output), which])
            difference = (load_file(output)["logits"] - expected).abs().max().item()
            limit = TOLERANCE * max(1.0, expected.abs().max().item())
            if not difference <= limit:
                raise RuntimeError(
                    f"{name} loads the saved model, but its logits are up to {difference:.1e} from the trained "
                    f"model's; at most {limit:.1e} was expected"
                )
            loaded[which] = report | {"max_logit_difference": difference, "limit": limit}
    finally:
        inputs.unlink(missing_ok=True)
        output.unlink(missing_ok=True)
    texts = loaded["zaya_hf"].pop("samples")
    samples = [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, texts, strict=True)]
    return {"loaded": loaded, "samples": samples}


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
