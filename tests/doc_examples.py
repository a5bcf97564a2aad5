"""Runs the Python blocks of README and of the pages in docs/, with tiny models in the place of those that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import zaya_hf
from original_checkpoints import original_config, original_tensors, write_checkpoint
from zaya_hf import ZayaForCausalLM
from zaya_hf.quickstart.bpe import train_tokenizer
from zaya_hf.testing import redraw, tiny_config

ROOT = Path(__file__).resolve().parent.parent
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
BEFORE = "# before"  # first line of a block that is about transformers' own class


def python_blocks(text: str) -> list[str]:
    """The blocks of a page that are fenced as Python, in their order."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_block(code: str, places: Mapping[str, Path], name: str) -> None:
    """Execute a block, each name in `places` replaced by its folder; in the current directory, in a fresh namespace.

    A block that begins with `BEFORE` runs as if zaya_hf had not registered its classes.
    """
    for place in sorted(places, key=len, reverse=True):  # ZAYA1-8B is the beginning of another name
        code = code.replace(place, places[place].as_posix())
    before = code.startswith(BEFORE)
    if before:
        zaya_hf.unregister()
    try:
        exec(compile(code, name, "exec"), {"__name__": "example"})
    finally:
        if before:
            zaya_hf.register()


def quickstart_folder(path: Path, text: str) -> Path:
    """A saved model with a tokenizer that was trained on `text`, as the quickstart leaves one."""
    tokenizer = train_tokenizer([text] * 4, 400)
    ends = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    model = _published(ZayaForCausalLM(tiny_config(vocab_size=len(tokenizer), **ends)))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def published_folders(path: Path, text: str) -> dict[str, Path]:
    """Hub ids of published models, and tiny models in their layout and config dialect."""
    combined = quickstart_folder(path / "combined", text)
    (combined / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return {
        "Zyphra/ZAYA1-8B": combined,
        "Zyphra/ZAYA1-base": _original(path / "base", "A"),
        "Zyphra/ZAYA1-8B-legacy": _original(path / "legacy", "B"),
    }


def _original(path: Path, dialect: str) -> Path:
    model = _published(ZayaForCausalLM(tiny_config()))
    return write_checkpoint(path, original_tensors(model, dialect), original_config(model.config, dialect))


def _published(model: ZayaForCausalLM) -> ZayaForCausalLM:
    """Parameters drawn anew, and the skip slot's bias at the value that it has in the published weights."""
    redraw(model)
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases[-1] = -1
    return model
