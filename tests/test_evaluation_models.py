"""Which model a name means: `eval/models.yaml`, folders, Hub ids, a quickstart's output."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from transformers import Gemma3TextConfig, LlamaConfig, OlmoeConfig, PreTrainedConfig, Qwen3Config

from model_folders import edit
from quickstart_results import make_results
from zaya_hf import ZayaConfig
from zaya_hf.evaluation.models import BOS_RULES, DTYPES, ModelSpec, Shape, read_entry, registry, resolve
from zaya_hf.evaluation.parameter_counts import shape_of_config
from zaya_hf.quickstart import jobs, output
from zaya_hf.resources import resource


def folder(path: Path, **config: Any) -> Path:
    """A folder with a config, which is all that resolving looks at."""
    path.mkdir(parents=True, exist_ok=True)
    edit(path / "config.json", **{"model_type": "llama", "max_position_embeddings": 256, **config})
    return path


def one(text: str | Path, **overrides: Any) -> ModelSpec:
    (spec,) = resolve([str(text)], **overrides)
    return spec


class TestRegistry:
    def test_the_seven_models_of_the_comparison(self) -> None:
        assert {name: spec.path for name, spec in registry().items()} == {
            "zaya1-base": "Zyphra/ZAYA1-base",
            "zaya1-reasoning-base": "Zyphra/ZAYA1-reasoning-base",
            "zaya1-8b": "Zyphra/ZAYA1-8B",
            "qwen3-4b-base": "Qwen/Qwen3-4B-Base",
            "gemma3-12b-pt": "google/gemma-3-12b-pt",
            "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
            "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924",
        }
        for spec in registry().values():
            assert spec.dtype == "bfloat16"
            assert spec.max_length == 4096
            assert spec.licence
        assert {name for name, spec in registry().items() if spec.bos == "required"} == {
            *("zaya1-base", "zaya1-reasoning-base", "zaya1-8b", "gemma3-12b-pt", "llama-3-8b")
        }
        assert [name for name, spec in registry().items() if spec.chat_template] == ["zaya1-8b"]

    def test_gated_ones_say_what_to_do(self) -> None:
        gated = {name: spec for name, spec in registry().items() if spec.gate}
        assert set(gated) == {"gemma3-12b-pt", "llama-3-8b"}
        for spec in gated.values():
            assert f"https://huggingface.co/{spec.path}" in str(spec.gate)
            assert "HF_TOKEN" in str(spec.gate)

    @pytest.mark.parametrize(
        ("name", "config"),
        [
            ("zaya1-base", ZayaConfig()),
            (
                "qwen3-4b-base",
                Qwen3Config(
                    hidden_size=2560,
                    num_hidden_layers=36,
                    num_attention_heads=32,
                    num_key_value_heads=8,
                    head_dim=128,
                    intermediate_size=9728,
                    vocab_size=151936,
                    tie_word_embeddings=True,
                ),
            ),
            (
                "gemma3-12b-pt",
                Gemma3TextConfig(
                    hidden_size=3840,
                    num_hidden_layers=48,
                    num_attention_heads=16,
                    num_key_value_heads=8,
                    head_dim=256,
                    intermediate_size=15360,
                    vocab_size=262208,
                ),
            ),
            (
                "llama-3-8b",
                LlamaConfig(
                    hidden_size=4096,
                    num_hidden_layers=32,
                    num_attention_heads=32,
                    num_key_value_heads=8,
                    intermediate_size=14336,
                    vocab_size=128256,
                ),
            ),
            (
                "olmoe-1b-7b",
                OlmoeConfig(
                    hidden_size=2048,
                    intermediate_size=1024,
                    num_hidden_layers=16,
                    num_attention_heads=16,
                    num_key_value_heads=16,
                    num_experts=64,
                    num_experts_per_tok=8,
                    vocab_size=50304,
                ),
            ),
        ],
    )
    def test_the_shapes_are_those_of_the_published_configs(self, name: str, config: PreTrainedConfig) -> None:
        assert registry()[name].shape == shape_of_config(config)

    def test_the_counts_are_the_ones_that_the_authors_name(self) -> None:
        """8.3 B without the embedding; 0.76 B of them active; OLMoE 6.9 B, 1.3 B active."""
        zaya, olmoe = (registry()[name].shape for name in ("zaya1-base", "olmoe-1b-7b"))
        assert zaya is not None
        assert olmoe is not None
        assert round(zaya.parameters_without_embedding / 1e9, 1) == 8.3
        embedding = zaya.parameters - zaya.parameters_without_embedding
        assert zaya.parameters_active is not None
        assert round((zaya.parameters_active - embedding) / 1e9, 2) == 0.75
        assert (round(olmoe.parameters / 1e9, 1), round((olmoe.parameters_active or 0) / 1e9, 1)) == (6.9, 1.3)

    def test_no_name_is_there_twice(self) -> None:
        """YAML readers silently take the last one."""
        text = resource("eval", "models.yaml").read_text(encoding="utf-8")
        names = [line.rstrip(":") for line in text.splitlines() if line[:1].isalnum()]
        assert names == list(registry())
        assert list(yaml.safe_load(text)) == names


class TestEntry:
    RIGHT: ClassVar[dict[str, Any]] = {"title": "A", "path": "org/a"}

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"dytpe": "float32"}, r"^f: a has an unknown key dytpe; did you mean dtype\?$"),
            ({"dtype": "fp16"}, r"^f: a.dtype is 'fp16'; expected one of auto, float32, bfloat16, float16$"),
            ({"bos": True}, r"^f: a.bos is True; expected one of required, none, tokenizer$"),
            ({"max_length": True}, r"a.max_length is True; expected a whole number"),
            ({"max_length": 0}, r"a.max_length is 0; expected a whole number"),
            ({"revision": 123}, r"a.revision is 123; expected text in quotes, or null"),
            ({"chat_template": "yes"}, r"a.chat_template is 'yes'; expected true or false"),
            ({"thinking": {"end": "x"}, "chat_template": True}, r"a.thinking is .* expected start and end, both text"),
            ({"thinking": {"start": "<", "end": ""}, "chat_template": True}, r"expected start and end, both text"),
            ({"thinking": {"start": "<", "end": ">"}}, r"a has thinking, but chat_template is false"),
            (
                {"reported": {"t": {"metric": "acc", "value": 0.5}}},
                r"a.reported.t is .* expected metric, value and source",
            ),
            ({"reported": {"t": {"metric": "acc", "value": 71.0, "source": "s"}}}, r"value is 71.0; expected a share"),
            ({"shape": {"layers": 3}}, r"a.shape: expected head_dim, hidden_size, .* each a whole number"),
            ({"title": None}, r"a.title is None; expected text"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line(self, changes: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            read_entry("a", self.RIGHT | changes, "f")

    @pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", 3])
    def test_names_are_names_of_folders(self, name: Any) -> None:
        with pytest.raises(ValueError, match="cannot be the name of a model"):
            read_entry(name, self.RIGHT, "f")

    def test_missing_and_foreign_sections(self) -> None:
        with pytest.raises(ValueError, match=r"^f: a.path is missing$"):
            read_entry("a", {"title": "A"}, "f")
        with pytest.raises(ValueError, match=r"^f: a is \[\]; expected a section"):
            read_entry("a", [], "f")

    def test_the_defaults_are_those_of_the_class(self) -> None:
        assert read_entry("a", self.RIGHT, "f") == ModelSpec("a", "A", "org/a")
        assert ModelSpec("a", "A", "org/a").dtype in DTYPES
        assert ModelSpec("a", "A", "org/a").bos in BOS_RULES


class TestNames:
    def test_a_known_name_and_its_hub_id_are_one_model(self) -> None:
        assert one("zaya1-base") == one("zyphra/zaya1-base") == registry()["zaya1-base"]

    def test_another_hub_id(self) -> None:
        assert one("org/Some.Model_1") == ModelSpec("Some.Model_1", "org/Some.Model_1", "org/Some.Model_1")

    def test_a_revision_makes_another_model(self) -> None:
        first, second = resolve(["olmoe-1b-7b", "olmoe-1b-7b@step1000-tokens4B"])
        assert (second.name, second.revision) == ("olmoe-1b-7b-step1000-tokens4B", "step1000-tokens4B")
        assert replace(second, name=first.name, title=first.title, revision=None) == first
        assert one("org/a@refs/pr/1").name == "a-refs-pr-1"

    def test_a_folder_says_what_it_is(self, tmp_path: Path) -> None:
        spec = one(folder(tmp_path / "my run 3"))
        assert (spec.name, spec.family, spec.dtype, spec.bos) == ("my-run-3", "llama", "auto", "tokenizer")
        assert (spec.max_length, spec.chat_template, spec.is_folder) == (256, False, True)

    @pytest.mark.parametrize(
        ("config", "bos"),
        [
            ({"model_type": "gemma3_text", "bos_token_id": 2, "eos_token_id": 1}, "required"),
            (
                {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "eos_token_id": [1, 106]}},
                "required",
            ),
            ({"model_type": "zaya", "bos_token_id": 2, "eos_token_id": 106}, "required"),
            ({"model_type": "zaya", "bos_token_id": 1, "eos_token_id": 1}, "tokenizer"),
            ({"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}, "tokenizer"),
        ],
    )
    def test_families_that_need_a_bos_get_one(self, tmp_path: Path, config: dict[str, Any], bos: str) -> None:
        assert one(folder(tmp_path / "a", **config)).bos == bos

    def test_the_text_part_of_a_wrapper_decides(self, tmp_path: Path) -> None:
        text = {"model_type": "gemma3_text", "max_position_embeddings": 512}
        spec = one(folder(tmp_path / "a", model_type="gemma3", text_config=text, max_position_embeddings=77))
        assert (spec.family, spec.max_length) == ("gemma3_text", 512)

    def test_more_positions_than_the_common_length_are_not_used(self, tmp_path: Path) -> None:
        assert one(folder(tmp_path / "a", max_position_embeddings=131072)).max_length == 4096

    def test_folders_whose_name_says_nothing_are_called_after_the_one_around(self, tmp_path: Path) -> None:
        assert one(folder(tmp_path / "run7" / "final" / "model")).name == "run7"

    def test_a_name_can_be_given(self, tmp_path: Path) -> None:
        spec = one(f"mine={folder(tmp_path / 'a')}")
        assert (spec.name, spec.title, spec.path) == ("mine", "mine", str(tmp_path / "a"))
        assert one("mine=zaya1-8b").thinking == {"start": "<think>", "end": "</think>"}
        assert one(folder(tmp_path / "a=b")).path == str(tmp_path / "a=b")
        with pytest.raises(ValueError, match=r"'a b' cannot be a model's name"):
            resolve(["a b=zaya1-8b"])

    def test_two_models_never_have_one_name(self, tmp_path: Path) -> None:
        first, second = folder(tmp_path / "x" / "run"), folder(tmp_path / "y" / "run")
        with pytest.raises(
            ValueError, match=rf"^two models have the name run \({first} and {second}\): .*NAME={second}$"
        ):
            resolve([str(first), str(second)])
        with pytest.raises(ValueError, match="two models have the name zaya1-base"):
            resolve(["zaya1-base", "Zyphra/ZAYA1-base"])
        assert [spec.name for spec in resolve([str(first), f"other={second}"])] == ["run", "other"]

    def test_overrides_are_for_all(self, tmp_path: Path) -> None:
        for spec in resolve(["zaya1-8b", str(folder(tmp_path / "a"))], dtype="float32", max_length=99):
            assert (spec.dtype, spec.max_length, spec.max_length_asked) == ("float32", 99, True)

    def test_without_the_chat_template_there_is_no_thinking(self) -> None:
        spec = one("zaya1-8b", chat_template=False)
        assert (spec.chat_template, spec.thinking) == (False, None)
        assert one("zaya1-8b", chat_template=True) == registry()["zaya1-8b"]

    def test_settings_are_json_and_hold_what_moves_a_score(self) -> None:
        spec = registry()["zaya1-8b"]
        assert json.loads(json.dumps(spec.settings())) == {
            "dtype": "bfloat16",
            "bos": "required",
            "max_length": 4096,
            "chat_template": True,
            "thinking": {"start": "<think>", "end": "</think>"},
        }

    @pytest.mark.parametrize(
        ("names", "overrides", "said"),
        [
            ([], {}, "^no model is given; there are zaya1-base, "),
            (["zaya1-bse"], {}, r"^unknown model 'zaya1-bse'; did you mean zaya1-base\?$"),
            (
                ["xyz"],
                {},
                "^unknown model 'xyz'; known are zaya1-base, .*; a folder or a Hub id org/name will do, too$",
            ),
            (["a/b/c"], {}, "^there is no folder a/b/c$"),
            (["a"], {"dtype": "float23"}, r"^dtype is 'float23'; expected one of .*; did you mean float32\?$"),
            (["a"], {"max_length": 1}, "^max_length is 1; expected a whole number of tokens above 1$"),
            (["a"], {"max_length": True}, "^max_length is True"),
            (["org/model.gguf"], {}, "GGUF files are not supported"),
        ],
    )
    def test_wrong_ones(self, names: list[str], overrides: dict[str, Any], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            resolve(names, **overrides)

    def test_a_mistyped_folder_is_no_hub_id(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder(tmp_path / "runs" / "quick")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match=r"^there is no folder runs/quik; did you mean quick\?$"):
            resolve(["runs/quik"])

    def test_folders_without_a_model(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        with pytest.raises(ValueError, match=r"a is empty$"):
            resolve([str(tmp_path / "a")])
        (tmp_path / "a" / "m.gguf").touch()
        with pytest.raises(ValueError, match="a holds GGUF files only"):
            resolve([str(tmp_path / "a")])
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "config.json").write_text("[]")
        with pytest.raises(ValueError, match=r"config\.json is not a model config"):
            resolve([str(tmp_path / "b")])
        with pytest.raises(ValueError, match="is a file; give the folder"):
            resolve([str(tmp_path / "b" / "config.json")])


class TestQuickstart:
    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        return self.make(tmp_path / "quickstart", (0,))

    def make(self, out: Path, seeds: tuple[int, ...]) -> Path:
        results = make_results(seeds=seeds)
        for model in results["models"]:
            for run in model["runs"]:
                folder(out / output.RUNS / f"{model['name']}-seed{run['seed']}" / jobs.MODEL)
        (out / "results.json").write_text(json.dumps(results))
        return out

    def test_its_folder_stands_for_all_its_models(self, out: Path) -> None:
        specs = resolve([str(out)])
        assert [(spec.name, spec.title) for spec in specs] == [
            ("zaya", "ZAYA1"),
            ("qwen3", "Qwen3"),
            ("gemma3", "Gemma 3"),
            ("llama", "Llama"),
            ("olmoe", "OLMoE"),
        ]
        assert all(spec.path == str(out / "runs" / f"{spec.name}-seed0" / "model") for spec in specs)

    def test_every_seed_is_a_model(self, tmp_path: Path) -> None:
        specs = resolve([str(self.make(tmp_path / "q", (0, 1)))])
        assert [spec.name for spec in specs][:3] == ["zaya-seed0", "zaya-seed1", "qwen3-seed0"]
        assert specs[1].title == "ZAYA1 (seed 1)"

    def test_its_models_can_be_given_one_by_one(self, out: Path) -> None:
        assert one(out / "runs" / "olmoe-seed0" / "model").name == "olmoe-seed0"

    def test_what_is_not_right_is_said(self, out: Path) -> None:
        with pytest.raises(ValueError, match="holds 5 models, which cannot share one name: leave mine= out"):
            resolve([f"mine={out}"])
        missing = out / "runs" / "llama-seed0" / "model"
        (missing / "config.json").unlink()
        missing.rmdir()
        with pytest.raises(ValueError, match=r"llama-seed0.model is missing, though .* run the quickstart again"):
            resolve([str(out)])
        edit(out / "results.json", models=[{}])
        with pytest.raises(ValueError, match="is of another version of zaya quickstart"):
            resolve([str(out)])
        (out / "results.json").unlink()
        (out / output._MARK).touch()
        with pytest.raises(ValueError, match="is a quickstart that has not finished"):
            resolve([str(out)])


def test_a_shape_is_json() -> None:
    assert Shape(**json.loads(json.dumps(asdict(registry()["zaya1-8b"].shape or 0)))) == registry()["zaya1-8b"].shape
