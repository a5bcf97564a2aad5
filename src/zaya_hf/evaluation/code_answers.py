"""The program in an answer: a bare completion, a whole function, or prose around fenced blocks.

An answer that completes its prompt as it stands is taken as it stands, as lm-eval does; the rest here only concerns
answers that would otherwise not even compile, or leave the function empty. One program comes of one answer: there is no
second try.
"""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Iterator

_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning)>")
_THOUGHT_END = re.compile(r"</(?:think|thinking|thought|reasoning)>")
_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+.-]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"", "python", "py", "python3", "py3"}
_CODE_LINE = re.compile(r"(?:from\s+\S+\s+import\b|import\s+\w|def\s+\w|async\s+def\s|class\s+\w|@\w)")
_FUTURE = re.compile(r"^from __future__ import .*\n", re.MULTILINE)
_CUTS = 200  # places at which trailing text may begin that are tried


def completed(answer: str, *, prompt: str, entry_point: str) -> str:
    """The program for a prompt that ends inside a function, as HumanEval's do.

    Args:
        answer: what the model wrote behind the prompt, or as its turn of a conversation.
        prompt: imports, helpers, and the signature and docstring of the function asked for.
        entry_point: its name.

    Returns:
        Python that defines `entry_point`; where nothing in the answer does, `prompt` and answer as they are, which
        fail with a syntax error that says why.
    """
    answer = without_thoughts(answer)
    if not answer.strip():
        return prompt
    if _defines(prompt + answer, entry_point):
        return prompt + answer
    before = _before_function(prompt, entry_point)
    for piece in _pieces(answer, entry_point):
        future, code = "".join(_FUTURE.findall(piece)), _FUTURE.sub("", piece)  # they have to stand before all else
        begin = future + before
        # Whole functions come before completions: a function behind the prompt's signature would be one inside it.
        for whole in (begin + code, prompt + "\n" + code, *(prompt + "\n" + body for body in _indented(code))):
            found = _longest(whole, entry_point, len(begin))
            if found is not None:
                return found
    return prompt + answer


def written(answer: str, *, entry_point: str | None) -> str:
    """The program in an answer to a task in words, as MBPP's are.

    Args:
        answer: what the model wrote; it ends where `[DONE]` stands.
        entry_point: the name that the tests call; None if it is not known.

    Returns:
        Python; where nothing in the answer compiles, the answer as it is.
    """
    answer = without_thoughts(answer).split("[DONE]")[0].replace("\r\n", "\n")
    answer = answer.partition("[BEGIN]\n")[2] or answer  # a model that repeats the end of the prompt
    if _defines(answer, entry_point):
        return answer
    for code in _pieces(answer, entry_point):
        found = _longest(code, entry_point, 0)
        if found is not None:
            return found
    return answer


def called(tests: str) -> str | None:
    """The function that tests in Python call: the first name called that is neither built in nor defined or imported
    by the tests themselves; None if there is none, or the tests do not parse."""
    tree = _parsed(tests)
    if tree is None:
        return None
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            own |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    names = (node.func.id for node in calls if isinstance(node.func, ast.Name))
    return next((name for name in names if name not in own and not hasattr(builtins, name)), None)


def without_thoughts(answer: str) -> str:
    """An answer without what stands before the end of its last thought; nothing is left of an answer that is still
    thinking where it ends."""
    ends = list(_THOUGHT_END.finditer(answer))
    if ends:
        answer = answer[ends[-1].end() :]
    begin = _THOUGHT.match(answer.lstrip())  # elsewhere it may be text in the program
    return "" if begin else answer


def blocks(answer: str) -> list[str]:
    """Contents of the fenced blocks of Python in a text, in order, without the indentation of their fence. The last one
    may lack its end. Blocks that say they are of another language do not count."""
    found, begin = [], None
    for fence in _FENCE.finditer(answer):
        if begin is None:
            begin = fence
        elif fence[1].startswith(begin[1]) and not fence[2]:
            if begin[2].lower() in _PYTHON:
                found.append(textwrap.dedent(answer[begin.end() + 1 : fence.start()]))
            begin = None
    if begin is not None and begin[2].lower() in _PYTHON:
        found.append(textwrap.dedent(answer[begin.end() + 1 :]))
    return [block for block in found if block.strip()]


def _pieces(answer: str, entry_point: str | None) -> Iterator[str]:
    """What may be the program in an answer, the likeliest first."""
    found = blocks(answer)
    # A later block corrects an earlier one, or only shows how to call it: the last that defines the function counts.
    defining = [place for place, block in enumerate(found) if _longest(block, entry_point, 0) is not None]
    for place in reversed(defining if entry_point is not None else defining[:1]):
        yield "\n".join([*(block for block in found[:place] if _only_declares(block)), found[place]])
    yield from (block for place, block in enumerate(found) if place not in defining)
    if "```" in answer:  # the end of a block that the prompt, or nothing, began
        yield answer.partition("```")[0]
    if not found:
        # Only here: with blocks, prose and code are told apart already.
        yield answer
        begin = next(
            (m.start() for m in re.finditer(r"^", answer, re.MULTILINE) if _CODE_LINE.match(answer, m.end())), 0
        )
        if begin:
            yield answer[begin:]


def _indented(code: str) -> tuple[str, ...]:
    """A function's body that lacks the indentation of all lines, or of its first."""
    flat = textwrap.dedent(code).strip("\n")
    return textwrap.indent(flat, "    "), "    " + code.strip("\n").lstrip()


def _longest(source: str, entry_point: str | None, kept: int) -> str | None:
    """`source` without the lines at its end, from one that is not indented on, that keep it from defining the function:
    prose, or a tail that was cut off. The first `kept` characters stay. None if no beginning defines it."""
    if _defines(source, entry_point):
        return source
    lines = [match.start() for match in re.finditer(r"^(?=\S)", source, re.MULTILINE) if match.start() > kept]
    for cut in reversed(lines[-_CUTS:]):
        if _defines(source[:cut], entry_point):
            return source[:cut]
    return None


def _before_function(prompt: str, entry_point: str) -> str:
    """A prompt's imports and helpers."""
    found = list(re.finditer(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE))
    return prompt[: found[-1].start()] if found else ""


def _defines(source: str, entry_point: str | None) -> bool:
    """Whether `source` compiles and gives a body to the function, or has any statement if none is named."""
    tree = _parsed(source)
    if tree is None:
        return False
    if entry_point is None:
        return any(not _is_text(node) for node in tree.body)
    found = False
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == entry_point:
            found = any(not _is_text(statement) for statement in node.body)
        elif isinstance(node, ast.ClassDef) and node.name == entry_point:
            found = True
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found = found or entry_point in names
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _only_declares(source: str) -> bool:
    """Whether running `source` only imports and defines: a helper, not an example."""
    tree = _parsed(source)
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return tree is not None and all(isinstance(node, allowed) or _is_text(node) for node in tree.body)


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the model's strings
            compile(source, "<answer>", "exec", dont_inherit=True)  # finds more than parsing, e.g. a bare return
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None
