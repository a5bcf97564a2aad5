"""What all tests share: offline, repeatable, and a seed that is printed when a random test fails.

The default run uses fixed seeds. `make fuzz` draws a fresh one: it is printed at the start and again after a failure,
and `make fuzz SEED=N` repeats it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Read by huggingface_hub and tokenizers when they are imported, so before the first import below that reaches them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

# No deadline: the first example of a test pays for imports and caches, and the machine may be busy.
_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, max_examples=12, database=None, **_SHARED)
settings.register_profile("fuzz", derandomize=False, max_examples=300, print_blob=True, **_SHARED)
settings.load_profile("ci")

SEED_VARIABLE = "ZAYA_TEST_SEED"


def _test_seed() -> int:
    return int(os.environ.get(SEED_VARIABLE, "0"))


def pytest_configure(config: pytest.Config) -> None:
    """Triton reads both when it is imported; interpreted kernels cannot be compiled, so a run is for one of the two."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    os.environ["TRITON_INTERPRET"] = "1" if config.option.markexpr == "interpreter" else "0"


def pytest_report_header() -> str:
    return f"{SEED_VARIABLE}={_test_seed()}, torch {torch.__version__}, {torch.get_num_threads()} thread(s) per process"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("failed") and SEED_VARIABLE in os.environ:
        terminalreporter.write_line(f"a random test that failed is repeated by: make fuzz SEED={_test_seed()}")


@pytest.fixture(scope="session")
def test_seed() -> int:
    """Where tests that draw random cases start: 0, or the seed of `make fuzz`."""
    return _test_seed()


@pytest.fixture(scope="session")
def fuzzing() -> bool:
    """True under `make fuzz`: random tests then draw many more cases."""
    return SEED_VARIABLE in os.environ


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test gives the same numbers alone, in a full run, and on any xdist worker."""
    torch.manual_seed(_test_seed())


@pytest.fixture(autouse=True, scope="module")
def _accelerate_forgets() -> Iterator[None]:
    """accelerate keeps the settings of the first `Accelerator` (a `Trainer` makes one) for the life of the process; the
    next file may want others."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
