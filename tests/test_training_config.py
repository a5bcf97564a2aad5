"""Settings files of training: YAML as people write it, overrides, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from zaya_hf.training import settings_files, settings_yaml
from zaya_hf.training.config import TrainingConfig
from zaya_hf.training.settings_files import dump, load

BASE = """\
out: runs/x
steps: 10
model:
  config: {hidden_size: 64}
data:
  sources:
    - path: "{stdlib}/*.py"
  sequence_length: 32
batch: {rows: 4}
optimizer:
  lr: 6e-4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(BASE, encoding="utf-8")
    return path


def changed(file: Path, *overrides: str) -> TrainingConfig:
    return load(file, overrides)


def error(file: Path, *overrides: str) -> str:
    """The message, which is one line, without the folder."""
    with pytest.raises(ValueError) as caught:
        load(file, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text.replace(f"{file.parent}/", "")


class TestYaml:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("6e-4", 6e-4),
            ("1E3", 1000.0),
            ("-.5", -0.5),
            ("3.", 3.0),
            ("8_000_000", 8_000_000),
            ("1_000.5", 1000.5),
            ("010", 10),
            ("0x1F", 31),
            ("-3", -3),
            ("1:30", "1:30"),
            ("no", "no"),
            ("off", "off"),
            ("Yes", "Yes"),
            ("true", True),
            ("FALSE", False),
            ("null", None),
            ("~", None),
            ("", None),
            ("2026-01-01", "2026-01-01"),
            (".inf", float("inf")),
            ("1.2.3", "1.2.3"),
            ("e5", "e5"),
            ("=", "="),
            ("'6e-4'", "6e-4"),
            ("[1, x]", [1, "x"]),
            ("{a: {b: 1e1}}", {"a": {"b": 10.0}}),
        ],
    )
    def test_values_are_what_they_look_like(self, text: str, value: object) -> None:
        read = settings_yaml.read_value(text, "x")
        assert read == value
        assert type(read) is type(value)

    @pytest.mark.parametrize(
        "text", ["no", "On", "YES", "off", "1:30", "2026-01-01", "010", "0b1", "=", "<<", "6e-4", "y"]
    )
    def test_readers_of_yaml_1_1_find_what_was_written(self, text: str) -> None:
        assert yaml.safe_load(settings_yaml.write({"a": text, text: 6e-5})) == {"a": text, text: 6e-5}

    @pytest.mark.parametrize("text", ["[" * 3000, "[" * 3000 + "]" * 3000, "a: " + "{b: " * 3000 + "1" + "}" * 3000])
    def test_what_is_nested_too_deep_is_one_line(self, file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        assert error(file) == "a.yaml: no settings: YAML that is nested too deep"

    def test_what_is_written_is_read_back(self) -> None:
        texts = [
            "no",
            "1e3",
            "8_000",
            "~",
            "null",
            "",
            "2026-01-01",
            "010",
            "0x1F",
            "{stdlib}",
            "a: b",
            "# x",
            " y ",
            "é",
        ]
        values = {"texts": texts, "numbers": [1e-8, 6e-4, 3.0, 1e22, -2, 0.1], "truths": [True, None, {}]}
        assert settings_yaml.read(settings_yaml.write(values), "x").values == values

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("a: 1\nb: 2\na: 3\n", "x.yaml, line 3: a is there twice"),
            ("s:\n  a: 1\n  a: 2\n", "x.yaml, line 3: s.a is there twice"),
            ("- 1\n", "x.yaml holds no settings"),
            ("words\n", "x.yaml holds no settings"),
            ("a: [1\n", "x.yaml, line 2: no YAML"),
            ("a: 1\n\tb: 2\n", "x.yaml, line 2: no YAML"),
            ("a: 1\n---\nb: 2\n", "x.yaml, line 2: no YAML"),
            ("1: a\n", "x.yaml, line 1: a key has to be text"),
            ("a: {{b}: 1}\n", "x.yaml, line 1: a key has to be text"),
            ("a: !!int word\n", "x.yaml, line 1: "),
            ("a: &x [*x]\n", "x.yaml, line 1: an alias stands inside what it repeats"),
            ("a: !!python/object:os.system {}\n", "x.yaml, line 1: "),
        ],
    )
    def test_what_is_no_settings_file(self, text: str, said: str) -> None:
        with pytest.raises(ValueError) as caught:
            settings_yaml.read(text, "x.yaml")
        assert str(caught.value).startswith(said)


class TestLoad:
    def test_the_file_alone(self, file: Path) -> None:
        config = load(file)
        assert (config.out, config.steps, config.optimizer.lr) == ("runs/x", 10, 6e-4)
        assert config.data.sources[0].path == "{stdlib}/*.py"

    def test_a_dumped_config_is_the_same(self, file: Path, tmp_path: Path) -> None:
        start = "model={checkpoint: base, lora: {r: 4}}"
        config = changed(file, start, "ema_decay=0.9", "logging.project=no", "data.sources.1.path=1e3")
        again = tmp_path / "again.yaml"
        again.write_text(dump(config), encoding="utf-8")
        assert load(again) == config

    def test_an_override_within_a_section_that_is_null(self, file: Path) -> None:
        config = changed(file, "model={checkpoint: base}", "model.lora.r=8")
        assert config.model.lora is not None
        assert config.model.lora.r == 8

    def test_overrides(self, file: Path) -> None:
        config = changed(
            file,
            "optimizer.lr=1e-3",
            "schedule.name=wsd",
            "guard.spike_z=null",
            "data.sources.0.path=x",
            "data.sources.1={path: y, weight: 2}",
            "model.config.rope_parameters.hybrid.rope_theta=1e6",
            "optimizer.betas=[0.8, 0.9]",
            "tokens=1_000_000",
            "steps=null",
            "activation_checkpointing=true",
        )
        assert config.optimizer.lr == 1e-3
        assert config.optimizer.betas == (0.8, 0.9)
        assert config.schedule.name == "wsd"
        assert config.guard.spike_z is None
        assert [(source.path, source.weight) for source in config.data.sources] == [("x", 1.0), ("y", 2)]
        assert config.model.config == {"hidden_size": 64, "rope_parameters": {"hybrid": {"rope_theta": 1e6}}}
        assert (config.tokens, config.steps, config.activation_checkpointing) == (1_000_000, None, True)

    @pytest.mark.parametrize("value", ["{stdlib}/x", "12", "true", "a: b", "[", "'quoted'", "a=b"])
    def test_text_is_taken_as_it_is(self, file: Path, value: str) -> None:
        assert changed(file, f"data.sources.0.path={value}").data.sources[0].path == value.strip("'")

    def test_null_is_none_where_text_may_be_absent(self, file: Path) -> None:
        assert changed(file, "data.sources.0.name=1.0").data.sources[0].name == "1.0"
        assert changed(file, "data.sources.0.name=null").data.sources[0].name is None

    def test_a_phase_extends_another(self, file: Path, tmp_path: Path) -> None:
        folder = tmp_path / "phases"
        folder.mkdir()
        (folder / "b.yaml").write_text("extends: ../a.yaml\nout: runs/b\nmodel: {config: {num_hidden_layers: 2}}\n")
        third = folder / "c.yaml"
        third.write_text("extends: b.yaml\ndata:\n  sources:\n  - path: z\n")
        config = load(third)
        assert (config.out, config.steps) == ("runs/b", 10)
        assert config.model.config == {"hidden_size": 64, "num_hidden_layers": 2}
        assert [source.path for source in config.data.sources] == ["z"]
        file.write_text(BASE.replace("6e-4", "0"))
        with pytest.raises(ValueError, match=r"a\.yaml, line 11: optimizer\.lr is 0"):  # named where it stands
            load(third)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("extends: none.yaml", "c.yaml, line 1: extends none.yaml, but there is no file"),
            ("extends: 3", "c.yaml, line 1: extends is 3"),
            ("extends: c.yaml", "c.yaml extends itself"),
        ],
    )
    def test_wrong_bases(self, tmp_path: Path, text: str, said: str) -> None:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        assert error(file).startswith(said)

    def test_which_file(self, file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        assert settings_files.find("cpu-small").name == "cpu-small.yaml"
        Path("cpu-small").write_text(BASE)  # a file that is here comes first
        assert settings_files.find("cpu-small") == Path("cpu-small")
        assert "did you mean the recipe cpu-small?" in error(tmp_path / "cpu_small")
        assert "recipes of zaya_hf: anneal-4k, continue-8b, cpu-small" in error(tmp_path / "qqq.yaml")
        assert "is a folder; give a settings file" in error(tmp_path)
        (tmp_path / "bytes.yaml").write_bytes(b"a: \xff")
        assert "it is not UTF-8 text (byte 3)" in error(tmp_path / "bytes.yaml")


class TestMistakes:
    @pytest.mark.parametrize(
        ("override", "said"),
        [
            ("lr=1", "unknown key lr: did you mean optimizer.lr or balancing.lr?"),
            ("rows=1", "unknown key rows: did you mean batch.rows or evaluation.rows?"),
            ("optimizer.lrr=3", "unknown key optimizer.lrr: did you mean optimizer.lr?"),
            ("optimizer.rows=3", "unknown key optimizer.rows: did you mean batch.rows or evaluation.rows?"),
            ("weight_decy=1", "unknown key weight_decy: did you mean optimizer.weight_decay?"),
            ("data.source.0.path=x", "unknown key data.source: did you mean data.sources?"),
            ("data.sources.0.pth=x", "unknown key data.sources.0.pth: did you mean data.sources.0.path?"),
            ("model.lora.rank=8", "unknown key model.lora.rank: model.lora has r, alpha, attention"),
            ("optimizer.lr=0", "optimizer.lr is 0; expected a number above 0 (peak; of Muon's matrices)"),
            ("optimizer.lr=abc", "optimizer.lr is 'abc'; expected a number (peak"),
            ("optimizer.lr=.nan", "optimizer.lr is nan; expected a finite number"),
            ("optimizer.betas=[0.9, 1.0]", "optimizer.betas is 1.0; expected a number below 1"),
            ("seed=4294967296", "seed is 4294967296; expected a number below 4294967296"),
            (
                "data.sources.0.name=../../esc",
                "data.sources.0.name is '../../esc'; expected a name (in logs, reports and",
            ),
            (
                f"data.sources.{'1' * 5000}.path=a",
                "11111111111111111111... has 5,000 digits and is no number of an entry",
            ),
            ("optimizer.betas=[0.9]", "optimizer.betas is [0.9]; entry 1 is missing"),
            ("optimizer.betas=[0.9, x]", "optimizer.betas is 'x'; expected a number"),
            ("tokens=8e12", "tokens is 8000000000000.0; expected a whole number, written out: 8000000000000 ("),
            ("steps=1.5", "steps is 1.5; expected a whole number (optimizer steps"),
            ("data.sequence_length=true", "data.sequence_length is true; expected a whole number"),
            ("activation_checkpointing=yes", "activation_checkpointing is 'yes'; expected true or false"),
            (
                "schedule.name=wds",
                "schedule.name is 'wds'; expected one of cosine, linear, wsd, constant; did you mean wsd?",
            ),
            ("logging.trackers=[tensorbord]", "logging.trackers.0 is 'tensorbord'; expected one of tensorboard, wandb"),
            ("optimizer.ns_dtype=fp32", "optimizer.ns_dtype is 'fp32'; expected one of bfloat16, float32, null"),
            ("schedule=1", "schedule is 1; expected a section of keys and values"),
            ("optimizer=null", "optimizer is null; expected a section of keys and values"),
            ("data.sources=[]", "data.sources has 0 entries; expected at least 1"),
            ("data.sources=[{path: {stdlib}}]", 'expected text, in quotes where it has braces, e.g. "{stdlib}/*.py"'),
            ("data.sources=[{path: 3}]", "data.sources.0.path is 3; expected text, in quotes: '3'"),
            ("model.config=[1]", "model.config is [1]; expected a section of keys and values, or text"),
            ("data.sources.3.path=x", "data.sources is a list: 3 is not a number from 0 to 1"),
            ("data.sources.first.path=x", "data.sources is a list: 'first' is not a number from 0 to 1"),
            ("optimizer.lr.x=1", "optimizer.lr is 0.0006, which has no 'x' inside"),
            ("steps=", "steps has no value; write steps=null for none"),
            ("optimizer.lr=[1", "optimizer.lr, line 1: no YAML"),
            ("steps", "'steps' is no setting; expected key=value"),
            ("=3", "'=3' is no setting"),
            ("a..b=1", "'a..b' is no dotted key"),
            ("0.a=1", "'0.a' is no dotted key"),
        ],
    )
    def test_on_the_command_line(self, file: Path, override: str, said: str) -> None:
        assert error(file, override).startswith("command line: ")
        assert said in error(file, override)

    @pytest.mark.parametrize(
        ("before", "after", "said"),
        [
            (
                "  lr: 6e-4",
                "  lr: 6e-4\n  momentm: 0.9",
                "a.yaml, line 12: unknown key optimizer.momentm: did you mean optimizer.momentum?",
            ),
            ("  lr: 6e-4", "  lr: -1", "a.yaml, line 11: optimizer.lr is -1; expected a number above 0"),
            ("  sequence_length: 32\n", "", "a.yaml, line 5: data.sequence_length is missing: tokens per row"),
            ("out: runs/x\n", "", "a.yaml: out is missing: folder of the run"),
            ("steps: 10", "steps: 10\ntokens: 5", "a.yaml: give either steps or tokens"),
            ("hidden_size: 64}", "hidden_size: 64}\n  checkpoint: x", "a.yaml, line 3: model: give either config"),
            (
                '"{stdlib}/*.py"',
                "{stdlib}",
                "a.yaml, line 7: data.sources.0.path is {'stdlib': None}; expected text, in quotes",
            ),
        ],
    )
    def test_in_the_file(self, file: Path, before: str, after: str, said: str) -> None:
        assert before in BASE
        file.write_text(BASE.replace(before, after))
        assert error(file).startswith(said)

    def test_several_at_once(self, file: Path) -> None:
        text = error(file, "lr=1", "seed=-1", "batch.rows=0", "steps=x", "z_loss=x")
        assert text.count("command line: ") == 3
        assert text.endswith("; and 2 more")
