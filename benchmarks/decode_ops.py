"""How many operations of a device one decoding step takes per layer: ours beside transformers' own `zaya`.

    python benchmarks/decode_ops.py [--rows N] [--output FILE]

Counts what reaches torch's dispatcher in one step of a static cache, without sampling: every operation that computes
or copies counts once, so does each operator of ours; views and allocations do not. With kernels that is what a GPU is
asked to launch, but for operators that launch more than one: their kernels are listed. Per layer is the count with one
layer more, less the count without. Needs no GPU: ours runs as with ZAYA_OPS=triton, under Triton's interpreter, with
`fuse_for_inference`, in small widths, on which no count depends. One JSON object goes to standard output; a file is
written only where --output says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache
from transformers.models.zaya import ZayaConfig as StockConfig
from transformers.models.zaya import ZayaForCausalLM as StockForCausalLM
from triton.runtime.interpreter import GridExecutor

from zaya_hf import ZayaForCausalLM
from zaya_hf.atomic import write_json
from zaya_hf.ops import selection
from zaya_hf.testing import redraw, tiny_config

LAYERS = 2
#: the most that a layer of ours may take
TARGET = 12
EXPERTS = ("eager", "grouped_mm", "batched_mm")
#: these give memory or look at it in another way, without saying so in their schema
NO_WORK = {
    "aten._reshape_alias",
    "aten._unsafe_view",
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
}


class Operations(TorchDispatchMode):
    """The names of all operations inside, in order, and of the kernels that operators of ours launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.kernels: list[str] = []
        self._patch = mock.patch.object(GridExecutor, "__call__", self._counting())

    def __enter__(self) -> Operations:
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name not in NO_WORK and not _is_view(func):
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def _counting(self) -> Any:
        launch = GridExecutor.__call__

        def counted(executor: GridExecutor, *args: Any, **kwargs: Any) -> Any:
            self.kernels.append(executor.fn.__name__)
            return launch(executor, *args, **kwargs)

        return counted


def _is_view(func: Any) -> bool:
    returned = [result.alias_info for result in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


@torch.no_grad()  # in inference mode composed operations would come as one
def operations_of_a_step(model: Any, rows: int) -> Operations:
    """What a second decoding step does (the first one claims memory), with the masks that ``generate`` makes."""
    cache = StaticCache(config=model.config, max_cache_len=32)
    ids = torch.randint(3, 100, (rows, 8), generator=torch.Generator().manual_seed(0))
    is_ours = isinstance(model, ZayaForCausalLM)
    held = {"cache" if is_ours else "past_key_values": cache}
    model(ids[:, :6], **held)
    for column in (6, 7):
        step = {"input_ids": ids[:, column : column + 1], **held}
        with selection.use("triton"), Operations() as counted:
            if is_ours:
                embeds = model.get_input_embeddings()(step["input_ids"])
                ones = torch.ones(rows, column + 1, dtype=torch.long)
                step["attention_mask"] = model.create_masks_for_generate(model.config, embeds, ones, cache)
            model(**step)
    return counted


def ours(layers: int) -> Any:
    model: Any = ZayaForCausalLM(tiny_config(num_hidden_layers=layers))
    return redraw(model).fuse_for_inference()


def stock(layers: int, experts: str) -> Any:
    fields = tiny_config(num_hidden_layers=layers).to_dict()
    model: Any = StockForCausalLM(StockConfig(**{name: fields[name] for name in _SHARED if name in fields}))
    model.set_experts_implementation(experts)
    return redraw(model)


_SHARED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "moe_intermediate_size",
    "router_hidden_size",
    "max_position_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def counts(make: Any, rows: int) -> dict[str, Any]:
    """Of a model: operations of a layer, what they are, those of a step that are no layer's, and the kernels that
    operators of ours launch."""
    fewer, more = (operations_of_a_step(make(layers), rows) for layers in (LAYERS, LAYERS + 1))
    per_layer = len(more.names) - len(fewer.names)
    found = {
        "per_layer": per_layer,
        "once_per_step": len(fewer.names) - LAYERS * per_layer,
        "operations_of_a_layer": _difference(more.names, fewer.names),
    }
    kernels = _difference(more.kernels, fewer.kernels)
    return {**found, "kernels_of_our_operators_in_a_layer": kernels} if kernels else found


def _difference(more: list[str], fewer: list[str]) -> dict[str, int]:
    """How often each name is in one and not in the other, in the order of the one."""
    counted = Counter(more)
    counted.subtract(Counter(fewer))
    return {name: counted[name] for name in dict.fromkeys(more) if counted[name]}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="decode_ops.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="of the batch (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the JSON object there as well")
    given = parser.parse_args(arguments)
    if given.rows < 1:
        parser.error("--rows takes a number from 1 up")
    found = counts(ours, given.rows)
    result = {
        "what": "operations of a decoding step with a static cache, each operator of ours as one",
        "where": "counted on a CPU under Triton's interpreter; not run on a GPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": given.rows,
        "zaya_hf": found,
        "transformers": {experts: counts(lambda n, e=experts: stock(n, e), given.rows) for experts in EXPERTS},
        "target": TARGET,
        "met": found["per_layer"] <= TARGET,
    }
    print(json.dumps(result, indent=1))
    if given.output is not None:
        write_json(given.output, result)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
