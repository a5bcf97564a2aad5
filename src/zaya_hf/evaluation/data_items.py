"""Items for evaluation made of the files that packages carry them in. Each has a stable `id`."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

__all__ = ["gsm8k", "hellaswag", "humaneval", "mmlu", "truthfulqa"]

Item = dict[str, Any]

_MMLU_QUESTION = re.compile(r"(?:^|\n\n?)Q: ")
_MMLU_ANSWER = re.compile(r"the answer is \(([A-E])\)", re.IGNORECASE)
_MMLU_CHOICE = re.compile(r"\s\(([A-E])\) ")


def humaneval(content: bytes) -> list[Item]:
    """HumanEval as its authors publish it: JSON lines under gzip, with an `id` added."""
    return [{"id": item["task_id"]} | item for item in _json_lines(gzip.decompress(content))]


def gsm8k(content: bytes) -> list[Item]:
    """`question`, and `answer`: worked, with the number after "####"."""
    return [
        {"id": item["id"], "question": item["prompt"], "answer": item["upstream_answer"]}
        for item in _json_lines(content)
    ]


def hellaswag(content: bytes) -> list[Item]:
    """As in the original set: `activity_label`, `ctx_a`, `ctx_b`, `endings`, `label` (index of the right ending).

    The file has both parts of the context joined. The second part is the beginning of the sentence that the endings
    go on with, and empty where the context ends with a sentence.
    """
    items = []
    for item in _json_lines(content):
        first, second = _parts(item["ctx"])
        items.append(
            {
                "id": item["id"],
                "activity_label": item["activity_label"],
                "ctx_a": first,
                "ctx_b": second,
                "endings": item["endings"],
                "label": item["expected_index"],
            }
        )
    return items


def _parts(context: str) -> tuple[str, str]:
    whole = context.strip()
    if not whole[-1].isalnum():
        return whole, ""
    ends = [match.end() for match in re.finditer(r"[.!?]['\")]* ", whole)]
    cut = ends[-1] if ends else 0
    return whole[:cut].rstrip(), whole[cut:]


def truthfulqa(content: bytes) -> list[Item]:
    """`question`, `choices`, `answer` (index of the true one, which is the first, as in the original set)."""
    return [
        {
            "id": item["id"],
            "question": item["question"],
            "choices": item["choices"],
            "answer": item["expected_index"],
        }
        for item in _json_lines(content)
    ]


def mmlu(content: bytes) -> list[Item]:
    """`subject`, `question`, `choices`, `answer` (index), made of worked examples in a text for each subject.

    One question has a fifth choice, which is its answer.
    """
    items = []
    for subject, text in json.loads(content).items():
        for number, example in enumerate(_MMLU_QUESTION.split(text)[1:]):
            asked, _, worked = example.partition("\nA: Let's think step by step.")
            question, *rest = _MMLU_CHOICE.split(asked)
            letters, choices = rest[::2], [choice.strip() for choice in rest[1::2]]
            answers = set(_MMLU_ANSWER.findall(worked))
            if len(answers) != 1 or letters != list("ABCDE"[: len(letters)]) or not answers <= set(letters):
                raise ValueError(f"no question with choices and one answer: {subject}, example {number + 1}")
            items.append(
                {
                    "id": f"{subject}-{number}",
                    "subject": subject,
                    # Where the text was made, "\f" of LaTeX's \factorial became a line break.
                    "question": question.strip().replace("\nactorial{", "\\factorial{"),
                    "choices": choices,
                    "answer": letters.index(answers.pop()),
                }
            )
    return items


def _json_lines(content: bytes) -> list[Item]:
    # Not splitlines: texts have other line separators inside.
    return [json.loads(line) for line in content.decode("utf-8").split("\n") if line]
