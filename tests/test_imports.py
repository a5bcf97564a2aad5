"""Who may import whom in src/, what importing zaya_hf does, and what the command line imports before it has to."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
PACKAGE = SRC / "zaya_hf"

# Layers of the package, lowest first: a module imports from its own layer and from lower ones. A name covers the module
# of that name and everything inside it; the longest name that fits counts. What is in no row is at the model's layer.
# The two files of checkpoints/ in the first row are pure data and pure functions.
LAYERS: list[set[str]] = [
    {
        "ops",
        "configuration_zaya",
        "json_checks",
        "remote_code",
        "checkpoints.layouts",
        "checkpoints.dialects",
        "reporting",
        "resources",
    },
    {"modeling_zaya"},
    {"training", "evaluation", "checkpoints", "inference"},
    {"hub", "doctor", "generation_cli", "chat_cli", "bench_cli", "train_cli", "data_cli", "lm_eval_cli"},
    {"quickstart", "report_cli", "eval_cli"},
    {"__main__"},
]
MODEL_LAYER = 1
# Third-party packages that only these parts may import.
CONFINED = {
    "triton": ("ops.*.triton", "ops.*.triton_backward"),
    "accelerate": ("training", "parallel"),
    "lm_eval": ("evaluation",),
    "matplotlib": ("reporting",),
}


def module_name(path: Path) -> str:
    """Name inside the package, '' for its __init__: ops/router/reference.py -> ops.router.reference."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path, root: Path = PACKAGE) -> Iterator[str]:
    """Absolute names of all modules that a file imports, inside functions and conditions too."""
    inside = ("zaya_hf", *path.relative_to(root).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # Either a module (`from . import ops`) or something inside one: the rules treat both alike.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def covers(pattern: str, module: str) -> bool:
    """Whether `module` is what `pattern` names or lies inside it; '*' stands for one part."""
    wanted, parts = pattern.split("."), module.split(".")
    return len(parts) >= len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False))


def layer_of(module: str) -> int:
    fitting = [(len(name), rank) for rank, names in enumerate(LAYERS) for name in names if covers(name, module)]
    return max(fitting)[1] if fitting else MODEL_LAYER


def violations(module: str, imports: Iterator[str]) -> list[str]:
    found = []
    for name in imports:
        top, _, inner = name.partition(".")
        if top in CONFINED and not any(covers(allowed, module) for allowed in CONFINED[top]):
            found.append(f"{module} imports {name}, which only {', '.join(CONFINED[top])} may")
        if top == "zaya_cli" and module != "__main__":
            found.append(f"{module} imports zaya_cli, which imports the package")
        if top != "zaya_hf" or not inner:
            continue
        # hardware stands alone, and `cli` is outside: neither side of that line imports the other.
        if covers("hardware", module) != covers("hardware", inner):
            found.append(f"{module} imports {name}: hardware stands alone")
        if layer_of(inner) > layer_of(module):
            found.append(f"{module} imports {name}, which is a layer above it")
    return found


SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_file_keeps_the_import_rules(path: Path) -> None:
    module = module_name(path)
    assert violations(module, imported_names(path)) == []


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("ops.router.reference", "zaya_hf.modeling_zaya"),
        ("configuration_zaya", "zaya_hf.modeling_zaya"),
        ("checkpoints.layouts", "zaya_hf.modeling_zaya.ZayaModel"),
        ("modeling_zaya", "zaya_hf.checkpoints.convert"),
        ("modeling_zaya", "zaya_hf.training.loop"),
        ("training.loop", "zaya_hf.quickstart.run"),
        ("training.run", "zaya_hf.train_cli"),
        ("train_cli", "accelerate"),
        ("hardware.gemm", "zaya_hf.ops"),
        ("modeling_zaya", "zaya_hf.hardware.gemm"),
        ("ops.router.reference", "triton"),
        ("ops.router.op", "triton.language"),
        ("modeling_zaya", "accelerate"),
        ("quickstart.run", "lm_eval"),
        ("quickstart.report", "matplotlib.figure"),
        ("reporting.page", "zaya_hf.quickstart.report"),
        ("evaluation.harness", "zaya_hf.hub.card"),
        ("hub.card", "zaya_hf.quickstart.results"),
        ("inference.conversation", "zaya_hf.chat_cli"),
        ("modeling_zaya", "zaya_hf.inference.sampling"),
        ("doctor", "zaya_cli"),
        ("kernel_table", "triton"),
        ("ops.compiling.assembly", "triton"),
        ("kernel_table", "zaya_hf.bench_cli"),
        ("doctor", "zaya_hf.__main__"),
    ],
)
def test_the_rules_refuse(module: str, imported: str) -> None:
    assert violations(module, iter([imported]))


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("ops.router.triton", "triton.language"),
        ("ops.router.triton_backward", "triton.language"),
        ("ops.compiling.triton", "triton.compiler"),
        ("bench_cli", "zaya_hf.reporting.kernels"),
        ("modeling_zaya", "zaya_hf.ops.router"),
        ("modeling_zaya", "zaya_hf.checkpoints.layouts"),
        ("loading", "zaya_hf.configuration_zaya"),
        ("checkpoints.convert", "zaya_hf.modeling_zaya"),
        ("training.loop", "accelerate.utils"),
        ("evaluation.scorer", "lm_eval.api.model"),
        ("hardware.plan", "zaya_hf.hardware.gemm"),
        ("quickstart.jobs", "zaya_hf.training.simple"),
        ("quickstart.pipeline", "zaya_hf.hub.card"),
        ("hub.card", "zaya_hf.reporting.results"),
        ("__main__", "zaya_cli"),
    ],
)
def test_the_rules_allow(module: str, imported: str) -> None:
    assert violations(module, iter([imported])) == []


def test_relative_imports_are_resolved(tmp_path: Path) -> None:
    file = tmp_path / "ops" / "router" / "op.py"
    file.parent.mkdir(parents=True)
    file.write_text("from . import reference\nfrom ...cache import adopt\nfrom .. import experts\n", encoding="utf-8")
    assert {"zaya_hf.ops.router.reference", "zaya_hf.cache.adopt", "zaya_hf.ops.experts"} <= set(
        imported_names(file, tmp_path)
    )


def in_fresh_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Everything that a library may change for all of a process, and the tables of transformers that classes register in.
# Prints what differs after the import.
_WATCH = """
import json, os, sys, random, logging, warnings, threading, signal
import numpy, torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers import activations, cache_utils, core_model_loading, conversion_mapping, masking_utils
from transformers import modeling_rope_utils, modeling_utils
from transformers.integrations import moe
from transformers.models.auto import auto_factory, configuration_auto, modeling_auto
import transformers.models.zaya.modeling_zaya as native

def tables():
    found = {}
    for module in (activations, cache_utils, conversion_mapping, core_model_loading, masking_utils, modeling_rope_utils,
                   modeling_utils, moe, configuration_auto, modeling_auto):
        for name, value in vars(module).items():
            if hasattr(value, "_extra_content"):  # before dict: such a mapping loads every model when it is walked
                content = value._extra_content
            elif hasattr(value, "_global_mapping"):
                content = value._global_mapping
            elif isinstance(value, dict):
                content = value
            else:
                continue
            if not name.startswith("__"):
                found[f"{module.__name__}.{name}"] = {str(k): repr(v) for k, v in content.items()}
    found["native"] = {k: repr(v) for k, v in vars(native).items() if not k.startswith("__")}
    found["native.ZayaForCausalLM"] = {k: repr(v) for k, v in vars(native.ZayaForCausalLM).items()}
    return found

def state():
    return {
        "environ": dict(os.environ), "random": repr(random.getstate()), "torch seed": torch.initial_seed(),
        "torch rng": torch.get_rng_state().tolist(), "numpy rng": repr(numpy.random.get_state()),
        "dtype": str(torch.get_default_dtype()), "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(), "filters": repr(warnings.filters),
        "handlers": repr(logging.getLogger().handlers),
        "level": logging.getLogger("transformers").level, "running": threading.active_count(),
        "sigint": repr(signal.getsignal(signal.SIGINT)), "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(), "path": list(sys.path),
    }

tables_before, state_before = tables(), state()
import zaya_hf
tables_after, state_after = tables(), state()
print(json.dumps({
    "tables": sorted(f"{t}: {k}" for t in tables_after for k in tables_after[t]
                     if tables_before.get(t, {}).get(k) != tables_after[t][k]),
    "lost": sorted(f"{t}: {k}" for t in tables_before for k in tables_before[t] if k not in tables_after.get(t, {})),
    "state": sorted(k for k in state_after if state_before[k] != state_after[k]),
    "classes": [AutoConfig.for_model("zaya").__class__.__module__,
                modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model("zaya"))].__module__],
}))
"""


def test_importing_registers_the_auto_classes_and_nothing_else() -> None:
    found = json.loads(in_fresh_python(_WATCH))
    assert found["state"] == []
    assert found["lost"] == []
    auto = "transformers.models.auto"
    assert [entry.split(": ")[0] for entry in found["tables"]] == [
        f"{auto}.configuration_auto.CONFIG_MAPPING",
        f"{auto}.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING",
        f"{auto}.modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING",
        f"{auto}.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        f"{auto}.modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
        f"{auto}.modeling_auto.MODEL_MAPPING",
    ]
    assert found["classes"] == ["zaya_hf.configuration_zaya", "zaya_hf.modeling_zaya"]


def test_opting_out_registers_nothing() -> None:
    found = json.loads(in_fresh_python(_WATCH, ZAYA_HF_NO_REGISTER="1"))
    assert found["tables"] == []
    assert found["state"] == []
    assert found["classes"][1].startswith("transformers.models.zaya")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["bench", "kernels", "--help"],
        ["chat", "--help"],
        ["train", "--help"],
        ["data", "build", "--help"],
        ["eval", "--help"],
        ["eval"],
        ["chat"],
        ["no-such"],
    ],
)
def test_the_parser_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys, zaya_cli
try:
    zaya_cli.main({arguments!r})
except SystemExit:
    pass
heavy = sorted({{"torch", "transformers", "numpy", "zaya_hf", "tokenizers"}} & set(sys.modules))
print("heavy:", heavy)
"""
    assert in_fresh_python(code).endswith("heavy: []\n")
