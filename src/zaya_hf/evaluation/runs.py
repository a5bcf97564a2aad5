"""`zaya eval`: every task of a suite for every model, each a run of its own that a killed evaluation finishes later."""

from __future__ import annotations

import gc
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lm_eval import evaluate as lm_evaluate

from zaya_hf.atomic import write_json, write_text
from zaya_hf.evaluation import code_execution, preflight
from zaya_hf.evaluation.fingerprints import fingerprint
from zaya_hf.evaluation.loading import LoadedModel, load
from zaya_hf.evaluation.manifest import JOURNAL, KEY, RESULT, SAMPLES, Folder, hardware, now, versions
from zaya_hf.evaluation.models import ModelSpec, resolve
from zaya_hf.evaluation.quiet import quiet, random_states_kept
from zaya_hf.evaluation.run_key import Key, Seeds, model_part, run_key, software_part, task_part
from zaya_hf.evaluation.run_results import describe_anew, jsonable, result_of, samples_of
from zaya_hf.evaluation.scorer import Scorer
from zaya_hf.evaluation.suites import LoadedTask, Suite, load_suite, load_tasks

__all__ = ["Settings", "evaluate", "prepare"]

# Of the scorer's counts, those that each process has of its own work.
_OWN_COUNTS = ("tokens_computed",)
# In the counts of a result: what makes its score worth less, and what to do about it.
LOUD = {
    "truncated_prompts": "prompts were cut at the beginning (--max-length is too small for them)",
    "truncated_answers": "answers were cut at their budget (max_gen_toks in the suite)",
    "thoughts_without_end": "thoughts did not end, so they have no answer (max_gen_toks in the suite)",
    "unwatched_answers": "answers came from lm-eval's own code: how many were cut is not known",
}


@dataclass(frozen=True)
class Settings:
    """What `zaya eval` was told.

    Attributes:
        suite: name of a suite that comes with zaya_hf, or path of a suite's file.
        models: as `zaya_hf.evaluation.models.resolve` takes them.
        out: the folder of the evaluation.
        limit: only the first items of each task.
        resume: complete runs are used again and partial ones go on; otherwise both are put aside and begun again.
        dtype, device, max_length, chat_template: instead of each model's own.
        token_budget: tokens that go through the model at a time.
        processes: that share the work.
        allow_code_execution: run programs that models wrote.
        baseline: the model that the others are compared with; None: the first one.
        seed: of few-shot examples and sampled answers; None: lm-eval's defaults.
    """

    suite: str
    models: tuple[str, ...]
    out: str
    limit: int | None = None
    resume: bool = True
    dtype: str | None = None
    device: str | None = None
    max_length: int | None = None
    chat_template: bool | None = None
    token_budget: int = 4096
    processes: int = 1
    allow_code_execution: bool = False
    baseline: str | None = None
    seed: int | None = None

    def overrides(self) -> dict[str, Any]:
        """What is said of all models instead of each one's own, for `resolve`."""
        return {name: getattr(self, name) for name in ("dtype", "max_length", "chat_template")}

    def command(self) -> list[str]:
        """The command line that says the same."""
        words = ["zaya", "eval", "--suite", self.suite, "--models", ",".join(self.models), "--out", self.out]
        plain = asdict(self)
        for name, default in (("token_budget", 4096), ("processes", 1)):
            if plain[name] == default:
                plain[name] = None
        for name in ("limit", "dtype", "device", "max_length", "token_budget", "processes", "baseline", "seed"):
            if plain[name] is not None:
                words += [f"--{name.replace('_', '-')}", str(plain[name])]
        words += [] if self.resume else ["--no-resume"]
        if self.chat_template is not None:
            words.append("--chat-template" if self.chat_template else "--no-chat-template")
        return words + (["--allow-code-execution"] if self.allow_code_execution else [])


@dataclass(frozen=True)
class _Plan:
    """One run: a task of a model."""

    spec: ModelSpec
    task: LoadedTask
    key: Key


def prepare(settings: Settings) -> tuple[Suite, list[ModelSpec]]:
    """The suite and the models, after everything is checked that can be before a model or a task is loaded.

    Raises:
        ValueError: one line that says what is wrong or missing.
    """
    suite = load_suite(settings.suite)
    specs = resolve(settings.models, **settings.overrides())
    if (settings.device or "").startswith("cuda"):
        asked, there = (
            torch.device(settings.device or ""),
            torch.cuda.device_count() if torch.cuda.is_available() else 0,
        )
        if (asked.index or 0) >= there:
            raise ValueError(f"--device {settings.device}: torch sees {there} GPUs here; leave it out, or give cpu")
    names = [spec.name for spec in specs]
    earlier = Folder(Path(settings.out)).manifest.get("models", {})
    if settings.baseline is not None and settings.baseline not in {*names, *earlier}:
        raise ValueError(f"--baseline {settings.baseline}: it is none of the models: {', '.join([*names, *earlier])}")
    if settings.allow_code_execution:
        code_execution.allow()
    preflight.check(suite, allow_code=settings.allow_code_execution)
    return suite, specs


def evaluate(settings: Settings, say: Callable[[str], None] = print) -> list[str]:
    """Do all runs that are missing, and keep the manifest. Where torch.distributed is set up, all its processes share
    each run and the first one writes; all must call this alike.

    Args:
        say: is told what is done, a line at a time, in the first process.

    Returns:
        what everyone who reads the scores has to know: one line each, such as how many prompts were cut.

    Raises:
        ValueError: something is wrong or missing, or another process evaluates in the folder.
        KeyboardInterrupt: passed on; the same settings again go on from here.
    """
    suite, specs = prepare(settings)
    writes = _rank() == 0
    with ExitStack() as stack:
        if writes:
            stack.enter_context(Folder.owned(Path(settings.out)))
        stack.enter_context(random_states_kept())
        tasks = load_tasks(suite, limit=settings.limit)
        seeds = Seeds.all(settings.seed)
        software = software_part(settings.device)
        prints = {spec.name: fingerprint(spec.path, spec.revision) for spec in specs}
        # A branch may move on before its files are read: what is loaded is the commit that the key names.
        specs = [replace(spec, revision=prints[spec.name].get("commit", spec.revision)) for spec in specs]
        models = {spec.name: model_part(spec, prints[spec.name]) for spec in specs}
        parts = {task.leaf_name: task_part(task, seeds) for task in tasks}
        plans = [
            _Plan(spec, task, run_key(models[spec.name], parts[task.leaf_name], software))
            for spec in specs
            for task in tasks
        ]
        folder = Folder(Path(settings.out))
        missing = set(_agreed([plan.key.folder for plan in plans if not (settings.resume and _usable(folder, plan))]))
        if writes:
            _begin(folder, settings, suite, models, parts, plans, missing, say)
        for spec in specs:
            todo = [plan for plan in plans if plan.spec is spec and plan.key.folder in missing]
            if not _agreed(bool(todo) or not folder.facts(spec.name) if writes else None):
                continue
            say_here = say if writes else _nothing
            say_here(f"{spec.name}: loading {spec.path}")
            loaded = load(spec, device=_device(settings.device))
            if writes:
                folder.describe(spec.name, models[spec.name], _facts(spec, loaded, prints[spec.name]))
                folder.write()
            with quiet():  # lm-eval warns that it was given a model that is loaded already
                scorer = _scorer(spec, loaded, settings, seeds)
            for number, plan in enumerate(todo, start=1):
                result = _run(folder, plan, loaded, scorer, settings, seeds)
                if writes:
                    folder.add(spec.name, plan.task.leaf_name, plan.key.folder)
                    say_here(f"{spec.name}: {number} of {len(todo)}: {_told(result)}")
            del loaded, scorer
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return _loud(folder, plans) if writes else []


def _begin(
    folder: Folder,
    settings: Settings,
    suite: Suite,
    models: Mapping[str, dict[str, Any]],
    parts: Mapping[str, dict[str, Any]],
    plans: Sequence[_Plan],
    missing: set[str],
    say: Callable[[str], None],
) -> None:
    """The manifest as it is before the first new run, with the runs that are there already."""
    if not settings.resume:
        for plan in plans:
            folder.put_aside(plan.key.folder)
    for plan in plans:
        if plan.key.folder not in missing:
            found = folder.result(plan.key.folder)
            described = describe_anew(found, plan.task)
            if described != found:
                write_json(folder.run(plan.key.folder) / RESULT, described)
    dropped = folder.begin(
        command=settings.command(),
        suite={
            "name": suite.name,
            "title": suite.title,
            "description": suite.description,
            "entries": [jsonable(asdict(entry)) for entry in suite.entries],
        },
        models=models,
        tasks=parts,
        runs={
            spec: {plan.task.leaf_name: plan.key.folder for plan in plans if plan.spec.name == spec} for spec in models
        },
        limit=settings.limit,
        about={
            "baseline": settings.baseline or folder.manifest.get("baseline"),
            "code_execution": {
                "allowed": settings.allow_code_execution,
                "layers": code_execution.layers() if settings.allow_code_execution else [],
            },
            "hardware": hardware(settings.device, settings.processes),
        },
    )
    folder.write()
    if dropped:
        say(f"{dropped} earlier results are of other settings, weights or versions: kept, and not compared")
    say(f"{len(plans)} runs: {len(plans) - len(missing)} are there, {len(missing)} to do")


def _run(
    folder: Folder, plan: _Plan, loaded: LoadedModel, scorer: Any, settings: Settings, seeds: Seeds
) -> dict[str, Any]:
    """One task of one model, from the first request to result.json."""
    place = folder.run(plan.key.folder)
    writes = _rank() == 0
    resumed = (place / JOURNAL).exists()
    if writes:
        write_json(place / KEY, {"sha256": plan.key.sha256, "parts": plan.key.parts})
    scorer.start(place / JOURNAL)
    task = plan.task.task_object
    # For every model anew: what drew few-shot examples for the last one would draw others for this one.
    task.set_fewshot_seed(seeds.fewshot)
    random.seed(seeds.python)
    np.random.seed(seeds.numpy)
    torch.manual_seed(seeds.torch)
    if not writes:
        # One process judges the answers: several that run their programs at once would slow one another down.
        task.process_results = lambda doc, results: {}
    try:
        with quiet(), _room_for_prompts(task, loaded.facts["max_length"]) as (gen_kwargs, remark):
            found = lm_evaluate(
                scorer,
                {"tasks": {plan.task.leaf_name: task}, "groups": {}, "group_map": {}},
                limit=plan.task.limit,
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=plan.spec.chat_template,
                fewshot_as_multiturn=plan.spec.chat_template,
                confirm_run_unsafe_code=settings.allow_code_execution,
            )
    except ValueError as error:
        raise ValueError(f"{plan.spec.name}, {plan.task.leaf_name}: {error}") from error
    counts = _summed(dict(scorer.counts))
    if not writes:
        return {}
    assert found is not None  # the scorer says that it is alone
    result = result_of(plan.task, found)
    result["warnings"] += remark
    lines = samples_of(plan.task, found, scorer.answer_facts)
    result = {
        "format": 1,
        "key": plan.key.sha256,
        "model": plan.spec.name,
        **result,
        "counts": jsonable(counts),
        "seconds": float(counts["seconds"]),
        "settings": _settings(plan, loaded, settings, seeds) | {"gen_kwargs": jsonable(gen_kwargs)},
        "versions": versions(),
        "finished": now(),
        # Of a run that was interrupted: its seconds and computed tokens are those since then.
        "resumed": resumed,
    }
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    write_text(place / SAMPLES, text)
    write_json(place / RESULT, result)
    scorer.start(None)
    shutil.rmtree(place / JOURNAL, ignore_errors=True)
    return result


@contextmanager
def _room_for_prompts(task: Any, max_length: int) -> Iterator[tuple[dict[str, Any] | None, list[str]]]:
    """The settings of generation, inside with half of `max_length` for answers where the task's budget would leave
    prompts nothing, and what is to be said of that."""
    before = task.config.generation_kwargs
    if not before or before.get("max_gen_toks", 0) < max_length:
        yield before, []
        return
    task.config.generation_kwargs = before | {"max_gen_toks": max_length // 2}
    try:
        remark = f"answers end after {max_length // 2} tokens, not {before['max_gen_toks']}: max_length is {max_length}"
        yield task.config.generation_kwargs, [remark]
    finally:
        task.config.generation_kwargs = before


def _settings(plan: _Plan, loaded: LoadedModel, settings: Settings, seeds: Seeds) -> dict[str, Any]:
    facts = loaded.facts
    return jsonable(
        {
            "chat_template": facts.get("chat_template") if plan.spec.chat_template else False,
            "system": None,
            "dtype": facts.get("dtype"),
            "bos": facts.get("bos"),
            "max_length": facts.get("max_length"),
            "thinking": plan.spec.thinking,
            "limit": settings.limit,
            "seeds": asdict(seeds),
            "token_budget": settings.token_budget,
            "processes": settings.processes,
        }
    )


def _usable(folder: Folder, plan: _Plan) -> bool:
    """Whether the plan's run is complete."""
    return folder.is_done(plan.key.folder) and folder.key(plan.key.folder).get("sha256") == plan.key.sha256


def _scorer(spec: ModelSpec, loaded: LoadedModel, settings: Settings, seeds: Seeds) -> Any:
    """The scorer of a loaded model."""
    return Scorer(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_length=loaded.facts["max_length"],
        token_budget=settings.token_budget,
        thinking=None if spec.thinking is None else dict(spec.thinking),
        seed=seeds.torch,
        device=str(loaded.model.device),
    )


def _facts(spec: ModelSpec, loaded: LoadedModel, print_of_files: Mapping[str, Any]) -> dict[str, Any]:
    told = {"family": spec.family, "reported": spec.reported, "weights_sha256": print_of_files["sha256"]}
    return dict(jsonable(told | loaded.facts))


def _told(result: Mapping[str, Any]) -> str:
    metric = next(metric for metric in result["metrics"] if metric["primary"])
    value = "no number" if metric["value"] is None else f"{metric['value']:.4f}"
    return f"{result['task']}: {metric['metric']} {value} ({result['items']} items, {result['seconds']:.0f} s)"


def _loud(folder: Folder, plans: Sequence[_Plan]) -> list[str]:
    lines = []
    for plan in plans:
        result = folder.result(plan.key.folder)
        where = f"{plan.spec.name}, {plan.task.leaf_name}"
        lines += [
            f"{where}: {result['counts'][name]} of {result['counts']['requests']} {text}"
            for name, text in LOUD.items()
            if result["counts"].get(name)
        ]
        lines += [f"{where}: {warning}" for warning in result["warnings"]]
    return lines


def _nothing(line: str) -> None:
    pass


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _agreed(value: Any) -> Any:
    """The first process's value, in all of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _summed(counts: dict[str, Any]) -> dict[str, Any]:
    """`counts` with what each process counts for itself summed over all."""
    if not (dist.is_available() and dist.is_initialized()):
        return counts
    all_counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_counts, counts)
    return counts | {name: sum(one[name] for one in all_counts) for name in _OWN_COUNTS}


def _device(asked: str | None) -> str | None:
    """With several processes each has a GPU of its own."""
    if asked is None and dist.is_available() and dist.is_initialized() and torch.cuda.is_available():
        return f"cuda:{_rank() % torch.cuda.device_count()}"
    return asked
