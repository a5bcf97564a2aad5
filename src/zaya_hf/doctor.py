"""`zaya doctor`: what is installed on this machine, what will run, and what is missing for what.

Everything reported is looked up or tried: the core check builds a tiny model and runs it on every kind of device here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import import_utils

import zaya_hf
from zaya_hf import ops, rocm_checks, supported_versions
from zaya_hf.modeling_zaya import ZayaForCausalLM
from zaya_hf.testing import random_ids, redraw, tiny_config

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "numpy",
    "triton",
    "accelerate",
    "datasets",
    "lm_eval",
    "matplotlib",
    "peft",
    "trl",
)
# What each extra is for; `dev` is for work on zaya_hf itself and not reported.
_EXTRAS = {
    "train": "accelerate: quickstart, and training scripts of your own",
    "eval": "lm-eval and plots: quickstart and report",
    "kernels": "Triton: the operators' kernels on GPUs",
}
# States of `supported_versions.Installed` that meet a requirement; nothing can be said against a version that is none.
_MET = ("supported", "newer than tested", "unreadable")
_ATTENTION_PROBES = {
    "flash_attention_2": import_utils.is_flash_attn_2_available,
    "flash_attention_3": import_utils.is_flash_attn_3_available,
    "flash_attention_4": import_utils.is_flash_attn_4_available,
}


def run(args: argparse.Namespace) -> int:
    """Carry out `zaya doctor`; `args.json` chooses the form. Returns 0 when the core works, else 1."""
    report = collect()
    print(json.dumps(report, indent=2) if args.json else describe(report))
    return 0 if report["ok"] else 1


def collect() -> dict[str, Any]:
    """All findings as plain JSON values; `describe` puts them into words."""
    core_missing, extras = _requirements()
    checks = {kind: _try_core(kind) for kind in _device_kinds()}
    works = not core_missing and all(check["error"] is None for check in checks.values())
    return {
        "ok": works,
        "zaya_hf": zaya_hf.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch_build": _torch_build(),
        "cpu_threads": torch.get_num_threads(),
        "devices": _devices(),
        "core": {"missing": core_missing, "checks": checks},
        "operators": {
            name: {"backend": backend, "why": why} for name, (backend, why) in ops.backends(_device_kinds()[-1]).items()
        },
        "operators_requested": os.environ.get("ZAYA_OPS"),
        "attention_available": ["eager", "sdpa", *(name for name, here in _ATTENTION_PROBES.items() if here())],
        "auto_classes": _auto_classes(),
        "extras": extras,
        "versions": [installed._asdict() for installed in supported_versions.look_up(_version)],
        "rocm": rocm_checks.as_json(rocm_checks.findings(rocm_checks.look())),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _device_kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _devices() -> list[dict[str, Any]]:
    """The GPUs that torch sees; ROCm devices are "cuda" to torch, too."""
    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            about = torch.cuda.get_device_properties(index)
        except RuntimeError as error:  # in use by another process, fallen off the bus ...
            failure = f"FAILS: {' '.join(str(error).split())}"
            found.append({"device": f"cuda:{index}", "name": failure, "architecture": "unknown", "memory_gib": None})
            continue
        # On ROCm the architecture is the name compilers use (gfx942), on CUDA the compute capability.
        architecture = getattr(about, "gcnArchName", "") if torch.version.hip else f"sm_{about.major}{about.minor}"
        found.append(
            {
                "device": f"cuda:{index}",
                "name": about.name,
                "architecture": architecture,
                "memory_gib": round(about.total_memory / 2**30, 1),
            }
        )
    return found


def _try_core(device: str) -> dict[str, Any]:
    """Build a tiny model on `device`, run it forward and backward, generate two tokens; what was used, or the error."""
    result: dict[str, Any] = {"error": None}
    try:
        with torch.random.fork_rng(devices=[]):
            model: Any = ZayaForCausalLM(tiny_config(num_hidden_layers=2))
        redraw(model).to(device)
        ids = random_ids(2, 8).to(device)
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        if not torch.isfinite(output.logits).all():
            raise RuntimeError("the logits of a tiny model are not finite")
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
        result["attention"] = model.config._attn_implementation
        result["experts"] = model.config._experts_implementation
    except Exception as error:  # a report names what fails, whatever it is, and goes on
        result["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return result


def _auto_classes() -> dict[str, str]:
    """Which classes transformers' Auto classes build for `model_type: zaya` in this process."""
    config_class: Any = CONFIG_MAPPING["zaya"]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return {"config": _full_name(config_class), "model": _full_name(model_class)}


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _requirements() -> tuple[list[str], dict[str, dict[str, Any]]]:
    """(core requirements not met, what each extra lacks), both read from the installed package's metadata."""
    try:
        requirements = [Requirement(text) for text in metadata.requires("zaya_hf") or ()]
    except metadata.PackageNotFoundError:  # a source tree on PYTHONPATH: nothing states what it needs
        return [], {}
    core = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    extras = {}
    for extra, purpose in _EXTRAS.items():
        wanted = [r for r in requirements if r not in core and r.marker and r.marker.evaluate({"extra": extra})]
        lacking = [requirement for requirement in wanted if _lacking(requirement)]
        extras[extra] = {
            "for": purpose,
            "missing": [text for requirement in lacking for text in _lacking(requirement)],
            "install": _install_command(extra, lacking) if lacking else None,
        }
    return [text for requirement in core for text in _lacking(requirement)], extras


def _install_command(extra: str, lacking: list[Requirement]) -> str:
    """What installs an extra here: `make install` where the checkout's Makefile made this environment, else pip with
    the packages themselves, which is right wherever zaya_hf came from."""
    checkout = _checkout()
    if checkout is not None and (checkout / "Makefile").is_file() and any(Path(sys.prefix).glob(".installed-*")):
        venv = Path(sys.prefix)
        elsewhere = "" if venv.resolve() == (checkout / ".venv").resolve() else f" VENV={shlex.quote(str(venv))}"
        return f"make install EXTRAS=dev,{extra}{elsewhere}"
    packages = " ".join(f'"{canonicalize_name(r.name)}{r.specifier}"' for r in lacking)
    return f"pip install {packages}"


def _checkout() -> Path | None:
    """The folder that zaya_hf is installed from as editable, or None."""
    try:
        origin = json.loads(metadata.distribution("zaya_hf").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(url2pathname(urlsplit(origin["url"]).path))


def _lacking(requirement: Requirement) -> list[str]:
    """[] if the requirement is met here, else one text that says what was asked and what is there."""
    version = _version(requirement.name)
    # A local build such as 2.13.0+rocm or a build on the way to a release meets the bound as that release does.
    if supported_versions.state_of(requirement.name, version, str(requirement.specifier)) in _MET:
        return []
    found = "not installed" if version is None else f"{version} is installed"
    return [f"{canonicalize_name(requirement.name)}{requirement.specifier} ({found})"]


def describe(report: dict[str, Any]) -> str:
    """The report in words, one finding a line."""
    lines: list[str] = []

    def say(title: str, *texts: str) -> None:
        lines.extend(f"{title if not i else '':<12} {text}" for i, text in enumerate(texts))

    say("zaya_hf", f"{report['zaya_hf']}, Python {report['python']}, {report['platform']}")
    say("packages", *_wrapped(f"{name} {version or '-'}" for name, version in report["packages"].items()))
    gpus = [
        f"{d['device']}: {d['name']}" + (f", {d['architecture']}, {d['memory_gib']} GiB" if d["memory_gib"] else "")
        for d in report["devices"]
    ]
    say("devices", f"torch is built for {report['torch_build']}, {report['cpu_threads']} CPU threads", *gpus)
    if not gpus:
        say("", "no GPU is visible to torch: everything runs on the CPU")
    for kind, check in report["core"]["checks"].items():
        if check["error"] is None:
            say(f"on {kind}", f"a tiny model runs; attention {check['attention']}, experts {check['experts']}")
        else:
            say(f"on {kind}", f"FAILS: {check['error']}")
    say("versions", *_version_lines(report["versions"]))
    say("ROCm", *_finding_lines(report["rocm"]))
    say("operators", *_operator_lines(report))
    say("attention", f"available: {', '.join(report['attention_available'])}")
    ours = report["auto_classes"]["model"].startswith("zaya_hf.")
    whose = "zaya_hf's class" if ours else "transformers' own class"
    say("Auto classes", f"model_type zaya is {whose} ({report['auto_classes']['model']})")
    say("commands", *_command_lines(report))
    say("result", "the core works" if report["ok"] else "the core does NOT work, see above")
    return "\n".join(lines)


def _wrapped(items: Any, width: int = 100) -> list[str]:
    lines = [""]
    for item in items:
        if lines[-1] and len(lines[-1]) + len(item) > width:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + item
    return lines


def _version_lines(versions: list[dict[str, Any]]) -> list[str]:
    """What is outside the supported or the tested range, with the range; one line if all is within."""
    lines = []
    for about in versions:
        found = f"{about['name']} {about['version']}"
        if about["state"] in ("too old", "too new"):
            wanted = f"{about['name']}{about['supported']}"
            lines.append(f"{found} is {about['state']}: pip install '{wanted}'")
        elif about["state"] == "newer than tested":
            lines.append(f"{found} is newer than the newest tested, {supported_versions.TESTED[about['name']]}")
        elif about["state"] == "unreadable":
            lines.append(f"{found}: no version that can be compared; supported is {about['supported']}")
    return lines or ["all installed packages are in the supported ranges"]


def _finding_lines(findings: list[dict[str, Any]]) -> list[str]:
    marks = {"problem": "PROBLEM: ", "note": "note: "}
    return [f"{marks.get(finding['level'], '')}{finding['text']}" for finding in findings]


def _operator_lines(report: dict[str, Any]) -> list[str]:
    """One line per (backend, reason), with the operators it holds for."""
    groups: dict[str, list[str]] = {}
    for name, chosen in report["operators"].items():
        groups.setdefault(f"{chosen['backend']} ({chosen['why']})", []).append(name)
    return [f"{', '.join(names)}: {choice}" for choice, names in groups.items()]


def _command_lines(report: dict[str, Any]) -> list[str]:
    missing = report["core"]["missing"]
    lines = [f"generate: {'lacks ' + ', '.join(missing) if missing else 'ready'}"]
    for extra, about in report["extras"].items():
        state = f"lacks {', '.join(about['missing'])}: {about['install']}" if about["missing"] else "installed"
        lines.append(f"optional extra {extra} ({about['for']}): {state}")
    if not report["extras"]:
        lines.append("extras unknown: zaya_hf runs from a source tree that is not installed")
    return lines
