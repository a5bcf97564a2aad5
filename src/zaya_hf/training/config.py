"""What a training run is told: one schema for YAML files, dotted overrides and Python.

Every field has a default or is required; nothing unknown is taken. `settings_files.load` reads files and command lines
into it and turns what is wrong into one line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["TrainingConfig"]

Positive = Field(gt=0)
Beta = Annotated[float, Field(ge=0, lt=1)]
NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$"  # it is a part of folders' names


class Section(BaseModel):
    """Frozen; unknown keys, numbers that are none and NaN are refused; no string becomes a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True, protected_namespaces=())


class LoraConfig(Section):
    """LoRA by PEFT on the parts that `zaya_hf.training.lora_targets` names. The balancing biases stay as they are."""

    r: int = Field(16, gt=0, description="rank; every expert has matrices of this rank of its own")
    alpha: float = Field(32.0, gt=0, description="the product is scaled by alpha / r")
    attention: bool = True
    experts: bool = True
    layers: list[int] | None = Field(None, description="numbers of the layers to adapt; null: all")


class ModelConfig(Section):
    """A fresh model of `config`, or the weights of `checkpoint`; one of the two."""

    config: dict[str, Any] | str | None = Field(
        None, description="fields of ZayaConfig, or a path to a config.json: a fresh model"
    )
    checkpoint: str | None = Field(
        None,
        description="folder or hub id of a model in any ZAYA layout; or an earlier run's folder: its newest checkpoint",
    )
    revision: str | None = Field(None, description="of a hub id: branch, tag or commit")
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of the checkpoint's config that this run changes, such as rope_theta in a later phase",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the weights that are trained")
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        if (self.config is None) == (self.checkpoint is None):
            given = "; neither is there" if self.config is None else ", not both"
            raise ValueError(f"give either config (a fresh model) or checkpoint (weights to start from){given}")
        if self.config is not None and self.overrides:
            raise ValueError("overrides are for a checkpoint; a fresh model has everything in config")
        if self.config is not None and self.lora is not None:
            raise ValueError("lora adapts a checkpoint; a fresh model (config) has nothing to adapt")
        return self


class TokenizerConfig(Section):
    """A tokenizer that exists, or one trained on the run's own text."""

    path: str | None = Field(None, description="folder or hub id; null: the checkpoint's")
    train_vocab_size: int | None = Field(
        None, gt=256, description="train a byte-level BPE of this size on the sources (digits apart), once per run"
    )


class SourceConfig(Section):
    """Documents of one origin."""

    path: str = Field(
        description="file, folder, glob pattern or hub id; {stdlib} stands for the folder of Python's standard library"
    )
    kind: Literal["auto", "text", "jsonl", "parquet", "arrow", "hub", "tokens", "megatron", "flat"] = Field(
        "auto",
        description="text: a document per file; jsonl: also .gz, .zst; arrow: save_to_disk of datasets; tokens: what "
        "`zaya data build` wrote; megatron: .bin with .idx; flat: raw ids, documents ended by eos; auto: by its name",
    )
    weight: float = Field(1.0, gt=0, description="share of the rows, relative to the other sources")
    name: str | None = Field(
        None,
        pattern=NAME,
        description="in logs, reports and the cache: up to 100 letters, digits, '.', '_' and '-', no '.' first; null: "
        "of the path",
    )
    field: str = Field("text", description="of a record: its text; with chat: its list of messages")
    split: str = Field("train", description="of a hub dataset")
    subset: str | None = Field(None, description="configuration of a hub dataset")
    revision: str | None = None
    dtype: Literal["uint16", "uint32", "int32"] | None = Field(None, description="of the ids of a flat file")


class ChatConfig(Section):
    """Conversations instead of texts: what is predicted, and how long ones are shortened."""

    train_on: Literal["assistant", "last_assistant", "all"] = Field("assistant", description="which turns are targets")
    trim_thinking: bool = Field(
        True, description="shorten conversations that do not fit by AP-trimming (ZAYA1-8B report, III-A); else drop"
    )
    think_start: str = "<think>"
    think_end: str = "</think>"


class DataConfig(Section):
    sources: list[SourceConfig] = Field(min_length=1)
    held_out: list[SourceConfig] = Field(default_factory=list, description="documents for the held-out loss alone")
    held_out_fraction: float = Field(
        0.0, ge=0, lt=0.5, description="of every source's documents, chosen by hash, kept for the held-out loss"
    )
    sequence_length: int = Field(gt=1, description="tokens per row")
    packing: Literal["contiguous", "best_fit"] = Field(
        "contiguous",
        description="contiguous: documents behind each other, cut at the row's end; best_fit: whole documents, placed "
        "by best-fit decreasing; only what is longer than a row is cut",
    )
    chat: ChatConfig | None = None
    cache: str | None = Field(None, description="folder for tokenised text; null: data/ in the run's folder")
    build_processes: int = Field(1, gt=0, description="that tokenise")
    workers: int = Field(0, ge=0, description="processes that prepare batches ahead; decides no number")


class BatchConfig(Section):
    rows: int = Field(gt=0, description="rows of sequence_length in one optimizer step, over all processes")
    micro_rows: int = Field(1, gt=0, description="rows in one forward pass of one process; the rest is accumulated")


class OptimizerConfig(Section):
    name: Literal["hybrid_muon", "adamw"] = "hybrid_muon"
    lr: float = Field(gt=0, description="peak; of Muon's matrices")
    adamw_lr: float | None = Field(None, gt=0, description="peak for everything else; null: lr")
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.95, ge=0, lt=1)
    nesterov: bool = True
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    ns_steps: int = Field(5, gt=0, lt=100)
    ns_dtype: Literal["bfloat16", "float32"] | None = Field(
        None, description="of the Newton-Schulz iteration; null: what is fast on the device"
    )


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="wsd: warm-up, stable, linear decay over the last decay_fraction"
    )
    warmup_steps: int = Field(0, ge=0)
    final_factor: float = Field(0.0, ge=0, le=1, description="of the peak, at the end, after the last update")
    decay_fraction: float = Field(0.5, gt=0, le=1, description="of the steps; wsd only")


class BalancingConfig(Section):
    """The routers' balancing biases; arXiv 2605.05365, section II-A2. Default gains: of `benchmarks/balancing.py`."""

    controller: Literal["adamw", "sign", "pid", "frozen"] = "adamw"
    lr: float = Field(5e-3, gt=0, description="of adamw and sign, in units of probability per step")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), strict=False, description="adamw")
    eps: float = Field(1e-8, gt=0, description="adamw")
    kp: float = Field(0.0, ge=0, description="pid, on the error (target - share)")
    ki: float = Field(0.2, ge=0, description="pid, on the sum of errors")
    kd: float = Field(0.0, ge=0, description="pid, on the change of the error")
    clamp: float | None = Field(1.0, gt=0, description="pid: largest absolute bias; null: none")
    skip_target: float | None = Field(
        None, ge=0, lt=1, description="share of tokens that skip the experts; null: the skip slot's bias stays"
    )


class GuardConfig(Section):
    spike_z: float | None = Field(
        8.0, gt=0, description="robust z-score of loss or gradient norm above which a step is skipped; null: never"
    )
    window: int = Field(128, gt=7, description="good steps that the z-score compares with")
    minimum: int = Field(32, gt=7, description="good steps before a spike can be told")
    roll_back_after: int = Field(3, gt=0, description="bad steps in a row before the run goes back to a checkpoint")
    max_roll_backs: int = Field(3, ge=0, description="before the run gives up")
    wall_clock_minutes: float | None = Field(None, gt=0, description="save and stop before this time is up")


class CheckpointConfig(Section):
    every: int = Field(100, ge=0, description="steps between two; 0: only when stopping and at the end")
    keep: int = Field(2, gt=0, description="newest ones that stay")


class LmEvalConfig(Section):
    tasks: list[str] = Field(min_length=1, description="names of lm-eval tasks, ours or lm-eval's own")
    task_folder: str | None = Field(None, description="of task definitions; null: those that come with the package")
    every: int = Field(gt=0, description="steps")
    limit: int | None = Field(None, gt=0, description="items per task")
    batch_size: int = Field(8, gt=0)


class EvaluationConfig(Section):
    every: int = Field(0, ge=0, description="steps between two held-out losses; 0: only at the end")
    rows: int | None = Field(None, gt=0, description="held-out rows at most; null: all")
    lm_eval: LmEvalConfig | None = None


class LoggingConfig(Section):
    every: int | None = Field(
        None,
        gt=0,
        description="steps between two lines where there is no terminal; null: 2 % of all; metrics.jsonl has all",
    )
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    project: str = "zaya"
    peak_tflops: float | None = Field(
        None, gt=0, description="of one device in the precision of the run, for MFU; null: by the device's name"
    )
    router_panel_every: int = Field(10, gt=0, description="steps between two lines of what the routers do")


class TrainingConfig(Section):
    """One phase of training."""

    out: str = Field(description="folder of the run")
    seed: int = Field(0, ge=0, lt=2**32)
    steps: int | None = Field(None, gt=0, description="optimizer steps; this or tokens")
    tokens: int | None = Field(None, gt=0, description="rows x sequence_length over the run; rounded up to whole steps")
    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    balancing: BalancingConfig = BalancingConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of matrix products; bfloat16: autocast, with the residual stream in fp32"
    )
    gradient_clip: float | None = Field(1.0, gt=0, description="largest norm of all gradients together; null: as it is")
    z_loss: float = Field(
        0.0, ge=0, description="weight of the squared log-sum-exp of the logits; it is in the loss of metrics.jsonl"
    )
    activation_checkpointing: bool = False
    ema_decay: float | None = Field(None, gt=0, lt=1, description="keep an exponential moving average of the weights")
    accept_changes: list[str] = Field(
        default_factory=list, description="dotted keys that may differ from the run that is resumed"
    )

    @model_validator(mode="before")
    @classmethod
    def _routers_stay_under_adapters(cls, values: Any) -> Any:
        """Without a word about balancing, LoRA leaves it out: an adapter's folder has no place for the biases."""
        if (
            not isinstance(values, dict)
            or not isinstance(model := values.get("model"), dict)
            or model.get("lora") is None
        ):
            return values
        balancing = values.get("balancing", {})
        if not isinstance(balancing, dict) or "controller" in balancing:
            return values
        return {**values, "balancing": {**balancing, "controller": "frozen"}}

    @model_validator(mode="after")
    def _length(self) -> TrainingConfig:
        if (self.steps is None) == (self.tokens is None):
            given = "not both; null takes one of them out" if self.steps is not None else "as the length of the run"
            raise ValueError(f"give either steps or tokens, {given}")
        return self

    @model_validator(mode="after")
    def _routers_stay(self) -> TrainingConfig:
        if self.model.lora is not None and self.balancing.controller != "frozen":
            raise ValueError("model.lora leaves the routers as they are: set balancing.controller to frozen")
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens in the rows of one optimizer step, over all processes; padding counts."""
        return self.batch.rows * self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps if self.steps is not None else -(-(self.tokens or 0) // self.tokens_per_step)
