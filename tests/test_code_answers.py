"""The program in an answer: what models write around it, and what keeps it from being one."""

from __future__ import annotations

from typing import Any

import pytest

from zaya_hf.evaluation.code_answers import blocks, called, completed, without_thoughts, written

PROMPT = '''import math


def helper(x: int) -> int:
    return x + 1


def area(radius: float) -> float:
    """ Area of a circle.
    >>> area(1.0)
    3.14
    """
'''
BODY = "    inner = radius * radius\n    return math.pi * inner + helper(0) - 1\n"
WHOLE = "def area(radius: float) -> float:\n" + BODY


def area(answer: str) -> float:
    """What the program in an answer to PROMPT computes."""
    names: dict[str, Any] = {}
    exec(compile(completed(answer, prompt=PROMPT, entry_point="area"), "<program>", "exec"), names)
    return names["area"](2.0)


RIGHT = {
    "completion": BODY,
    "completion without indentation": "inner = radius * radius\nreturn math.pi * inner + helper(0) - 1",
    "completion whose first line lacks it": BODY.lstrip(),
    "loop without indentation": "for _ in range(2):\n    inner = radius * radius\nreturn math.pi * inner",
    "assignment without indentation": "inner = radius * radius\nreturn inner * math.pi",
    "whole function": WHOLE,
    "prompt repeated": PROMPT + BODY,
    "fence": f"```python\n{WHOLE}```",
    "fence with prose": f"Sure! Here it is:\n\n```python\n{PROMPT}{BODY}```\nIt multiplies `math.pi` by the square.",
    "fence with language in capitals": f"```PYTHON\n{WHOLE}```",
    "fence without language": f"```\n{WHOLE}```",
    "fence never closed": f"Here:\n```python\n{WHOLE}",
    "fence never closed, cut off in an example": f"```python\n{WHOLE}\nprint(area(",
    "fence with tildes": f"~~~py\n{WHOLE}~~~",
    "fence around a body": f"```python\n{BODY}```",
    "fence around a body without indentation": "```python\nreturn math.pi * radius * radius\n```",
    "indented fence": "1. Code:\n\n    ```python\n    def area(radius):\n        return math.pi * radius**2\n    ```\n",
    "only the end of a fence": f"{BODY}```\nThis works.",
    "example in a second block": f"```python\n{WHOLE}```\nUse it:\n```python\nprint(area(1.0))\n```",
    "corrected in a second block": f"```python\ndef area(radius):\n    return 0\n```\nNo:\n```python\n{WHOLE}```",
    "helper in an earlier block": "```python\ndef square(x):\n    return x * x\n```\nand\n"
    "```python\ndef area(radius):\n    return math.pi * square(radius)\n```",
    "output in another language": f"```python\n{WHOLE}```\n```text\n3.14\n```\n```bash\npython area.py\n```",
    "prose without fences": f"Here is the function:\n\n{WHOLE}\nIt returns the area.",
    "script's tail": WHOLE + "\n\nif __name__ == '__main__':\n    print(area(float(input())))\n",
    "tail cut off": WHOLE + "\n\nif __name__ == '__main__':\n    print(area(",
    "thoughts": f"<think>\nA wrong try:\n```python\ndef area(radius): return 0\n```\n</think>\n\n```python\n{WHOLE}```",
    "thoughts begun in the prompt": f"hmm, pi\n</think>\n```python\n{WHOLE}```",
    "Windows line ends": f"```python\r\n{WHOLE}```".replace("\n", "\r\n").replace("\r\r", "\r"),
    "imports from the future": f"```python\nfrom __future__ import annotations\n\n{WHOLE}```",
    "a name bound": "```python\narea = lambda radius: math.pi * radius ** 2\n```",
    "escape that warns": f"```python\npattern = '\\d'\n{WHOLE}```",
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.filterwarnings("ignore:invalid escape")
def test_program_in_an_answer(name: str) -> None:
    assert area(RIGHT[name]) == pytest.approx(12.566370614)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "  \n",
        "<think>\nlet me see",
        "I cannot help.",
        "```python\n```",
        "```json\n{}\n```",
        "\0",
        "(" * 5000,
        "    return (1",
    ],
)
def test_answer_without_a_program_fails_and_does_not_crash(answer: str) -> None:
    source = completed(answer, prompt=PROMPT, entry_point="area")
    try:
        names: dict[str, Any] = {}
        exec(compile(source, "<program>", "exec"), names)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return
    assert names["area"](2.0) is None


def test_completion_is_taken_as_it_stands() -> None:
    """As lm-eval does: what is right behind the prompt is not looked at more closely."""
    answer = BODY + "\nx = '''\n```python\ndef area(radius): return 0\n```\n'''\n"
    assert completed(answer, prompt=PROMPT, entry_point="area") == PROMPT + answer


def test_function_of_another_name_is_none() -> None:
    assert area("```python\ndef other(radius):\n    return 1\n```") is None


WRITTEN = {
    "plain": "def double(x):\n    return 2 * x\n",
    "until DONE": "def double(x):\n    return 2 * x\n[DONE]\nWrite another one",
    "BEGIN repeated": "[BEGIN]\ndef double(x):\n    return 2 * x\n",
    "fence": "Here:\n```python\nimport math\ndef double(x):\n    return 2 * x\n```\nDone.",
    "prose": "The function:\ndef double(x):\n    return 2 * x\n\nThat is all there is to say.",
    "Windows line ends": "def double(x):\r\n    return 2 * x\r\n",
    "thoughts": "<think>x</think>def double(x):\n    return 2 * x",
}


@pytest.mark.parametrize(
    ("name", "entry_point"),
    # Without a name it cannot be told which text is code.
    [
        (name, entry_point)
        for name in WRITTEN
        for entry_point in ("double", None)
        if (name, entry_point) != ("prose", None)
    ],
)
def test_program_for_a_task_in_words(name: str, entry_point: str | None) -> None:
    names: dict[str, Any] = {}
    exec(compile(written(WRITTEN[name], entry_point=entry_point), "<program>", "exec"), names)
    assert names["double"](4) == 8


@pytest.mark.parametrize(
    ("tests", "name"),
    [
        ("assert double(2) == 4", "double"),
        ("assert set(double((1, 2))) == set((2, 4))", "double"),
        ("import math\nfrom x import near\nassert near(math.floor(double(2)), 4)", "double"),
        ("def check(f):\n    assert f\ncheck(double(1))", "double"),
        ("assert True", None),
        ("assert (", None),
    ],
)
def test_name_that_tests_call(tests: str, name: str | None) -> None:
    assert called(tests) == name


def test_blocks_and_thoughts() -> None:
    assert blocks("a\n```py\n1\n```\n~~~\n```\n2\n```\n~~~\n````python\n```\n````") == ["1\n", "```\n2\n```\n", "```\n"]
    assert without_thoughts("text = '<think>'") == "text = '<think>'"
    assert without_thoughts("<think>a</think>b</think>c") == "c"
