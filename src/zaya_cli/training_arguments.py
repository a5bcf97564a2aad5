"""Arguments of the commands that train: train, data and quickstart."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .argument_types import POSITIVE, SEED

# The five models of the quickstart; ours first.
QUICKSTART_MODELS = ("zaya", "qwen3", "gemma3", "llama", "olmoe")
# Fields of zaya_hf.training.config: kinds of text sources, and which turns of a conversation are predicted.
SOURCE_KINDS = ("auto", "text", "jsonl", "parquet", "arrow", "hub")
TRAIN_ON = ("assistant", "last_assistant", "all")


def _model_names(text: str) -> tuple[str, ...]:
    """An argparse type: names of `QUICKSTART_MODELS`, separated by commas, each once."""
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in QUICKSTART_MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(QUICKSTART_MODELS)}")
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a model twice")
    return names


def add_train(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        parents=parents,
        help="train a model as a settings file says, in one process or several",
        description="Train as CONFIG says and write everything to the folder that it names (out). The same command "
        "again goes on from the newest checkpoint. SIGTERM, SIGUSR1 and Ctrl-C save and stop.",
        epilog="Settings: zaya_hf/training/config.py; recipes and several machines: train/README.md.",
    )
    train.add_argument(
        "config", metavar="CONFIG", help="YAML file of settings, or the name of a recipe of zaya_hf, such as cpu-small"
    )
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings to change, such as optimizer.lr=1e-3 or data.sources.0.path=texts.jsonl; values are YAML",
    )
    train.add_argument(
        "--show",
        action="store_true",
        help="print all settings, numbers of parameters, FLOPs and memory, and train nothing",
    )
    train.add_argument("--processes", type=POSITIVE, metavar="N", help="on this machine, one per GPU; default: 1")
    train.add_argument(
        "--accelerate-config",
        type=Path,
        metavar="FILE",
        help="start the processes by `accelerate launch` with this file; default: by zaya itself",
    )


def add_data(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    data = commands.add_parser("data", parents=parents, help="prepare text for training")
    actions = data.add_subparsers(dest="action", metavar="WHAT", required=True)
    build = actions.add_parser(
        "build",
        parents=parents,
        help="tokenise text into files of tokens that training maps into memory",
        description="Tokenise the documents of all SOURCES and write them to one folder of tokens, which `zaya train` "
        "takes as a source. The folder is the same for any number of processes.",
    )
    build.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="file, folder, glob pattern in quotes, or hub id of a dataset"
    )
    build.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    build.add_argument("--tokenizer", required=True, metavar="PATH", help="folder or hub id of the tokenizer")
    build.add_argument(
        "--processes", type=POSITIVE, default=os.cpu_count() or 1, metavar="N", help="default: one per core"
    )
    group = build.add_argument_group("what the sources are")
    group.add_argument("--kind", choices=SOURCE_KINDS, default="auto", help="default: by the names of the files")
    group.add_argument(
        "--field", metavar="NAME", help="of a record: its text (default: text), with --chat its messages (messages)"
    )
    group.add_argument("--split", default="train", metavar="NAME", help="of a hub dataset; default: %(default)s")
    group.add_argument("--subset", metavar="NAME", help="configuration of a hub dataset")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub dataset")
    group = build.add_argument_group("conversations")
    group.add_argument("--chat", action="store_true", help="records are conversations: use the chat template")
    group.add_argument(
        "--train-on", choices=TRAIN_ON, default="assistant", help="which turns are targets; default: %(default)s"
    )
    group.add_argument(
        "--max-length",
        type=POSITIVE,
        metavar="N",
        help="tokens of a conversation; longer ones are shortened by AP-trimming",
    )
    group.add_argument("--no-trim-thinking", action="store_true", help="leave longer ones out instead")

    show = actions.add_parser(
        "show", parents=parents, help="what is in a folder of tokens", description="Describe a folder of tokens."
    )
    show.add_argument("path", type=Path, metavar="FOLDER")


def add_quickstart(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    quickstart = commands.add_parser(
        "quickstart",
        parents=parents,
        help="train a tiny ZAYA and four other models alike, evaluate and compare them, write a report",
        description="Train a tiny ZAYA model and four others of its size (Qwen3, Gemma3, Llama, OLMoE) on text that "
        "every Python installation has, evaluate them with lm-eval, write a report, and save ZAYA as a folder that "
        "stock transformers loads. Offline; about five minutes on two CPU cores. Ctrl-C stops it, and the same command "
        "goes on.",
    )
    quickstart.add_argument(
        "--steps", type=POSITIVE, default=800, metavar="N", help="of training, for each model; default: %(default)s"
    )
    quickstart.add_argument("--seed", type=SEED, default=0, metavar="N", help="the first one; default: %(default)s")
    quickstart.add_argument(
        "--seeds", type=POSITIVE, default=1, metavar="N", help="train each model with N seeds; default: %(default)s"
    )
    quickstart.add_argument(
        "--only",
        type=_model_names,
        metavar="MODELS",
        help=f"some of {','.join(QUICKSTART_MODELS)}, separated by commas; default: all",
    )
    quickstart.add_argument(
        "--out", type=Path, default=Path("runs/quickstart"), metavar="FOLDER", help="default: %(default)s"
    )
