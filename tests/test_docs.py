"""The pages in docs/: their code runs, their links lead somewhere, and what they name exists."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, DynamicCache

import zaya_cli
import zaya_hf
from doc_examples import BEFORE, ROOT, published_folders, python_blocks, run_block
from zaya_hf.checkpoints import dialects, layouts
from zaya_hf.testing import tiny_config

PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
IN_ORDER = "<!-- The blocks of this page are run in order, in one namespace. -->"
SLOW = {"export.md"}  # traces the model five times
BLOCKS = [
    pytest.param(name, code, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, text in TEXTS.items()
    for code in (["\n".join(python_blocks(text))] if IN_ORDER in text else python_blocks(text))
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = published_folders(tmp_path_factory.mktemp("published"), TEXTS["migration.md"])
    return folders | {"runs/quickstart/hub/zaya": folders["Zyphra/ZAYA1-8B"]}


@pytest.mark.parametrize(("page", "code"), BLOCKS, ids=lambda value: value.replace("\n", " ")[:60])
def test_the_python_examples_run(
    page: str, code: str, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compile_to = torch.compile  # into what it traces: code generation takes minutes, and has tests of its own
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_to(*args, **options, backend="eager"))
    run_block(code, places, page)


def test_every_python_block_is_found() -> None:
    for name, text in TEXTS.items():
        assert len(python_blocks(text)) == text.count("```python"), name
    assert sum(block.values[1].startswith(BEFORE) for block in BLOCKS) >= 2


SHELL = [
    line
    for text in TEXTS.values()
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
    if "zaya " in line
]


@pytest.mark.parametrize("line", SHELL)
def test_the_parser_takes_every_command(line: str) -> None:
    words = shlex.split(line.split("|")[-1])
    assert words[0] == "zaya"
    arguments = zaya_cli.build_parser().parse_args(words[1:])
    assert arguments.command == words[1]


def test_the_page_of_the_command_line_has_every_command() -> None:
    for command in zaya_cli.COMMANDS:
        assert f"`zaya {command}`" in TEXTS["command-line.md"], command
    named = set(re.findall(r"--[a-z][a-z-]+", TEXTS["command-line.md"]))
    known = {"--model", "--tasks", "--confirm"}  # of lm-eval
    complete = [["train"], ["data", "build"], ["data", "show"], ["report"], ["bench", "kernels"], ["doctor"], ["eval"]]
    complete += [["eval", "data"], ["eval", "contamination"]]
    for words in [*([command] for command in zaya_cli.COMMANDS if command != "lm-eval"), *complete]:
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
            zaya_cli.build_parser().parse_args([*words, "--help"])
        options = set(re.findall(r"--[a-z][a-z-]+", printed.getvalue()))
        known |= options
        assert words not in complete or options <= named, words
    assert len(SHELL) >= 10
    assert named <= known


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = ROOT / "docs" / (file or name)
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("name", TEXTS)
def test_named_files_exist(name: str) -> None:
    for path in re.findall(r"`((?:benchmarks|docker|docs|src|tests)/[\w/.]+)`", TEXTS[name]):
        assert (ROOT / path).exists() or path in ("docs/api",), path


def test_the_tables_of_the_original_layout_are_complete() -> None:
    """Every field that a dialect is known by is in the migration page, and every name of a tensor."""
    page = TEXTS["migration.md"]
    for field in dialects._ORIGINAL_FIELDS:
        assert f"`{field}`" in page, field
    for key in (
        "model.layers.6.self_attn.qkv.linear_q.weight",
        "model.layers.6.self_attn.qkv.linear_k.weight",
        "model.layers.6.self_attn.qkv.val_proj1.weight",
        "model.layers.6.self_attn.qkv.val_proj2.weight",
        "model.layers.6.self_attn.qkv.conv_qk.0.bias",
        "model.layers.6.self_attn.qkv.conv_qk.1.weight",
        "model.layers.6.self_attn.qkv.temp",
        "model.layers.6.input_norm.weight",
        "model.layers.7.input_norm.weight",
        "model.layers.7.res_scale.residual_bias",
        "model.layers.6.res_scale.residual_scale",
        "model.layers.7.zaya_block.router.rmsnorm_eda.weight",
        "model.layers.7.zaya_block.router.router_mlp.4.weight",
    ):
        combined = layouts.original_key_to_combined(key, 40)
        assert combined is not None, key
        # The last part of the module's name, as the page's right column has it.
        module = combined.name.rsplit(".", 2)[-2 if key.endswith(("weight", "bias")) else -1]
        assert f".{module}`" in page or f"{module}`" in page, (key, combined.name)


# ------------------------------------------------------------------ what the migration page says about the two classes
STOCK, OURS = transformers.ZayaForCausalLM, zaya_hf.ZayaForCausalLM
IDS = torch.tensor([[2, 17, 42, 99, 5]])


@pytest.fixture(scope="module")
def pair(places: dict[str, Path]) -> tuple[Any, Any]:
    """The same folder in the stock class and in ours."""
    return tuple(cls.from_pretrained(places["Zyphra/ZAYA1-8B"]) for cls in (STOCK, OURS))


def outcome(call: Callable[[], Any]) -> str:
    """ "ok", "warning" or the kind of the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return type(error).__name__
    return "warning" if any("deprecated" in str(warning.message) for warning in caught) else "ok"


@pytest.mark.parametrize(
    ("call", "stock", "ours"),
    [
        (lambda m: m(IDS, padding_mask=torch.ones_like(IDS)), "ok", "TypeError"),
        (lambda m: m(IDS, is_causal=False), "ok", "ValueError"),
        (lambda m: m(IDS, past_key_values=DynamicCache(config=m.config)).past_key_values, "warning", "ok"),
        (
            lambda m: m.generate(IDS, past_key_values=DynamicCache(config=m.config), max_new_tokens=1),
            "warning",
            "ok",
        ),
        (lambda m: m(IDS, cache_position=torch.arange(5)), "ok", "ok"),
        (lambda m: m(IDS, cache=DynamicCache()), "IndexError", "ok"),
        (lambda m: m(torch.tensor([[500]])), "IndexError", "ValueError"),
        (lambda m: m.generate(IDS, max_new_tokens=2, prompt_lookup_num_tokens=2), "ValueError", "ok"),
        (lambda m: m.generate(IDS, max_new_tokens=2, cache_implementation="static"), "ok", "ok"),
        (lambda m: m.generate(IDS, max_new_tokens=2, cache_implementation="quantized"), "ValueError", "ValueError"),
        (lambda m: m.set_experts_implementation("grouped_mm"), "ok", "ok"),
    ],
)
def test_stated_behaviour(pair: tuple[Any, Any], call: Callable[[Any], Any], stock: str, ours: str) -> None:
    assert [outcome(lambda model=model: call(model)) for model in pair] == [stock, ours]


def test_stated_defaults(pair: tuple[Any, Any], places: dict[str, Path]) -> None:
    for cls in (STOCK, OURS):
        assert cls.from_pretrained(places["Zyphra/ZAYA1-8B"], torch_dtype=torch.bfloat16).dtype == torch.bfloat16
        assert not isinstance(pair[cls is STOCK], cls)
    fresh = [STOCK(transformers.ZayaConfig(**tiny_config().to_dict())), OURS(tiny_config())]
    assert [float(model.model.layers[0].self_attn.qk_norm.temp.detach().mean()) for model in fresh] == [0, 1]
    assert type(OURS(fresh[0].config).config) is zaya_hf.ZayaConfig
    experts = [cls.from_pretrained(places["Zyphra/ZAYA1-8B"]).config._experts_implementation for cls in (STOCK, OURS)]
    assert experts == ["grouped_mm", "zaya"]
    halves = [model.to(torch.bfloat16).model.layers[0].mlp.gate.balancing_biases.dtype for model in fresh]
    assert halves == [torch.bfloat16, torch.float32]


def test_stated_losses(places: dict[str, Path]) -> None:
    stock, ours = (cls.from_pretrained(places["Zyphra/ZAYA1-8B"]).train() for cls in (STOCK, OURS))
    none = torch.full_like(IDS, -100)
    assert stock(IDS, labels=none).loss.isnan()
    assert ours(IDS, labels=none).loss == 0
    assert ours(IDS, labels=IDS).logits is None
    ours.skip_logits = False
    assert ours(IDS, labels=IDS).logits.shape == stock(IDS, labels=IDS).logits.shape
    # Padding and the first real token are no targets here, unless shift_labels says so; in the stock class they are.
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    shifted = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=-100)
    for model, given in ((stock, {"labels": IDS}), (ours, {"shift_labels": shifted})):
        output = model(IDS, attention_mask=mask, **given)
        every = torch.nn.functional.cross_entropy(output.logits[0], shifted[0])
        torch.testing.assert_close(output.loss, every)
    only = IDS.masked_fill(torch.tensor([[True, True, True, False, False]]), -100)
    torch.testing.assert_close(
        ours(IDS, attention_mask=mask, labels=IDS).loss, stock(IDS, attention_mask=mask, labels=only).loss
    )
    for model in (stock, ours):
        model.activation_checkpointing_enable()
        assert model(IDS, labels=IDS).cache is None


def test_stated_loading(places: dict[str, Path], tmp_path: Path) -> None:
    published = places["Zyphra/ZAYA1-8B"]
    tensors = load_file(published / "model.safetensors")
    lacking = Path(shutil.copytree(published, tmp_path / "lacking"))
    gone = "model.layers.1.self_attn.o_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != gone}, lacking / "model.safetensors", metadata={"format": "pt"})
    STOCK.from_pretrained(lacking)
    with pytest.raises(ValueError, match=gone):
        OURS.from_pretrained(lacking)

    pickled = Path(shutil.copytree(published, tmp_path / "pickled"))
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    STOCK.from_pretrained(pickled)
    with pytest.raises(ValueError, match=r"safetensors\.torch\.save_file"):
        OURS.from_pretrained(pickled)

    other = Path(shutil.copytree(published, tmp_path / "other"))
    bias = "model.layers.0.mlp.gate.balancing_biases"
    save_file(tensors | {bias: tensors[bias] + 0.5}, other / "model.safetensors", metadata={"format": "pt"})
    loaded = [cls.from_pretrained(other).model.layers[0].mlp.gate.balancing_biases[-1].item() for cls in (STOCK, OURS)]
    assert loaded == [-1, -0.5]

    with pytest.warns(UserWarning, match="newly initialised"):
        head = AutoModelForSequenceClassification.from_pretrained(published)
    assert type(head) is zaya_hf.ZayaForSequenceClassification
    for name in ("ZAYA1-base", "ZAYA1-8B-legacy"):
        with pytest.raises(Exception, match="rope_parameters"):
            STOCK.from_pretrained(places[f"Zyphra/{name}"])
