"""Two processes on gloo train as one does: losses, gradients, biases; and they skip and stop together."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_processes import run_ranks
from small_runs import Records, Saves, biases, make_run, memory, random_rows, row_of, tiny_model, values
from zaya_hf.testing import random_ids
from zaya_hf.training.distributed import make_accelerator, total
from zaya_hf.training.loop import train
from zaya_hf.training.parts import Run
from zaya_hf.training.stopping import Stopper

SKIP = 4  # the slot that skips the experts of the tiny model


def uneven_rows() -> list[dict[str, Tensor]]:
    """11 + 2 = 13 targets."""
    ids = random_ids(2, 12, seed=11)
    return [row_of(ids[0]), row_of(ids[1], targets=2)]


def one_empty_row() -> list[dict[str, Tensor]]:
    ids = random_ids(2, 12, seed=11)
    return [row_of(ids[0]), row_of(ids[1], targets=0)]


def one_sided_rows() -> list[dict[str, Tensor]]:
    """Two steps of two rows. The first row of each goes to experts 0 and 1, the second skips layer 0 and then goes to
    expert 2; nothing goes to expert 3."""
    first = torch.arange(12)[:, None].expand(12, 4) % 2
    second = torch.tensor([SKIP, 2, 2, 2]).expand(12, 4)
    ids = random_ids(4, 12, seed=5)
    return [row_of(ids[k], routed_experts=(second if k % 2 else first).clone()) for k in range(4)]


def trained(
    batch: list[dict[str, Tensor]], *, checkpointing: bool = False, wide: bool = False, **options: Any
) -> dict[str, Any]:
    """What a run comes to."""
    model = tiny_model().double() if wide else tiny_model()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    run = make_run(batch, model=model, **options)
    train(run)
    return result(run)


def result(run: Run) -> dict[str, Any]:
    assert isinstance(run.recorder, Records)
    return {
        "losses": run.recorder.of("loss"),
        "norms": run.recorder.of("grad_norm"),
        "targets": run.recorder.of("targets"),
        "tokens": run.recorder.of("tokens"),
        "skipped": run.recorder.of("skipped"),
        "gradients": run.gradients,  # type: ignore[attr-defined]
        "biases": biases(run),
        "values": values(run),
    }


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "uneven": (uneven_rows, {}),
    "one empty": (one_empty_row, {}),
    "one-sided": (one_sided_rows, {"steps": 2, "rows": 2, "micro_rows": 2}),
    "one-sided, recomputed": (one_sided_rows, {"steps": 2, "rows": 2, "micro_rows": 2, "checkpointing": True}),
    "accumulated": (lambda: random_rows(8), {"micro_rows": 2}),
    "accumulated, recomputed": (lambda: random_rows(8), {"micro_rows": 2, "checkpointing": True}),
    # More than one step in fp64: Newton-Schulz makes much of the rounding of small gradients.
    "accumulated, three steps": (lambda: random_rows(24), {"steps": 3, "rows": 8, "micro_rows": 2, "wide": True}),
    "seven rows": (lambda: random_rows(7), {"steps": 3, "micro_rows": 2, "wide": True}),
}


def in_each_process(folder: Path) -> None:
    """All that is done by two; results are compared by the tests below."""
    accelerator = make_accelerator()
    rank = accelerator.process_index
    assert accelerator.num_processes == 2
    assert total(accelerator, torch.tensor([rank + 1])).tolist() == [3]
    found = {name: trained(make(), **options) for name, (make, options) in RUNS.items()}
    found["bad on one"] = bad_on_one(rank)
    found["stopped"] = stopped_by_one(rank)
    found["late"] = late_on_one(rank)
    found["bfloat16"] = stream_in_bfloat16()
    torch.save(found, folder / f"{rank}.pt")


def bad_on_one(rank: int) -> dict[str, Any]:
    """Four steps; in process 1 alone the loss of the second is NaN, and a gradient of the third is infinite."""
    run = make_run(random_rows(16), steps=4, rows=4, guard={"roll_back_after": 3})
    seen = [result(run) | {"memory": memory(run)}]
    recorder = run.recorder
    assert isinstance(recorder, Records)
    recorder.after_step = lambda record: seen.append(result(run) | {"memory": memory(run)})
    embedding = run.inner.get_input_embeddings().weight

    def spoil_loss(module: Any, inputs: Any, output: Any) -> None:
        if rank == 1 and len(seen) == 2:
            output.loss = output.loss * float("nan")

    run.inner.register_forward_hook(spoil_loss)
    embedding.register_hook(lambda g: g + float("inf") if rank == 1 and len(seen) == 3 else g)
    train(run)
    return {"seen": seen, "events": recorder.kinds(), "guard": run.guard.state_dict()}


def stopped_by_one(rank: int) -> dict[str, Any]:
    """Process 1 gets a SIGTERM after its second step."""
    before = signal.getsignal(signal.SIGTERM)
    run = make_run(random_rows(2), steps=9, stopper=Stopper())
    saves = run.checkpoints = Saves()
    assert isinstance(run.recorder, Records)
    run.recorder.after_step = lambda record: (
        os.kill(os.getpid(), signal.SIGTERM) if rank == 1 and record["step"] == 2 else None
    )
    outcome = train(run)
    restored = signal.getsignal(signal.SIGTERM) is before
    return {"outcome": outcome, "saves": saves.steps, "restored": restored, "values": values(run)}


def late_on_one(rank: int) -> dict[str, Any]:
    """Process 1 has no time left."""
    run = make_run(random_rows(2), steps=9, stopper=Stopper(1e-9 if rank == 1 else None, signals=()))
    return {"outcome": train(run)}


def stream_in_bfloat16() -> dict[str, Any]:
    """Dtypes of what the layers get and of a product inside."""
    run = make_run(random_rows(2), precision="bfloat16", steps=1)
    streams: list[torch.dtype] = []
    products: list[torch.dtype] = []
    for layer in run.inner.get_decoder().layers:
        layer.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0].dtype))
        layer.self_attn.o_proj.register_forward_hook(lambda module, inputs, output: products.append(output.dtype))
    assert not run.model.broadcast_buffers  # an attribute of DDP
    train(run)
    return result(run) | {"streams": streams, "products": products}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("two")
    run_ranks(in_each_process, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_same_run(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Losses to 1e-6, gradients to 1e-6 of their norm, biases to the bit."""
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-6)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-6)
    for name in ("targets", "tokens", "skipped"):
        assert got[name] == want[name]
    assert torch.equal(got["biases"], want["biases"])
    assert len(got["gradients"]) == len(want["gradients"])
    for ours, theirs in zip(got["gradients"], want["gradients"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert (ours[name] - theirs[name]).norm() <= 1e-6 * theirs[name].norm().clamp_min(1.0), name


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_as_one(name: str, two: list[dict[str, Any]]) -> None:
    make, options = RUNS[name]
    one = trained(make(), **options)
    for found in two:
        assert_same_run(found[name], one)
    for key, tensor in two[0][name]["values"].items():
        assert torch.equal(tensor, two[1][name]["values"][key]), key


def test_the_mean_is_over_all_targets_and_not_of_means(two: list[dict[str, Any]]) -> None:
    """13 targets, 11 of them in one process; and then none in the other."""
    alone = [trained([row], micro_rows=1) for row in uneven_rows()]
    losses, numbers = [one["losses"][0] for one in alone], [one["targets"][0] for one in alone]
    assert numbers == [11, 2]
    mean = (11 * losses[0] + 2 * losses[1]) / 13
    assert two[0]["uneven"]["losses"] == pytest.approx([mean], rel=1e-6)
    assert two[0]["uneven"]["targets"] == [13]
    assert abs(mean - sum(losses) / 2) > 0.1
    for found in two:
        assert found["one empty"]["losses"] == pytest.approx([losses[0]], rel=1e-6)
        for name, gradient in found["one empty"]["gradients"][0].items():
            assert (gradient - alone[0]["gradients"][0][name]).norm() <= 1e-6 * gradient.norm().clamp_min(1.0), name


def test_an_expert_that_no_process_used_has_a_gradient_of_zeros(two: list[dict[str, Any]]) -> None:
    for step in two[0]["one-sided"]["gradients"]:
        for layer in range(4):
            gradient = step[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
            hit = [bool(expert.any()) for expert in gradient]
            assert hit == [True, True, layer > 0, False]


def test_biases_move_by_the_tokens_of_all_processes(two: list[dict[str, Any]]) -> None:
    before = torch.stack([gate.balancing_biases for gate in (layer.mlp.gate for layer in tiny_model().model.layers)])
    moved = two[0]["one-sided"]["biases"] - before
    assert (moved[:, :2] == 0).all()  # 6 of 24 tokens: what was wanted, though half of the tokens of one process
    assert moved[0, 2] > 0
    assert (moved[1:, 2] < 0).all()
    assert (moved[:, 3] > 0).all()
    assert (moved[:, SKIP] == 0).all()


def test_recomputed_layers_count_their_tokens_once(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert_same_run(found["one-sided, recomputed"], found["one-sided"])


def test_numbers_that_are_none_in_one_process_skip_the_step_in_both(two: list[dict[str, Any]]) -> None:
    for found in two:
        before, first, second, third, fourth = found["bad on one"]["seen"]
        assert fourth["skipped"] == [None, "the loss is nan", "the gradient's norm is inf", None]
        assert len(fourth["gradients"]) == 2
        for skipped in (second, third):
            assert all(torch.equal(first["values"][name], skipped["values"][name]) for name in first["values"])
            assert all(torch.equal(a, b) for a, b in zip(first["memory"], skipped["memory"], strict=True))
        for a, b in ((before, first), (third, fourth)):
            assert not torch.equal(a["biases"], b["biases"])
            assert not all(torch.equal(x, y) for x, y in zip(a["memory"], b["memory"], strict=True))
        assert found["bad on one"]["events"] == [("skip", 2), ("skip", 3)]
    last = [found["bad on one"]["seen"][-1]["values"] for found in two]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    assert two[0]["bad on one"]["guard"] == two[1]["bad on one"]["guard"]


def test_a_signal_to_one_process_stops_both_after_the_same_step(two: list[dict[str, Any]]) -> None:
    for found in two:
        stopped = found["stopped"]
        assert stopped["outcome"].stopped == "SIGTERM"
        assert stopped["outcome"].steps == 3
        assert stopped["outcome"].exit_code == 143
        assert stopped["saves"] == [3]
        assert stopped["restored"]
    first, second = (found["stopped"]["values"] for found in two)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_budget_that_is_up_in_one_process_stops_both(two: list[dict[str, Any]]) -> None:
    assert [found["late"]["outcome"].stopped for found in two] == ["wall clock"] * 2
    assert [found["late"]["outcome"].steps for found in two] == [1, 1]


def test_the_stream_stays_in_fp32_under_autocast(two: list[dict[str, Any]]) -> None:
    exact = trained(random_rows(2))
    for found in two:
        assert found["bfloat16"]["streams"] == [torch.float32] * 4
        assert found["bfloat16"]["products"] == [torch.bfloat16] * 4
        assert found["bfloat16"]["losses"] == pytest.approx(exact["losses"], rel=0.05)
        assert found["bfloat16"]["losses"] != exact["losses"]


def test_processes_that_did_not_find_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_accelerator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes were started together .* connected to 0 others"):
        make_accelerator()


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision is 'float16'; expected one of float32, bfloat16"):
        make_accelerator("float16")
