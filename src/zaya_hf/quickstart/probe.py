"""Loads a saved folder in a process of its own and writes the logits that it gives; run as a script by the quickstart.

    python probe.py FOLDER INPUTS.safetensors OUT.safetensors stock|zaya_hf

`stock` never imports zaya_hf, so what it loads is the class of transformers itself. `zaya_hf` imports it first, and
also continues the prompts of the inputs, as the folder's generation config says. One JSON object with what ran goes to
standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_NEW_TOKENS = 80  # with any prompt, what a model of 128-token rows has learned to continue


def main(folder: str, inputs_file: str, out_file: str, which: str) -> None:
    if which == "zaya_hf":
        import zaya_hf

        zaya_hf.register()  # importing does it, except where the environment forbids it
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inputs = load_file(inputs_file)
    torch.set_num_threads(int(inputs["threads"]))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    origin = type(model).__module__
    if origin.split(".")[0] != {"stock": "transformers", "zaya_hf": "zaya_hf"}[which] or (
        which == "stock" and "zaya_hf" in sys.modules
    ):
        raise RuntimeError(f"asked for the {which} class, but {origin}.{type(model).__name__} was loaded")
    with torch.no_grad():
        logits = model(input_ids=inputs["ids"], use_cache=False).logits
    save_file({"logits": logits.contiguous()}, out_file)
    report: dict[str, Any] = {"class": f"{origin}.{type(model).__name__}"}
    if which == "zaya_hf":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(int(inputs["seed"]))
        prompts = [inputs[name] for name in sorted(inputs) if name.startswith("prompt")]
        tokens = [
            model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=_NEW_TOKENS)[0]
            for prompt in prompts
        ]
        report["samples"] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    print(json.dumps(report))


if __name__ == "__main__":
    # Run by path, Python puts this file's folder first: its neighbours must not pass for top-level modules.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    main(*sys.argv[1:])
