"""`zaya generate`: continue one prompt or many with the model and tokenizer of one folder.

One prompt's text is streamed to standard output as it is made; progress goes to standard error, and only on a terminal.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from zaya_hf.modeling_zaya import ZayaForCausalLM

from .inference import model_folder, prompts
from .inference.batches import BatchGenerator, Completion, Request
from .inference.chat_template import ChatTemplate, Message, hidden_tokens
from .inference.prompts import Prompt
from .inference.results import OrderedOutput, Record, ResultFile, fingerprint, holds_all, to_line
from .inference.screen import write
from .inference.text_stream import split_thinking

_NEW_TOKENS = 128


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya generate`; `args` are the options of its parser. Returns the exit code.

    Raises:
        ValueError, OSError: the folder, a prompt or an option does not fit; the message says what would.
    """
    # All that can be wrong is looked for before the model is loaded, which may take minutes.
    model_folder.check_folder(args.path)
    overrides = model_folder.sampling_options(args)
    given = read_prompts(args)
    if args.resume and args.output is None:
        raise ValueError("--resume goes on with an --output file: name it")
    if args.resume and args.output.is_file() and not args.force:
        asked = [(prompt.text, prompt.messages) for prompt in given]
        if holds_all(args.output, asked, args.num_return_sequences):
            print(f"zaya generate: {args.output} has all texts already", file=sys.stderr)
            return 0
    output = None if args.output is None else ResultFile(args.output, args.force, args.resume)
    device = model_folder.pick_device(args.device)
    config = model_folder.read_config(args.path)
    tokenizer = model_folder.read_tokenizer(args.path, config)
    encoded = [_encode(args, tokenizer, prompt) for prompt in given]
    limits = [
        new_token_limit(
            len(prompt.ids), args.max_new_tokens, config.max_position_embeddings, where(prompt.given, given)
        )
        for prompt in encoded
    ]
    model = model_folder.load_model(args, device)

    beams = args.num_beams or model.generation_config.num_beams or 1
    _check_beams(args, beams)
    seed = args.seed
    if output is not None:
        seed = output.open(_digest(args, given), seed if seed is not None or args.resume else new_seed())
    seed = new_seed() if seed is None else seed
    stop = [*args.stop, *(model.generation_config.stop_strings or ())]
    generator = BatchGenerator(model, tokenizer, overrides, seed, stop, beams)
    if args.num_return_sequences > 1 and not generator.config.do_sample:
        raise ValueError("--num-return-sequences needs sampling (--temperature above 0): greedy texts are all equal")
    requests = [
        Request(index, sample, prompt.ids, limit, prompt.skip)
        for index, (prompt, limit) in enumerate(zip(encoded, limits, strict=True))
        for sample in range(args.num_return_sequences)
    ]
    work = _Work(args, generator, encoded)
    if output is not None:
        with _kept_for_later(output):
            work.run([r for r in requests if not output.has(r.index, r.sample)], output.add)
            output.finish()
    elif len(requests) == 1:
        work.run_one(requests[0])
    else:
        ordered = OrderedOutput(work.show, [(r.index, r.sample) for r in requests])
        work.run(requests, ordered.add)
    return 0


@contextmanager
def _kept_for_later(output: ResultFile) -> Iterator[None]:
    """Whatever ends the run early: what there is stays, and it is said how to go on."""
    try:
        yield
    except BaseException:
        print(f"zaya generate: texts so far are in {output.part}; add --resume to go on", file=sys.stderr)
        raise
    finally:
        output.close()


class _Encoded:
    """A prompt with its tokens.

    Attributes:
        rendered: the text that a chat template made of it; None without one.
        opens_thinking: whether that text ends inside the model's thinking.
    """

    def __init__(self, given: Prompt, ids: list[int], skip: set[int], rendered: str | None, opens_thinking: bool):
        self.given, self.ids, self.skip = given, ids, frozenset(skip)
        self.rendered, self.opens_thinking = rendered, opens_thinking


class _Work:
    """Runs requests and makes records of their texts."""

    def __init__(self, args: argparse.Namespace, generator: BatchGenerator, encoded: list[_Encoded]):
        self._args, self._generator, self._encoded = args, generator, encoded
        self._tokens, self._seconds = 0, 0.0

    def run(self, requests: list[Request], add: Callable[[Record], None]) -> None:
        """Make all texts, in batches."""
        on_terminal = sys.stderr.isatty()
        with tqdm(total=len(requests), unit="text", disable=not on_terminal) if on_terminal else nullcontext() as bar:
            for batch in self._generator.batches(requests, self._args.batch_size):
                for request, completion in zip(batch, self._timed(batch), strict=True):
                    add(self.record(request, completion))
                if bar is not None:
                    bar.update(len(batch))
        self._say_speed()

    def run_one(self, request: Request) -> None:
        """Make one text and print it, piece by piece where it is final as it comes: beams may still be replaced."""
        stream = not self._args.json and self._generator.beams == 1
        (completion,) = self._timed([request], write if stream else None)
        if self._args.json:
            run = _about_run(self._args, self._generator.model, self._seconds)
            write(to_line(self.record(request, completion) | run), from_model=False)
        else:
            write(("" if stream else completion.text) + "\n")
        self._say_speed()

    def record(self, request: Request, completion: Completion) -> Record:
        """What is known about a text."""
        encoded = self._encoded[request.index]
        given = encoded.given
        record: Record = {"index": request.index, "sample": request.sample}
        record |= {"prompt": given.text} if given.messages is None else {"messages": list(given.messages)}
        if given.extra:
            record["input"] = given.extra
        record |= {"rendered_prompt": encoded.rendered, "text": completion.text}
        if encoded.rendered is not None:
            thinking, answer = split_thinking(completion.text, encoded.opens_thinking)
            record |= {"thinking": thinking, "answer": answer}
        return record | {
            "prompt_tokens": len(request.ids),
            "new_tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            "seed": self._generator.seed if self._generator.config.do_sample else None,
        }

    def show(self, record: Record) -> None:
        """Print a record of several: as JSON, or its text under a line with its number."""
        if self._args.json:
            write(to_line(record), from_model=False)
        else:
            name = f"{record['index'] + 1}"
            if self._args.num_return_sequences > 1:
                name += f".{record['sample'] + 1}"
            write(f"==> {name} <==\n{record['text']}\n")

    def _timed(self, batch: list[Request], on_text: Callable[[str], None] | None = None) -> list[Completion]:
        started = time.perf_counter()
        completions = self._generator.run(batch, on_text)
        self._seconds += time.perf_counter() - started
        self._tokens += sum(len(completion.tokens) for completion in completions)
        return completions

    def _say_speed(self) -> None:
        if sys.stderr.isatty() and self._seconds:
            print(f"{self._tokens} tokens, {self._tokens / self._seconds:.1f} tokens/s", file=sys.stderr)


def new_seed() -> int:
    """A seed for a run that was given none; results name it, so that they can be repeated."""
    return secrets.randbelow(2**31)


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts that the options name, or else standard input as one prompt.

    Raises:
        ValueError: a prompt is empty, a file is not there, a line is wrong: named by file and line.
    """
    if args.prompt:
        given = prompts.given_prompts(args.prompt)
    elif args.prompts is not None:
        given = prompts.list_of_prompts(
            args.prompts, args.jsonl or args.prompts.suffix.lower() in (".jsonl", ".ndjson")
        )
    else:
        given = [prompts.whole_file(path) for path in args.prompt_file or [prompts.STANDARD_INPUT]]
    if args.jsonl and args.prompts is None:
        raise ValueError("--jsonl says how to read --prompts FILE: name it")
    chat = args.chat or any(prompt.messages is not None for prompt in given)
    for option, value in (("--system", args.system), ("--thinking and --no-thinking", args.thinking)):
        if value is not None and not chat:
            raise ValueError(f"{option} is for chats: add --chat, or give messages")
    return given


def where(prompt: Prompt, given: list[Prompt]) -> str:
    """How to name a prompt in a message: not at all where there is only one."""
    return f" ({prompt.origin})" if len(given) > 1 else ""


def _encode(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> _Encoded:
    if args.chat or prompt.messages is not None:
        template = ChatTemplate(tokenizer, args.path, args.thinking)
        messages: list[Message] = list(prompt.messages or [{"role": "user", "content": prompt.text}])
        if args.system is not None:
            messages = [{"role": "system", "content": args.system}, *(m for m in messages if m["role"] != "system")]
        try:
            rendered, ids = template.render(messages), template.encode(messages)
        except ValueError as error:
            raise ValueError(f"{prompt.origin}: {error}") from error
        return _Encoded(prompt, ids, hidden_tokens(tokenizer), rendered, template.opens_thinking(messages))
    assert prompt.text is not None
    ids = list(tokenizer(prompt.text)["input_ids"])
    if not ids:
        raise ValueError(f"the tokenizer makes no token of the prompt from {prompt.origin}")
    return _Encoded(prompt, ids, set(tokenizer.all_special_ids), None, False)


def new_token_limit(prompt_tokens: int, wanted: int | None, limit: int, which: str = "") -> int:
    """How many tokens to generate at most: `wanted`, or without it the default, as far as the model has positions.

    Args:
        which: names the prompt in messages.

    Raises:
        ValueError: the prompt alone, or with the `wanted` tokens, is too long.
    """
    if prompt_tokens >= limit:
        raise ValueError(
            f"the prompt{which} has {prompt_tokens} tokens, and the model has {limit} positions "
            f"(max_position_embeddings): shorten it to {limit - 1} at most"
        )
    if wanted is None:
        return min(_NEW_TOKENS, limit - prompt_tokens)
    if prompt_tokens + wanted > limit:
        raise ValueError(
            f"{prompt_tokens} prompt tokens{which} and {wanted} new ones do not fit into the model's {limit} positions "
            f"(max_position_embeddings): --max-new-tokens can be at most {limit - prompt_tokens}"
        )
    return wanted


def _check_beams(args: argparse.Namespace, beams: int) -> None:
    if beams > 1 and args.stop:
        raise ValueError("--stop does not go with beam search: a beam may still be replaced when it meets the string")
    if beams > 1 and args.num_return_sequences > 1:
        raise ValueError("--num-return-sequences does not go with beam search, which gives its best text")


def _digest(args: argparse.Namespace, given: list[Prompt]) -> str:
    """Of all that decides the texts. How fast they are made, and where to, is none of it."""
    same = ("max_new_tokens", "temperature", "top_p", "top_k", "num_beams", "num_return_sequences", "stop", "dtype")
    chat = ("chat", "system", "thinking")
    options = {name: getattr(args, name) for name in (*same, *chat)}
    texts = [[prompt.text, prompt.messages, prompt.extra] for prompt in given]
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(args.path.iterdir())]
    return fingerprint(str(args.path.resolve()), files, options, texts)


def _about_run(args: argparse.Namespace, model: ZayaForCausalLM, seconds: float) -> dict[str, Any]:
    return {
        "path": str(args.path),
        "seconds": seconds,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
        "experts": model.config._experts_implementation,
    }
