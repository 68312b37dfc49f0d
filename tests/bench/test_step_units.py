"""bench_step without an engine or a learner: lines, assembled steps, bounds, refusals, result files."""

import json
import math

import pytest

from qarl_openrlhf.bench import step_table as tables
from qarl_openrlhf.bench.step_clock import OLD, OPTIMIZER, OTHER, QUANTIZE, TRAIN, PhaseClock
from qarl_openrlhf.bench.step_engine import graph_sizes
from qarl_openrlhf.bench.step_fit import fit, full_depth
from qarl_openrlhf.bench.step_learner import samples_for
from qarl_openrlhf.bench.step_plan import Model, kv_bytes, learner_scheme, runnable
from qarl_openrlhf.bench.step_results import Budget, Results, SettingsDiffer
from qarl_openrlhf.bench.step_workload import Workload
from qarl_openrlhf.cli import bench_step
from qarl_openrlhf.config import ConfigError

GIB = 2**30
WORKLOAD = Workload(prompt=512, response=2048, prompts=16, samples=8, update_samples=64)


# ---- lines ---------------------------------------------------------------------------------------------------------------


def test_a_line_is_found_and_its_residual_is_the_largest_relative_distance():
    line = fit({4: 0.5 + 4 * 0.2, 8: 0.5 + 8 * 0.2, 12: 0.5 + 12 * 0.2})
    assert line.fixed == pytest.approx(0.5) and line.per_layer == pytest.approx(0.2) and line.residual < 1e-12
    assert line.at(36) == pytest.approx(7.7)
    bent = fit({1: 1.0, 2: 2.0, 3: 3.6})  # least squares: 1.3 x - 0.4
    assert bent.per_layer == pytest.approx(1.3) and bent.fixed == pytest.approx(-0.4)
    assert bent.residual == pytest.approx(0.2 / 2.0)  # the middle point is 0.2 below the line
    falling = fit({1: 0.04, 3: 0.03, 5: 0.02})
    assert falling.per_layer == 0 and falling.at(48) == pytest.approx(0.03) and falling.residual == pytest.approx(0.5)


def test_two_depths_make_no_line_and_a_measured_depth_needs_none():
    with pytest.raises(ValueError, match="measure three or more"):
        fit({4: 1.0, 8: 2.0})
    assert full_depth({36: 9.0}, 36) == (9.0, None)
    value, line = full_depth({1: 1.0, 2: 2.0, 4: 4.1}, 4)
    assert value == 4.1 and line.residual > 0  # measured there, and the line says how well it would have said so


# ---- workload ------------------------------------------------------------------------------------------------------------


def test_mixed_lengths_are_a_cut_distribution_with_the_same_mean_for_any_count():
    lengths = WORKLOAD.lengths("mixed")
    assert len(lengths) == 128 and max(lengths) == 2048 and min(lengths) > 50
    assert 2 <= lengths.count(2048) / 128 * 100 <= 15  # a few reach the limit
    assert lengths == WORKLOAD.lengths("mixed") and lengths != sorted(lengths)
    few = WORKLOAD.lengths("mixed", 16)
    assert sum(few) / 16 == pytest.approx(sum(lengths) / 128, rel=0.05)
    assert WORKLOAD.lengths("fixed") == [2048] * 128
    assert WORKLOAD.tokens("fixed") == 128 * 2560 and WORKLOAD.updates == 2


def test_measured_updates_have_an_even_number_of_responses():
    assert samples_for(WORKLOAD, 22528) == 16 and samples_for(WORKLOAD, 100) == 2


# ---- assembled steps -----------------------------------------------------------------------------------------------------


def learner_piece(layers, *, quantize=0.0, per_token=1e-5):
    forward = per_token * layers * 1000
    seconds = {OLD: forward, TRAIN: 4 * forward, OTHER: 0.01, OPTIMIZER: 0.2 * layers, QUANTIZE: quantize * layers}
    return {"tokens": 1000, "updates": 2, "runs": [seconds, seconds]}


@pytest.fixture
def pieces():
    made = {}
    for layers in (4, 8, 12):
        made[f"learner/bf16/fixed/{layers}"] = learner_piece(layers)
        made[f"learner/w4a16/fixed/{layers}"] = learner_piece(layers, quantize=0.01)
    for scheme, seconds, push in (("bf16", 30.0, 230.0), ("w4a16", 20.0, 200.0)):
        made[f"rollout/{scheme}/fixed/36"] = {"seconds": seconds}
        made[f"push/{scheme}/36"] = {"total_ms": push}
    return made


def test_a_step_is_assembled_as_its_formula_says(pieces):
    step = tables.assemble(pieces, "w4a16", "fixed", WORKLOAD, 36)
    tokens, updates = 128 * 2560, 2
    old, other = 1e-5 * 36 * tokens, 0.01 / 1000 * tokens
    assert step[OLD] == pytest.approx(old) and step[TRAIN] == pytest.approx(4 * old)
    assert step[OPTIMIZER] == pytest.approx(updates * 0.1 * 36)  # 0.2 a layer were two updates
    assert step[QUANTIZE] == pytest.approx(0.01 * 36)  # one of the two is in the push
    learner = 5 * old + other + step[OPTIMIZER] + step[QUANTIZE]
    assert step["colocated"] == pytest.approx(20 + learner + 0.2)
    assert step["async"] == pytest.approx(max(20, learner) + 0.2)


@pytest.mark.parametrize("stalled", [(TRAIN, 0), (OLD, 1), (OPTIMIZER, 0)])
def test_a_stall_in_one_of_two_runs_does_not_move_the_line(pieces, stalled):
    before = tables.assemble(pieces, "w4a16", "fixed", WORKLOAD, 36)
    phase, index = stalled
    runs = [dict(run) for run in pieces["learner/w4a16/fixed/4"]["runs"]]
    runs[index][phase] *= 2
    pieces["learner/w4a16/fixed/4"]["runs"] = runs
    assert tables.assemble(pieces, "w4a16", "fixed", WORKLOAD, 36) == before


def test_rollout_only_is_the_bf16_learner_with_the_quantized_engine(pieces):
    steps = {s: tables.assemble(pieces, s, "fixed", WORKLOAD, 36) for s in ("bf16", "w4a16", "w4a16:rollout")}
    assert learner_scheme("w4a16:rollout") == "bf16"
    assert steps["w4a16:rollout"][TRAIN] == steps["bf16"][TRAIN]
    assert steps["w4a16:rollout"]["rollout"] == steps["w4a16"]["rollout"] == 20
    ratios = tables.ratios(steps, "colocated")
    assert ratios["bf16"] == 1 and ratios["w4a16:rollout"] > ratios["w4a16"] > 1


def test_what_was_not_measured_is_a_gap_not_a_number(pieces):
    del pieces["learner/w4a16/fixed/12"]  # two depths are left
    step = tables.assemble(pieces, "w4a16", "fixed", WORKLOAD, 36)
    assert step["rollout"] == 20 and step[TRAIN] is None and step["colocated"] is None
    assert tables.ratios({"w4a16": step}, "colocated") == {}


def test_tables_show_measured_and_least(pieces, capsys):
    steps = {s: tables.assemble(pieces, s, "fixed", WORKLOAD, 36) for s in ("bf16", "w4a16")}
    tables.show(tables.step_table("t", steps, {"bf16": {"rollout": 12.34}}))
    lines = {s: tables.learner_at_full_depth(pieces, s, "fixed", 36) for s in ("bf16", "w4a16")}
    tables.show(tables.fit_table("f", lines))
    shown = capsys.readouterr().out
    gain = steps["bf16"]["colocated"] / steps["w4a16"]["colocated"]
    assert "30 (12.3)" in shown and f" {gain:.2f} " in shown and "0.0%" in shown and "us a token" in shown


# ---- bounds --------------------------------------------------------------------------------------------------------------


def test_bounds_of_the_8b_on_an_h100():
    bf16, w4a16 = (Model.of("8b", None, s).bounds(s, "NVIDIA H100 80GB HBM3") for s in ("bf16", "w4a16"))
    # 15.1 GB of weights (without embeddings) and, for 32 sequences of 128 tokens, 0.6 GB of keys and values, at 3.35 TB/s
    assert bf16.decode_step(32, 128) == pytest.approx((2 * 6.95e9 + 1.24e9 + 0.6e9) / 3.35e12, rel=0.03)
    assert w4a16.decode_step(32, 128) < 0.45 * bf16.decode_step(32, 128)
    assert bf16.forward([2048]) == pytest.approx(2 * 2048 * 7.57e9 / 989e12, rel=0.05)
    assert bf16.forward_backward([2048]) == pytest.approx(4 * bf16.forward([2048]), rel=0.1)
    assert w4a16.quantize(copy=False) == pytest.approx(6.95e9 * 2.52 / 3.35e12, rel=0.02)
    rollout = bf16.rollout(1, 2, 16, [10, 30])
    assert rollout == pytest.approx(10 * bf16.decode_step(2, 21) + 20 * bf16.decode_step(1, 36), rel=0.05)


def test_few_tokens_touch_few_experts():
    bounds = Model.of("30b-a3b", None, "bf16").bounds("bf16", "H200")
    assert bounds.shape.quantized == pytest.approx(29.9e9, rel=0.01) and bounds.active == pytest.approx(2.7e9, rel=0.05)
    one, many = bounds.decode_step(1, 1) * 4.8e12 / 2, bounds.decode_step(128, 1) * 4.8e12 / 2
    assert one == pytest.approx(bounds.active + 2048 * 151936, rel=0.01)
    assert many == pytest.approx(bounds.shape.quantized + 2048 * 151936, rel=0.01)
    assert Model.of("30b-a3b", None, "bf16").bounds("bf16", "CPU") is None


# ---- refusals ------------------------------------------------------------------------------------------------------------


def refusal(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        bench_step.main(["--device", "cpu", *words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--shape", "9b"], "invalid choice: '9b'"),
        (["--shape", "tiny", "--schemes", "fp8"], "fp8 needs a GPU engine: on a CPU use bf16, w4a16 or w8a8"),
        (["--shape", "tiny", "--schemes", "w3a16"], "'w3a16' is unknown"),
        (["--shape", "tiny", "--schemes", "bf16", "bf16"], "names bf16 twice"),
        (["--shape", "tiny", "--layers", "2,3"], "measure them, or three or more other depths"),
        (["--shape", "tiny", "--layers", "2,3,9"], "tiny has 4 layers, not 9"),
        (["--shape", "tiny", "--layers", "four"], "give numbers of layers"),
        (["--shape", "tiny", "--transport", "ipc"], "ipc does not work on a CPU: use gloo"),
        (["--shape", "tiny", "--prompts", "0"], "a whole number of at least 1"),
        (["--shape", "tiny", "--token", "5"], "unknown flag --token"),
        (["--shape", "tiny", "--ds.zero_stag", "3"], "unrecognized arguments: --ds.zero_stag"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(capsys, words, message):
    assert message in refusal(capsys, *words)


def test_a_learner_above_the_cards_memory_is_named_with_what_lowers_it(capsys):
    words = ["--dry_run", "--shape", "8b", "--card", "H100", "--schemes", "bf16", "--layers", "4,8,16"]
    error = refusal(capsys, *words, "--card_gb", "80")
    assert "--layers 16: each learner GPU needs about" in error and "77.6 GiB of the card are usable" in error
    assert "logits" in error and "smaller --tokens" in error


def test_log_probs_in_chunks_let_longer_micro_batches_fit(capsys):
    words = ["--dry_run", "--shape", "8b", "--card", "H100", "--card_gb", "80", "--schemes", "bf16", "--tokens", "22528"]
    words += ["--layers", "3,6,9"]
    assert "lower logits (38.3 GiB): --actor.logprob_chunk 2048" in refusal(capsys, *words)
    assert bench_step.main([*words, "--actor.logprob_chunk", "2048"]) == 0
    assert "learner: world size 1, 3, 6, 9 of 36 layers" in capsys.readouterr().out


def test_an_engine_without_room_for_one_response_is_refused():
    model = Model.of("30b-a3b", None, "bf16")
    with pytest.raises(ConfigError, match="--schemes bf16: no room for a KV cache: engine weights 56.9 GiB .* of 60.0 GiB"):
        kv_bytes(model, "bf16", WORKLOAD, 60 * GIB)
    small = Model.of("30b-a3b", None, "w4a16")
    whole = kv_bytes(small, "w4a16", WORKLOAD, 80 * GIB)
    assert whole == pytest.approx(128 * 2576 * 98304, rel=0.02)  # 96 KiB a token
    assert kv_bytes(small, "w4a16", WORKLOAD, 32 * GIB) < whole


def test_schemes_without_a_kernel_are_left_out_only_if_nobody_named_them():
    schemes, notes = runnable(None, "cpu")
    assert schemes == ["bf16", "w4a16", "w4a16:rollout", "w8a8"] and len(notes) == 2
    assert runnable(["W4A16:g64"], "cpu")[0] == ["w4a16:g64"]


def test_a_plan_for_another_card_prints_its_bounds(capsys):
    words = ["--dry_run", "--shape", "8b", "--card", "H100", "--card_gb", "80", "--tokens", "8192", "--schemes", "bf16", "fp8"]
    assert bench_step.main(words) == 0
    shown = capsys.readouterr().out
    assert "3, 6, 10 of 36 layers" in shown and "least the card allows" in shown and "- (" in shown


# ---- result files --------------------------------------------------------------------------------------------------------


def header(**settings):
    settings = {"shape": "tiny", "prompt": 16} | settings
    return {"commands": ["a"], "card": "CPU", "versions": {"torch": "1"}, "settings": settings}


def test_every_piece_is_on_disk_at_once_and_a_later_run_goes_on(tmp_path):
    path = tmp_path / "r" / "step.json"
    Results(path, header()).put("push/bf16/4", {"total_ms": 1.5})
    assert json.loads(path.read_text())["pieces"] == {"push/bf16/4": {"total_ms": 1.5}}
    later = Results(path, header() | {"commands": ["b"]})
    assert "push/bf16/4" in later
    later.fail("push/w4a16/4", "out of memory")
    later.put("push/w4a16/4", {"total_ms": 1.0})  # the second attempt
    held = json.loads(path.read_text())
    assert len(held["pieces"]) == 2 and held["failures"] == {} and held["commands"] == ["a", "b"]
    assert list(path.parent.iterdir()) == [path]


def test_pieces_of_other_settings_are_not_mixed(tmp_path):
    path = tmp_path / "step.json"
    Results(path, header()).put("x", {})
    with pytest.raises(SettingsDiffer, match="prompt 16, now 32"):
        Results(path, header(prompt=32))
    with pytest.raises(SettingsDiffer, match="torch 1, now 2"):
        Results(path, header() | {"versions": {"torch": "2"}})
    with pytest.raises(SettingsDiffer, match="card CPU, now H100"):
        Results(path, header() | {"card": "H100"})


def test_rollouts_may_be_measured_without_the_learners_flags(tmp_path):
    path = tmp_path / "step.json"
    Results(path, header() | {"learner": {"world": 4}}).put("learner/bf16/mixed/4", {})
    Results(path, header()).put("rollout/bf16/mixed/4", {})
    held = json.loads(path.read_text())
    assert held["learner"] == {"world": 4} and len(held["pieces"]) == 2
    with pytest.raises(SettingsDiffer, match="world 4, now 1"):
        Results(path, header() | {"learner": {"world": 1}})


def test_no_piece_is_begun_that_would_not_end_in_time():
    budget = Budget(minutes=1)
    assert budget.allows("engine", "a")
    budget.took("engine", 70.0)
    assert not budget.allows("engine", "b") and budget.skipped == ["b"]
    assert budget.allows("learner", "c")  # of another kind
    assert not Budget(minutes=0).allows("engine", "d")


def test_graphs_cover_the_tail_and_the_whole_batch():
    assert graph_sizes(128) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128]
    assert graph_sizes(8) == [1, 2, 4, 8] and graph_sizes(1) == [1] and max(map(len, map(graph_sizes, (100, 512, 1024)))) < 25


def test_phases_are_exclusive(monkeypatch):
    import torch

    from qarl_openrlhf.bench import step_clock

    now = [0.0]
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: now[0])
    clock = PhaseClock(torch.device("cpu"))

    def spend(seconds, then=lambda: None):
        now[0] += seconds
        return then()

    quantize = clock.inside(QUANTIZE, lambda: spend(0.5), lambda: True)
    optimizer = clock.phase(OPTIMIZER, lambda: spend(2))
    train = clock.phase(TRAIN, lambda: (spend(1), quantize(), optimizer(), spend(3)))
    clock.phase(OTHER, lambda: (spend(0.25), train()))()
    assert clock.seconds == {OTHER: 0.25, TRAIN: 4.0, OPTIMIZER: 2.0, QUANTIZE: 0.5}
    assert math.isclose(sum(clock.seconds.values()), now[0])
