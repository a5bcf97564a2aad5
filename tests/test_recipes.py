"""The recipes that come with zaya_hf: they are valid, they say what was published, and what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import zaya_cli
from zaya_hf import ZayaConfig, ZayaForCausalLM
from zaya_hf.resources import resource
from zaya_hf.testing import tiny_config
from zaya_hf.training.flops import count_parameters
from zaya_hf.training.models import config_of
from zaya_hf.training.settings_files import load

FOLDER = resource("train")
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
PHASES = ("pretrain-4k", "anneal-4k", "midtrain-32k", "sft-131k")
ACCELERATE = sorted((FOLDER / "accelerate").glob("*.yaml"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_and_named_after_its_run(name: str) -> None:
    config = load(name)
    assert config.out == f"runs/{name}"
    assert f"`{name}`" in README


def test_the_recipes() -> None:
    assert set(RECIPES) == {*PHASES, "continue-8b", "lora-8b", "cpu-small"}


@pytest.mark.parametrize(
    ("name", "tokens", "context", "steps"),
    [
        ("pretrain-4k", 8e12, 4096, 476_838),
        ("anneal-4k", 4e12, 4096, 238_419),
        ("midtrain-32k", 1.2e12, 32_768, 71_526),
        ("sft-131k", 660e9, 131_072, 39_340),
    ],
)
def test_published_lengths(name: str, tokens: float, context: int, steps: int) -> None:
    config = load(name)
    assert config.tokens == tokens
    assert config.data.sequence_length == context
    assert config.total_steps == steps
    assert f"{steps:,} steps" in (FOLDER / f"{name}.yaml").read_text()


def test_published_optimizer_and_schedule() -> None:
    config = load("pretrain-4k")
    assert config.optimizer.name == "hybrid_muon"
    assert config.optimizer.adjust_lr == "match_rms_adamw"
    assert config.optimizer.ns_steps == 5
    assert config.optimizer.lr == 6e-4
    assert config.schedule.name == "cosine"
    assert config.optimizer.lr * config.schedule.final_factor == pytest.approx(2e-4)
    assert (config.batch.rows, config.data.sequence_length) == (4096, 4096)
    assert config.balancing.controller == "adamw"
    for name in PHASES[1:]:
        phase = load(name)
        assert phase.optimizer.name == "hybrid_muon"
        assert phase.optimizer.adjust_lr == "match_rms_adamw"
        assert phase.tokens_per_step == config.tokens_per_step


def test_published_mixtures_and_packing() -> None:
    shares = {name: [source.weight for source in load(name).data.sources] for name in ("midtrain-32k", "sft-131k")}
    assert shares == {
        "midtrain-32k": [86.1, 5.7, 0.8, 3.0, 3.0, 1.4],
        "sft-131k": [75.0, 9.8, 6.4, 5.0, 2.6, 1.2],
    }
    sft = load("sft-131k")
    assert sft.data.packing == "best_fit"
    assert sft.data.chat is not None
    assert sft.data.chat.trim_thinking


def test_the_first_phase_trains_zaya1_8b() -> None:
    built, released = config_of(load("pretrain-4k").model), ZayaConfig()
    assert count_parameters(built) == count_parameters(released)
    changed = {"eos_token_id", "max_position_embeddings", "rope_parameters"}
    ours, theirs = built.to_dict(), released.to_dict()
    assert {name for name in ours if ours[name] != theirs.get(name)} == changed


def test_each_phase_goes_on_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE bases and contexts arrive in the config of the model that is loaded."""
    monkeypatch.chdir(tmp_path)
    first = load("pretrain-4k").model.config
    assert isinstance(first, dict)
    rope = first["rope_parameters"]
    tiny = tiny_config(max_position_embeddings=first["max_position_embeddings"], rope_parameters=rope)
    reached = [(tiny.rope_parameters["hybrid"]["rope_theta"], tiny.max_position_embeddings)]
    ZayaForCausalLM(tiny).save_pretrained(Path(load("pretrain-4k").out, "model"))
    for name in PHASES[1:]:
        phase = load(name)
        config = config_of(phase.model)
        reached.append((config.rope_parameters["hybrid"]["rope_theta"], config.max_position_embeddings))
        assert config.rope_parameters["hybrid"]["partial_rotary_factor"] == 0.5
        model = ZayaForCausalLM(config)
        model.save_pretrained(Path(phase.out, "model"))
    assert reached == [(1e4, 4096), (1e4, 4096), (1e6, 32_768), (5e6, 131_072)]


def test_cpu_small_has_every_part_on() -> None:
    config = load("cpu-small")
    fields = config.model.config
    assert isinstance(fields, dict)
    parameters = count_parameters(config_of(config.model, vocab_size=config.tokenizer.train_vocab_size)).total
    assert 500_000 < parameters < 1_000_000
    assert len({source.weight for source in config.data.sources}) > 1
    assert config.batch.rows > config.batch.micro_rows
    assert config.data.workers > 0
    assert config.data.held_out
    assert config.evaluation.lm_eval is not None
    assert config.logging.trackers == ["tensorboard"]
    for part in (config.activation_checkpointing, config.ema_decay, config.z_loss, config.guard.spike_z):
        assert part
    assert config.steps is not None
    assert config.checkpoint.every < config.steps
    assert config.evaluation.every < config.steps


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_ours_is_said_to_be(name: str) -> None:
    """Values of the published phases have a word on where they come from, unless a whole section or file has."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    if name not in PHASES:
        assert re.search(r"[Aa]ll values ours", text)
        return
    assert "# published" in text
    assert "# ours" in text
    # The section of a phase in which every line that sets a number says one of the two.
    optimizer = re.search(r"^optimizer:\n((?:  .*\n)+)", text, re.MULTILINE)
    assert optimizer is not None
    for line in optimizer[1].splitlines():
        assert re.search(r"# (ours|published)", line), line


@pytest.mark.parametrize("file", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_takes_its_files(file: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(file))
    assert config.mixed_precision == "no"  # the run's settings decide
    assert config.num_processes % config.num_machines == 0
    assert (config.num_processes > 1) == (config.distributed_type == "MULTI_GPU")
    written = yaml.safe_load(file.read_text())
    assert set(written) <= set(type(config).__dataclass_fields__)
    assert f"train/accelerate/{file.name}" in README


def test_slurm_scripts_are_bash() -> None:
    for script in (FOLDER / "slurm").iterdir():
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert f"train/slurm/{script.name}" in README


def test_the_file_in_the_readme_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.S)
    (tmp_path / "my.yaml").write_text(block, encoding="utf-8")
    config = load(tmp_path / "my.yaml")
    assert config.model.checkpoint == "Zyphra/ZAYA1-8B"
    assert config.total_steps == 62
    assert [source.path for source in config.data.sources] == ["texts/*.jsonl", "notes/*.txt"]


def test_commands_of_the_readme_are_right() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    commands = [
        line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("zaya ")
    ]
    assert len(commands) > 5
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        arguments, left = zaya_cli.build_parser().parse_known_args(words)
        assert all("=" in word for word in left)
        if arguments.command == "train":
            name = arguments.config
            assert name in RECIPES or (FOLDER.parent / name).is_file() or name.startswith("my"), command
            if name in RECIPES:
                load(name, [*arguments.overrides, *left])
