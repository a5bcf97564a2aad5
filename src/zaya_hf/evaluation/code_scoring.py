"""From answers of code tasks to pass@k, through lm-eval's filters: those of `eval/tasks/code` are these functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .code_answers import called, completed, written
from .code_execution import Program, run_tests
from .statistics import pass_at_k

Doc = Mapping[str, Any]
# Of computing, for all tests of a program together. The larger sets run many hundreds of inputs.
SECONDS = 5.0
SECONDS_PLUS = 20.0


def function_program(answer: str, doc: Doc) -> Program:
    """HumanEval and HumanEval+: `prompt` ends inside the function `entry_point`, `test` defines `check`."""
    source = completed(answer, prompt=doc["prompt"], entry_point=doc["entry_point"])
    return Program(source, f"{doc['test']}\ncheck({doc['entry_point']})\n")


def task_program(answer: str, doc: Doc) -> Program:
    """MBPP: the tests are `test_list`; both program and tests may need `test_setup_code`."""
    tests = "\n".join(doc["test_list"])
    source = written(answer, entry_point=called(tests))
    return Program("\n".join(filter(None, [doc.get("test_setup_code"), source])), tests)


def task_program_plus(answer: str, doc: Doc) -> Program:
    """MBPP+: the tests are `test`, which lm-eval's mbpp_plus never runs; `test_list` only shows in the prompt."""
    source = written(answer, entry_point=called("\n".join(doc["test_list"])))
    return Program(source, "\n".join([*doc.get("test_imports", []), doc["test"]]))


def run_functions(answers: Iterable[Sequence[str]], docs: Sequence[Doc]) -> list[list[dict[str, str]]]:
    """lm-eval's filter for `function_program`; see `outcomes`."""
    return outcomes(answers, docs, function_program, SECONDS)


def run_functions_plus(answers: Iterable[Sequence[str]], docs: Sequence[Doc]) -> list[list[dict[str, str]]]:
    """lm-eval's filter for `function_program` with more tests; see `outcomes`."""
    return outcomes(answers, docs, function_program, SECONDS_PLUS)


def run_tasks(answers: Iterable[Sequence[str]], docs: Sequence[Doc]) -> list[list[dict[str, str]]]:
    """lm-eval's filter for `task_program`; see `outcomes`."""
    return outcomes(answers, docs, task_program, SECONDS)


def run_tasks_plus(answers: Iterable[Sequence[str]], docs: Sequence[Doc]) -> list[list[dict[str, str]]]:
    """lm-eval's filter for `task_program_plus`; see `outcomes`."""
    return outcomes(answers, docs, task_program_plus, SECONDS_PLUS)


def outcomes(
    answers: Iterable[Sequence[str]], docs: Sequence[Doc], program: Callable[[str, Doc], Program], timeout: float
) -> list[list[dict[str, str]]]:
    """What became of each answer to each item: `program`, `status` and `message`, for the log.

    Under torch.distributed each rank runs a part of the programs, and all get all outcomes.

    Raises:
        ValueError: without consent; or a program could not be run, through a fault of the machine: that is no score.
    """
    answers = list(answers)
    programs = [program(answer, doc) for group, doc in zip(answers, docs, strict=True) for answer in group]
    rank, ranks = _rank()
    found = run_tests(programs[rank::ranks], timeout=timeout)
    if ranks > 1:
        parts: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(parts, found)
        found = [parts[place % ranks][place // ranks] for place in range(len(programs))]
    broken = [outcome.message for outcome in found if outcome.status == "error"]
    if broken:
        raise ValueError(f"{len(broken)} of {len(found)} programs could not be run, so there is no score: {broken[0]}")
    lines = (
        {"program": one.source, "status": outcome.status, "message": outcome.message}
        for one, outcome in zip(programs, found, strict=True)
    )
    return [[next(lines) for _ in group] for group in answers]


def pass_1(doc: Doc, results: Sequence[Sequence[Mapping[str, str]]]) -> dict[str, float]:
    """lm-eval's `process_results` of one answer, or of several: pass@1 of an item."""
    return _pass(results[0], (1,))


def pass_1_to_64(doc: Doc, results: Sequence[Sequence[Mapping[str, str]]]) -> dict[str, float]:
    """lm-eval's `process_results` of at least 64 answers: pass@k of an item, for some k.

    Raises:
        ValueError: there are fewer answers.
    """
    return _pass(results[0], (1, 2, 8, 16, 32, 64))


def _pass(found: Sequence[Mapping[str, str]], sizes: Iterable[int]) -> dict[str, float]:
    right = sum(outcome["status"] == "passed" for outcome in found)
    return {f"pass@{size}": pass_at_k(len(found), right, size) for size in sizes}


def _rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
