"""Arguments of the commands that ask a model: generate and chat."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .argument_types import POSITIVE, SEED, TEMPERATURE, TOP_P, stop_string


def model_options() -> argparse.ArgumentParser:
    """What `generate` and `chat` say alike about the model."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("path", type=Path, metavar="PATH", help="folder of a saved ZAYA model, any published layout")
    group = options.add_argument_group("model")
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="of the weights; auto, the default, keeps the folder's",
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda, cuda:1 (also for ROCm); default: a GPU if any")
    group.add_argument(
        "--pack-weights", action="store_true", help="faster on a CPU; takes as much memory again as the weights"
    )
    group.add_argument(
        "--compile", action="store_true", help="compile the decoding step: a wait at first, then faster for long texts"
    )
    return options


def sampling_options(length: str) -> argparse.ArgumentParser:
    """What `generate` and `chat` say alike about the texts. `length` is the help's word on the default length."""
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("text")
    group.add_argument("--max-new-tokens", type=POSITIVE, metavar="N", help=length)
    group.add_argument(
        "--temperature", type=TEMPERATURE, metavar="T", help="0 is greedy; default: the folder's generation config"
    )
    group.add_argument("--top-p", type=TOP_P, metavar="P", help="sample from the likeliest words of total mass P")
    group.add_argument("--top-k", type=POSITIVE, metavar="K", help="sample from the K likeliest words")
    group.add_argument("--seed", type=SEED, metavar="N", help="makes sampling repeatable")
    group.add_argument(
        "--stop",
        type=stop_string,
        action="append",
        default=[],
        metavar="TEXT",
        help=r"end a text before TEXT, in which \n, \t, \r and \\ are a line end, a tab, a return and a backslash; "
        "repeatable",
    )
    group.add_argument("--system", metavar="TEXT", help="the system prompt of a chat")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether a chat model thinks before it answers (enable_thinking); default: its template's",
    )
    return options


def add_generate(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    generate = commands.add_parser(
        "generate",
        parents=parents,
        help="continue prompts with a saved model",
        description="Load the model and tokenizer of a folder and continue one prompt or many. One text is streamed to "
        "standard output; several are printed in the order of their prompts.",
        epilog="With one seed, a prompt at one place in the list gives the same text whatever --batch-size is, but for "
        "rounding, where the chances of two words are next to equal (beam search with sampling aside).",
    )
    group = generate.add_argument_group("prompts")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; repeatable; without any, standard input is one"
    )
    source.add_argument(
        "--prompt-file",
        type=Path,
        action="append",
        metavar="FILE",
        help="a UTF-8 file that is one prompt, less a newline at its end; repeatable; - is standard input",
    )
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line; in a .jsonl file each line is a string or an object with prompt or messages; "
        "- is standard input",
    )
    group.add_argument("--jsonl", action="store_true", help="read --prompts as JSON Lines, whatever its name")
    group.add_argument("--chat", action="store_true", help="put each prompt into the tokenizer's chat template")
    group = generate.add_argument_group("how many, and where to")
    group.add_argument("--num-beams", type=POSITIVE, metavar="N", help="beam search; its text comes at the end")
    group.add_argument(
        "--num-return-sequences", type=POSITIVE, default=1, metavar="N", help="sample N texts for each prompt"
    )
    group.add_argument(
        "--batch-size", type=POSITIVE, default=1, metavar="N", help="prompts at a time; default: %(default)s"
    )
    group.add_argument("--json", action="store_true", help="print JSON, one object a line, instead of the texts")
    group.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write JSON Lines to FILE when all texts are there; until then they are in FILE.part",
    )
    group.add_argument("--resume", action="store_true", help="go on with the FILE.part of an interrupted run")
    group.add_argument("--force", action="store_true", help="replace FILE and what is left of an interrupted run")


def add_chat(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    chat = commands.add_parser(
        "chat",
        parents=parents,
        help="talk to a saved chat model",
        description="Load the model and tokenizer of a folder and talk to it; /help lists the commands. Ctrl-C stops "
        "an answer, Ctrl-D (or Ctrl-C twice at the prompt) leaves. Nothing is written to disk but with --history and "
        "/save.",
        epilog="Where standard input is not a terminal, each of its lines is a message of one conversation, and only "
        "the answers are printed. One message of several lines: zaya generate PATH --chat --prompt-file FILE.",
    )
    chat.add_argument(
        "--history", type=Path, metavar="FILE", help="go on with the conversation in FILE (JSON) and keep it there"
    )
    chat.add_argument(
        "--show-thinking",
        action=argparse.BooleanOptionalAction,
        help="print the model's thinking; default: only on a terminal, dimmed",
    )
    chat.add_argument("--json", action="store_true", help="print one JSON object a line for each answer")
