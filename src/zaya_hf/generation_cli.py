"""`zaya generate`: continue a prompt with the model and tokenizer of one folder.

Text is streamed to standard output as it is made; progress goes to standard error, and only on a terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging as transformers_logging

from zaya_hf.configuration_zaya import ZayaConfig
from zaya_hf.modeling_zaya import ZayaForCausalLM

_NEW_TOKENS = 128
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya generate`; `args` are the options of its parser. Returns the exit code.

    Raises:
        ValueError, OSError: the folder, the prompt or an option does not fit; the message says what would.
    """
    _check_folder(args.path)
    options = generation_options(args)
    prompt = read_prompt(args.prompt, args.prompt_file)
    device = pick_device(args.device)
    on_terminal = sys.stderr.isatty()
    if not on_terminal:
        transformers_logging.disable_progress_bar()
    config = read_config(args.path)
    # With the config: the tokenizer must not look for one through classes that need not be registered.
    tokenizer = AutoTokenizer.from_pretrained(args.path, config=config)
    rendered = render_chat(tokenizer, prompt, args.path) if args.chat else None
    inputs = encode(tokenizer, prompt, rendered)
    options["max_new_tokens"] = new_token_limit(
        inputs["input_ids"].shape[1], args.max_new_tokens, config.max_position_embeddings
    )
    if on_terminal:
        print(f"loading {args.path} on {device} ...", file=sys.stderr)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    loaded: Any = ZayaForCausalLM.from_pretrained(args.path, dtype=dtype)
    model: ZayaForCausalLM = loaded.to(device).eval()

    beams = options.get("num_beams", model.generation_config.num_beams) or 1
    stream = not args.json and beams == 1  # a beam's text may still be replaced until the search ends
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    if args.seed is not None:
        torch.manual_seed(args.seed)
    started = time.perf_counter()
    output = model.generate(**inputs.to(device), **options, streamer=streamer)
    seconds = time.perf_counter() - started

    new_tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    text = str(tokenizer.decode(new_tokens, skip_special_tokens=True))
    if args.json:
        print(json.dumps(_report(args, model, prompt, rendered, text, inputs, new_tokens, seconds), ensure_ascii=False))
    elif not stream:
        print(text)
    if on_terminal:
        print(f"{len(new_tokens)} tokens, {len(new_tokens) / seconds:.1f} tokens/s", file=sys.stderr)
    return 0


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        hint = "it is a file" if folder.exists() else "a model of the Hub has to be downloaded first"
        raise ValueError(f"no such folder: {folder} ({hint})")
    if not (folder / "config.json").is_file():
        raise ValueError(f"no config.json in {folder}: it is not the folder of a saved model")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(f"no tokenizer in {folder}: put the model's tokenizer.json and tokenizer_config.json there")


def read_config(folder: Path) -> ZayaConfig:
    """The config of the folder, whichever class the Auto classes have for it.

    Raises:
        ValueError: it is of another kind of model, or wrong.
    """
    try:
        config: ZayaConfig = ZayaConfig.from_pretrained(folder)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    return config


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the option, the file, or else standard input. Editors and `echo` end a text with a newline that
    nobody typed for the model: of a file and of standard input the last one is left out.

    Raises:
        ValueError: it is empty or only white space, the file is not there, or the text is not UTF-8.
    """
    if prompt is not None:
        text, origin = prompt, "--prompt"
    else:
        if prompt_file is not None and not prompt_file.is_file():
            raise ValueError(f"no such file: {prompt_file}")
        origin = "standard input" if prompt_file is None else str(prompt_file)
        data = sys.stdin.buffer.read() if prompt_file is None else prompt_file.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{origin} is not UTF-8 text (byte {error.start})") from None
        text = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
    if not text.strip():
        raise ValueError(f"the prompt from {origin} is empty")
    return text


def pick_device(name: str | None) -> torch.device:
    """The device of that name, or without a name the first GPU if there is one, else the CPU.

    Raises:
        ValueError: no device of that name is here.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda" if gpus else "cpu")
    present = ["cpu", *(["cuda"] if gpus else []), *(f"cuda:{i}" for i in range(gpus))]
    if name not in present:
        raise ValueError(f"no device {name!r} here; available: {', '.join(present)}")
    return torch.device(name)


def render_chat(tokenizer: PreTrainedTokenizerBase, prompt: str, folder: Path) -> str:
    """The text that the chat template makes of the prompt as a user's turn.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer in {folder} has no chat template: leave out --chat")
    turns = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, rendered: str | None) -> Any:
    """The prompt, or the text that a chat template has made of it, as a batch of one: input_ids and attention_mask,
    int64 [1, tokens].

    Raises:
        ValueError: the prompt gives no token.
    """
    inputs: Any
    if rendered is not None:
        inputs = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")  # the template wrote them
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the tokenizer makes no token of this prompt")
    # Some tokenizers add token_type_ids, which a decoder-only model has no use for.
    for name in set(inputs) - {"input_ids", "attention_mask"}:
        del inputs[name]
    return inputs


def new_token_limit(prompt_tokens: int, wanted: int | None, limit: int) -> int:
    """How many tokens to generate at most: `wanted`, or without it the default, as far as the model has positions.

    Raises:
        ValueError: the prompt alone, or with the `wanted` tokens, is too long.
    """
    if prompt_tokens >= limit:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens, and the model has {limit} positions (max_position_embeddings): "
            f"shorten it to {limit - 1} at most"
        )
    if wanted is None:
        return min(_NEW_TOKENS, limit - prompt_tokens)
    if prompt_tokens + wanted > limit:
        raise ValueError(
            f"{prompt_tokens} prompt tokens and {wanted} new ones do not fit into the model's {limit} positions "
            f"(max_position_embeddings): --max-new-tokens can be at most {limit - prompt_tokens}"
        )
    return wanted


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `generate` is told beyond the folder's generation config: only what was given on the command line."""
    options: dict[str, Any] = {}
    if args.temperature == 0:
        if args.top_p is not None or args.top_k is not None:
            raise ValueError("--temperature 0 is greedy and has no use for --top-p and --top-k: leave them out")
        options["do_sample"] = False
        # Left over from the folder's config they would only raise warnings about unused settings.
        options |= {"temperature": None, "top_p": None, "top_k": None}
    elif args.temperature is not None or args.top_p is not None or args.top_k is not None:
        options["do_sample"] = True
        given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
        options |= {name: value for name, value in given.items() if value is not None}
    if args.num_beams is not None:
        options["num_beams"] = args.num_beams
    return options


def _report(
    args: argparse.Namespace,
    model: ZayaForCausalLM,
    prompt: str,
    rendered: str | None,
    text: str,
    inputs: Any,
    new_tokens: list[int],
    seconds: float,
) -> dict[str, Any]:
    return {
        "path": str(args.path),
        "prompt": prompt,
        "rendered_prompt": rendered,  # with --chat: what the tokenizer was given
        "text": text,
        "prompt_tokens": inputs["input_ids"].shape[1],
        "new_tokens": new_tokens,
        "finish_reason": "eos" if new_tokens and new_tokens[-1] in _end_tokens(model) else "length",
        "seconds": seconds,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "experts": model.config._experts_implementation,
    }


def _end_tokens(model: ZayaForCausalLM) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}
