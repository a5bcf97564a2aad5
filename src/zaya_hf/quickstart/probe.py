"""Loads a saved folder in a process of its own and writes the logits that it gives; run as a script by the quickstart.

    python probe.py FOLDER IDS.safetensors OUT.safetensors stock|zaya_hf

`stock` never imports zaya_hf, so what it loads is the class of transformers itself. `zaya_hf` imports it first, and
also continues the prompt of the ids file. One JSON object with what ran goes to standard output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: str, ids_file: str, out_file: str, which: str) -> None:
    if which == "zaya_hf":
        import zaya_hf

        zaya_hf.register()  # importing does it, except where the environment forbids it
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    inputs = load_file(ids_file)
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
        prompt = inputs["prompt"]
        torch.manual_seed(int(inputs["seed"]))
        tokens = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=96)
        report["sample"] = tokenizer.decode(tokens[0], skip_special_tokens=True)
    print(json.dumps(report))


if __name__ == "__main__":
    # Run by path, Python puts this file's folder first: its neighbours must not pass for top-level modules.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != here]
    main(*sys.argv[1:])
