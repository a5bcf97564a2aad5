"""Loading a model to be evaluated: counts, ids, lengths, defaults that must not leak, and what is refused."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import model_folders
from model_folders import BOS, EOS, TEMPLATE, edit
from original_checkpoints import original_config, original_tensors
from zaya_hf import ZayaForCausalLM
from zaya_hf.evaluation import loading, prompt_checks
from zaya_hf.evaluation.loading import LoadedModel, load
from zaya_hf.evaluation.models import ModelSpec, resolve
from zaya_hf.evaluation.parameter_counts import count_parameters

FAMILIES = ("zaya", "qwen3", "gemma3", "llama", "olmoe")
TALK = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a family's tiny model, which must not be changed."""
    base = tmp_path_factory.mktemp("saved")

    def folder(family: str) -> Path:
        path = base / family
        return path if path.is_dir() else model_folders.save(path, family)

    return folder


@pytest.fixture
def folder(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A Llama folder of the test's own."""
    copy = tmp_path / "llama"
    shutil.copytree(saved("llama"), copy)
    return copy


def spec(path: Path, **changes: Any) -> ModelSpec:
    (found,) = resolve([str(path)])
    return replace(found, **changes)


class TestFacts:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_loads_ready_to_be_scored(self, saved: Callable[[str], Path], family: str) -> None:
        loaded = load(spec(saved(family)))
        model, facts = loaded.model, loaded.facts
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert model.config.use_cache is False
        assert facts["architecture"] == type(model).__name__ == type(model_folders.model(family)).__name__
        assert (facts["name"], facts["path"], facts["revision"], facts["commit"]) == (
            family,
            str(saved(family)),
            None,
            None,
        )
        assert (facts["dtype"], facts["max_length"], facts["vocab_size"]) == ("float32", 256, 300)
        assert facts["bos"]["id"] == BOS
        assert json.loads(json.dumps(facts, allow_nan=False)) == facts
        assert facts["shape"] == asdict(loading.shape(spec(saved(family))) or pytest.fail("no shape"))
        assert facts["shape"]["parameters"] == facts["parameters"]
        assert facts["shape"]["layers"] == model.config.num_hidden_layers
        expected = model_folders.model(family).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    def test_the_dtype_is_the_one_asked_for(self, saved: Callable[[str], Path]) -> None:
        loaded = load(spec(saved("llama"), dtype="bfloat16"))
        assert loaded.model.dtype == torch.bfloat16
        assert loaded.facts["dtype"] == "bfloat16"

    def test_what_is_asked_for_is_in_the_facts(self, saved: Callable[[str], Path]) -> None:
        reported = {"mmlu": {"metric": "acc", "value": 0.5, "source": "a paper"}}
        facts = load(spec(saved("llama"), gate="a note", licence="mit", reported=reported, title="T")).facts
        assert (facts["gate"], facts["licence"], facts["reported"], facts["title"]) == ("a note", "mit", reported, "T")


class TestCounts:
    """By hand from the shapes: 300 rows, width 16, two layers, two heads of 8, one key-value head."""

    EMBEDDING = 300 * 16
    ATTENTION = 16 * 16 + 2 * 8 * 16 + 16 * 16  # q, k and v, o
    NORMS = 2 * 2 * 16 + 16
    DENSE = 3 * 16 * 24

    def test_tied_weights_count_once(self) -> None:
        counts = count_parameters(model_folders.model("qwen3"))
        qk_norms = 2 * 2 * 8
        layers = 2 * (self.ATTENTION + self.DENSE) + self.NORMS + qk_norms
        assert (counts.total, counts.active) == (self.EMBEDDING + layers,) * 2
        assert (counts.without_embedding, counts.active_without_embedding) == (layers, layers)

    def test_untied_heads_count(self) -> None:
        counts = count_parameters(model_folders.model("llama"))
        layers = 2 * (self.ATTENTION + self.DENSE) + self.NORMS
        assert (counts.total, counts.without_embedding) == (2 * self.EMBEDDING + layers, layers)

    @pytest.mark.parametrize(
        ("family", "experts", "used", "width", "layers"),
        [("olmoe", 8, 2, 24, 2), ("mixtral", 4, 2, 24, 2), ("qwen3_moe", 4, 2, 8, 1), ("zaya", None, 1, None, 2)],
    )
    def test_of_the_experts_a_token_uses_some(
        self, family: str, experts: int | None, used: int, width: int | None, layers: int
    ) -> None:
        """`qwen3_moe` has a dense layer, too."""
        model = model_folders.model(family)
        config: Any = model.config
        if family == "zaya":
            experts, width = config.num_experts, config.moe_intermediate_size
            layers = config.num_hidden_layers
        assert experts is not None
        assert width is not None
        counts = count_parameters(model)
        assert counts.active is not None
        assert counts.total == sum(parameter.numel() for parameter in model.parameters())
        assert counts.total - counts.active == layers * (experts - used) * 3 * config.hidden_size * width

    def test_lists_of_experts_and_a_top_k_of_the_router(self) -> None:
        """As in code outside transformers: a ModuleList, and a config that says nothing."""
        model = model_folders.model("llama")
        copied = copy.deepcopy(model)
        block = torch.nn.Module()
        block.experts = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(5)])
        copied.model.layers[0].mlp = block
        assert count_parameters(copied).active is None  # rather than a wrong number
        block.top_k = 2
        counts = count_parameters(copied)
        assert counts.active == counts.total - 3 * (16 * 16 + 16)

    def test_a_multimodal_wrapper_counts_its_text_part(self, saved: Callable[[str], Path]) -> None:
        facts = load(spec(saved("gemma3_vision"))).facts
        text = count_parameters(model_folders.model("gemma3"))
        assert facts["architecture"] == "Gemma3ForConditionalGeneration"
        assert (facts["family"], facts["max_length"]) == ("gemma3_text", 256)
        assert (facts["parameters"], facts["parameters_active"]) == (text.total, text.total)
        assert facts["parameters_without_embedding"] == text.without_embedding
        assert facts["tied_embeddings"] is True
        whole = sum(parameter.numel() for parameter in model_folders.model("gemma3_vision").parameters())
        assert facts["parameters_outside_text"] == whole - text.total > 0


class TestGenerationConfig:
    def test_nothing_of_it_leaks(self, folder: Path) -> None:
        edit(
            folder / "generation_config.json",
            max_new_tokens=8,
            repetition_penalty=1.5,
            do_sample=True,
            temperature=0.6,
            eos_token_id=[1, 106],
            suppress_tokens=[5],
        )
        loaded = load(spec(folder))
        kept = loaded.model.generation_config.to_diff_dict()
        del kept["transformers_version"]
        assert kept == {"bos_token_id": BOS, "eos_token_id": [1, 106], "pad_token_id": 0}
        found = loaded.facts["generation_config"]
        assert (found["max_new_tokens"], found["repetition_penalty"], found["temperature"]) == (8, 1.5, 0.6)
        dropped = ["do_sample", "max_new_tokens", "repetition_penalty", "suppress_tokens", "temperature"]
        assert loaded.facts["generation_config_dropped"] == dropped
        ids = torch.tensor([[BOS, 40, 50, 60]])
        text = loaded.model.generate(ids, max_new_tokens=24, min_new_tokens=24)
        assert text.shape == (1, 4 + 24)

    def test_penalties_in_the_config_itself_do_not_leak_either(self, folder: Path) -> None:
        plain = load(spec(folder)).model
        edit(folder / "config.json", repetition_penalty=9.0, max_length=6)
        (folder / "generation_config.json").unlink()
        loaded = load(spec(folder)).model
        ids = torch.tensor([[BOS, 40, 50, 60]])
        texts = [
            model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False) for model in (plain, loaded)
        ]
        assert torch.equal(*texts)

    def test_ids_come_from_config_and_tokenizer_where_it_has_none(self, folder: Path) -> None:
        (folder / "generation_config.json").unlink()
        edit(folder / "config.json", eos_token_id=None, pad_token_id=None)
        config = load(spec(folder)).model.generation_config
        assert config is not None
        assert config.eos_token_id in (EOS, 2)  # transformers' default for Llama is 2
        assert config.pad_token_id == 0

    def test_a_tokenizer_without_pad_gets_one(self, folder: Path) -> None:
        edit(folder / "tokenizer_config.json", pad_token=None)
        edit(folder / "config.json", pad_token_id=None)
        (folder / "generation_config.json").unlink()
        loaded = load(spec(folder))
        assert loaded.tokenizer.pad_token_id == EOS
        assert loaded.model.generation_config is not None
        assert loaded.model.generation_config.pad_token_id == EOS


def received(loaded: LoadedModel, text: str) -> list[int]:
    """The ids that lm-eval's scorer gives the model."""
    scorer = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, max_length=64)
    ids: list[int] = scorer.tok_encode(text)
    assert prompt_checks.encode(loaded.tokenizer, text) == ids
    return ids


class TestBos:
    """Case 33 of a Gemma-style tokenizer: one BOS, whoever writes it."""

    @pytest.mark.parametrize("family", ["zaya", "gemma3"])
    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_prompts_begin_with_exactly_one(self, tmp_path: Path, family: str, adds_bos: bool) -> None:
        folder = model_folders.save(tmp_path / family, family, adds_bos=adds_bos)
        loaded = load(spec(folder, chat_template=True))
        assert loaded.facts["bos"]["setting"] == "required"
        scorer = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1, max_length=64)
        prompts = ["a", "Question: one?\nAnswer:", *(scorer.apply_chat_template(talk) for talk in (TALK[:1], TALK))]
        for prompt in prompts:
            ids = received(loaded, prompt)
            assert ids[0] == BOS
            assert ids.count(BOS) == 1
            context, continuation = scorer._encode_pair(prompt, " two")
            assert context == ids[: len(context)]  # without the space at the end, which goes to the continuation
            assert BOS not in continuation
        checked = loaded.facts["bos"]["checked_ids"]
        assert [ids[0] for kind, ids in checked.items() if kind != "continuation"] == [BOS] * 3
        assert BOS not in checked["continuation"]

    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_a_template_that_writes_none_gets_one_in_front(self, tmp_path: Path, adds_bos: bool) -> None:
        template = TEMPLATE.removeprefix("{{ bos_token }}")
        folder = model_folders.save(tmp_path / "gemma", "gemma3", template=template, adds_bos=adds_bos)
        ids = load(spec(folder, chat_template=True)).facts["bos"]["checked_ids"]["few_shot_chat"]
        assert (ids[0], ids.count(BOS)) == (BOS, 1)

    def test_both_models_of_a_comparison_are_asked_alike(self, tmp_path: Path) -> None:
        """The setting is in the results, and so are the ids."""
        facts = [
            load(spec(model_folders.save(tmp_path / family, family, adds_bos=adds), chat_template=True)).facts["bos"]
            for family, adds in (("zaya", True), ("gemma3", False))
        ]
        assert facts[0] == facts[1]

    def test_a_hub_id_that_is_not_ours_is_asked_like_its_family(self, tmp_path: Path) -> None:
        """Its config is not known before it is loaded."""
        path = str(model_folders.save(tmp_path / "gemma", "gemma3", adds_bos=False))
        facts = load(ModelSpec("gemma", "gemma", path)).facts["bos"]
        assert (facts["setting"], facts["checked_ids"]["prompt"][0]) == ("required", BOS)

    def test_none_means_none(self, folder: Path) -> None:
        loaded = load(spec(folder, bos="none"))
        assert loaded.facts["bos"]["checked_ids"]["prompt"][0] != BOS
        assert BOS not in received(loaded, "a")
        with pytest.raises(
            ValueError, match=r"llama: a chat prompt begins with BOS \(2\), though the setting is bos: none"
        ):
            load(spec(folder, bos="none", chat_template=True))

    @pytest.mark.parametrize("adds_bos", [True, False])
    def test_the_tokenizer_may_decide(self, tmp_path: Path, adds_bos: bool) -> None:
        loaded = load(spec(model_folders.save(tmp_path / "a", adds_bos=adds_bos)))
        assert (received(loaded, "a")[0] == BOS) is adds_bos

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            (
                "{{ bos_token }}" + TEMPLATE,
                r"gemma: a chat prompt has 2 BOS \(2\), not one: .* in the chat template\?$",
            ),
            ("\n" + TEMPLATE, r"gemma: a chat prompt has 2 BOS \(2\)"),
            (
                "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}",
                r"gemma: a few-shot-chat prompt has 3 BOS",
            ),
            (
                "{{ raise_exception('no') }}",
                "gemma: the chat template fails on a conversation of user and assistant: no",
            ),
            (None, "gemma: the tokenizer has no chat template"),
        ],
    )
    def test_templates_that_cannot_be_used(self, tmp_path: Path, template: str | None, said: str) -> None:
        folder = model_folders.save(tmp_path / "gemma", "gemma3", template=template)
        with pytest.raises(ValueError, match=said):
            load(spec(folder, chat_template=True))
        load(spec(folder))  # without the template nothing is wrong

    def test_a_required_bos_must_exist_and_be_the_models(self, folder: Path) -> None:
        edit(folder / "config.json", bos_token_id=7)
        with pytest.raises(ValueError, match="the model's bos_token_id is 7, the tokenizer's is 2"):
            load(spec(folder, bos="required"))
        edit(folder / "config.json", bos_token_id=2)
        tokenizer = model_folders.tokenizer(None, adds_bos=False)
        tokenizer.bos_token = None
        tokenizer.save_pretrained(folder)
        edit(folder / "tokenizer_config.json", bos_token=None)
        with pytest.raises(ValueError, match="bos is required, but the tokenizer has no bos_token"):
            load(spec(folder, bos="required"))

    def test_a_bos_that_also_ends_turns_may_come_again(self) -> None:
        """As in tokenizers with one token for both, where a template writes it after every turn."""
        tokenizer = model_folders.tokenizer("{{ bos_token }}{% for m in messages %}{{ m['content'] }}<bos>{% endfor %}")
        tokenizer.eos_token = "<bos>"
        found = prompt_checks.check_bos(tokenizer, "required", chat_template=True, name="a")
        assert found["checked_ids"]["chat"][0] == BOS

    def test_a_tokenizer_without_bos_may_use_it_for_turns(self) -> None:
        """SmolLM2's way: its <|im_start|> is the BOS, and begins every turn."""
        template = "{% for m in messages %}<bos>{{ m['content'] }}{% endfor %}"
        tokenizer = model_folders.tokenizer(template, adds_bos=False)
        found = prompt_checks.check_bos(tokenizer, "tokenizer", chat_template=True, name="a")
        assert found["checked_ids"]["few_shot_chat"][0] == BOS
        assert found["checked_ids"]["prompt"][0] != BOS

    def test_a_tokenizer_that_ends_texts_is_refused(self) -> None:
        """Each prompt would say that the text is over."""
        tokenizer = model_folders.tokenizer(adds_bos=False)
        tokenizer.add_eos_token = True
        with pytest.raises(ValueError, match=r"a: the tokenizer ends every text with EOS \(1\)"):
            prompt_checks.check_bos(tokenizer, "tokenizer", chat_template=False, name="a")


class TestThinking:
    def test_the_marks_are_checked_and_kept_with_their_ids(self, folder: Path) -> None:
        rule = {"start": "<think>", "end": "</think>"}
        facts = load(spec(folder, chat_template=True, thinking=rule)).facts
        assert facts["thinking"] == rule | {"start_ids": [3], "end_ids": [4]}
        assert facts["chat_template"]["used"] is True

    def test_marks_that_cannot_be_written_are_refused(self) -> None:
        class Lossy(PreTrainedTokenizerFast):
            def decode(self, *_: Any, **__: Any) -> str:
                return ""

        tokenizer = Lossy(tokenizer_object=model_folders.tokenizer().backend_tokenizer)
        with pytest.raises(ValueError, match=r"a: thinking.start is '<think>', which the tokenizer cannot write"):
            prompt_checks.thinking_facts(tokenizer, {"start": "<think>", "end": "</think>"}, "a")

    @pytest.mark.parametrize("rule", [{"start": "<think>", "end": ""}, {"start": "<think>"}])
    def test_a_rule_without_an_end_is_refused(self, rule: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"a: thinking.end is .*; expected text that is not empty"):
            prompt_checks.thinking_facts(model_folders.tokenizer(), rule, "a")


class TestMaxLength:
    def test_a_tokenizer_without_a_limit_sets_none(self, folder: Path) -> None:
        """Case 35: 1e30 in the tokenizer, 256 positions in the model."""
        loaded = load(spec(folder))
        assert loaded.tokenizer.model_max_length > 1e29
        assert loaded.facts["max_length"] == 256

    def test_a_default_gives_way_where_the_config_was_not_known(self, folder: Path) -> None:
        assert load(spec(folder, max_length=4096)).facts["max_length"] == 256

    def test_what_is_asked_for_must_fit(self, folder: Path) -> None:
        assert load(spec(folder, max_length=200, max_length_asked=True)).facts["max_length"] == 200
        with pytest.raises(ValueError, match=r"^llama: max_length is 257, but the model has 256 positions$"):
            load(spec(folder, max_length=257, max_length_asked=True))


class TestLayouts:
    @pytest.mark.parametrize("model_type", ["zaya", "smoe"])
    def test_an_original_folder_loads_through_our_class(self, tmp_path: Path, model_type: str) -> None:
        model: Any = model_folders.model("zaya")
        dialect = "C" if model_type == "smoe" else "B"
        folder = tmp_path / "original"
        model_folders.tokenizer().save_pretrained(folder)
        save_file(original_tensors(model, dialect), folder / "model.safetensors", metadata={"format": "pt"})
        config = original_config(model.config, dialect) | {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
        (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "rope_scaling": False}))
        loaded = load(spec(folder))
        assert type(loaded.model) is ZayaForCausalLM
        assert loaded.facts["parameters"] == count_parameters(model).total
        ids = torch.tensor([[2, 40, 50, 60, 70]])
        with torch.no_grad():
            torch.testing.assert_close(loaded.model(ids).logits, model.eval()(ids).logits, atol=1e-5, rtol=1e-5)


class TestRefused:
    def test_missing_weights_are_no_noise(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"llama: it has no weights for lm_head.weight, which would be random"):
            load(spec(folder))

    def test_a_tokenizer_of_another_model(self, folder: Path) -> None:
        tokenizer = model_folders.tokenizer()
        tokenizer.add_tokens([f"<word {number}>" for number in range(40)])
        tokenizer.save_pretrained(folder)
        with pytest.raises(ValueError, match="llama: the tokenizer has ids up to 300, but the embedding has 300 rows"):
            load(spec(folder))

    def test_no_tokenizer(self, folder: Path) -> None:
        for file in folder.glob("tokenizer*"):
            file.unlink()
        with pytest.raises(ValueError, match=r"^no tokenizer in .*llama: put the model's tokenizer.json"):
            load(spec(folder))

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"model_type": "vit"}, "is of the type vit, which is no causal language model"),
            (
                {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
                "holds a BertForMaskedLM, which is no causal language model",
            ),
            ({"architectures": ["LlamaForSequenceClassification"]}, "holds a LlamaForSequenceClassification"),
            ({"model_type": "t5"}, "is of the type t5, which is no causal language model"),
            ({"model_type": "zzz"}, "llama: .*zzz"),
            ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantised: evaluate the checkpoint"),
            ({"model_type": "zaya"}, "ZayaConfig|zaya"),
        ],
    )
    def test_configs_of_something_else(self, folder: Path, changes: dict[str, Any], said: str) -> None:
        edit(folder / "config.json", **changes)
        with pytest.raises(ValueError, match=said) as error:
            load(spec(folder, bos="tokenizer"))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 700

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("/nowhere/model", "^there is no folder /nowhere/model, and a Hub id has the form org/name$"),
            ("org/model.gguf", "GGUF files are not supported"),
            (
                "org/absent",
                "^org/absent is no folder and not in the local cache, and the Hub is off .*`hf download org/abs",
            ),
        ],
    )
    def test_places_without_a_model(self, path: str, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            load(ModelSpec("a", "a", path))

    def test_a_folder_of_gguf_files(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").touch()
        with pytest.raises(ValueError, match="holds GGUF files only; load the safetensors checkpoint"):
            load(ModelSpec("a", "a", str(tmp_path)))

    def test_damaged_weights_are_one_line(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
        with pytest.raises(ValueError, match="llama: ") as error:
            load(spec(folder))
        assert "\n" not in str(error.value)

    def test_no_such_device(self, saved: Callable[[str], Path]) -> None:
        with pytest.raises(ValueError, match=r"^device is 'gpu': "):
            load(spec(saved("llama")), device="gpu")


def test_shapes_of_the_hub_come_from_the_table() -> None:
    known, unknown = resolve(["zaya1-base", "org/absent"])
    assert loading.shape(known) == known.shape is not None
    assert loading.shape(unknown) is None
