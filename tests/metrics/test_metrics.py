import json
import math
import types

import pytest
import torch

from qarl_openrlhf.metrics import error_tokens, mismatch, progress, writer
from qarl_openrlhf.metrics.accumulate import Sums
from qarl_openrlhf.report import load_run


def batch(rows=6, width=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[0] = False
    learner = -torch.rand(rows, width, generator=g) * 5
    sampler = learner + 0.1 * torch.randn(rows, width, generator=g)
    return learner, sampler, mask


def reduced(*parts):
    sums = Sums()
    for part in parts:
        sums.merge(mismatch.statistics(*part))
    return sums.metrics()


def test_mismatch_equals_its_definition():
    learner, sampler, mask = batch()
    metrics = reduced((learner, sampler, mask))
    delta = (learner - sampler).double()[mask]
    assert metrics["mismatch/abs_logp_mean"] == pytest.approx(float(delta.abs().mean()), rel=1e-5)
    assert metrics["mismatch/abs_logp_max"] == pytest.approx(float(delta.abs().max()), rel=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(float(-delta.mean()), rel=1e-4)
    assert metrics["mismatch/k3"] == pytest.approx(float((delta.exp() - 1 - delta).mean()), rel=1e-3)
    rows = [(learner[i] - sampler[i])[mask[i]].mean().exp() for i in range(1, len(mask))]
    assert metrics["mismatch/seq_ratio_min"] == pytest.approx(float(min(rows)), rel=1e-5)
    assert metrics["mismatch/seq_ratio_max"] == pytest.approx(float(max(rows)), rel=1e-5)
    ratios = delta.exp().sort().values
    assert metrics["mismatch/ratio_p01"] == pytest.approx(float(ratios[round(0.01 * len(ratios)) - 1]), rel=1e-5)


def test_mismatch_does_not_depend_on_the_split():
    learner, sampler, mask = batch()
    whole = reduced((learner, sampler, mask))
    parts = reduced(*[(learner[i : i + 1], sampler[i : i + 1], mask[i : i + 1]) for i in range(len(mask))])
    assert whole.keys() == parts.keys()
    for name in whole:
        assert parts[name] == pytest.approx(whole[name], rel=1e-5), name


@pytest.mark.parametrize("width", [1, 2, 40, 16384, 16385, 40000])
def test_mismatch_by_position_counts_every_token_once(width):
    learner, sampler, mask = batch(rows=2, width=width)
    mask[1] = True
    ratios = mismatch.statistics(learner, sampler, mask)["ratios"]
    buckets = {int(name.rsplit("/")[-1]): int(n) for name, (_, n) in ratios.items() if "by_position" in name}
    assert list(buckets) == [2**i for i in range(len(buckets))] and sum(buckets.values()) == width
    assert max(buckets) >= width > max(buckets) // 2, "a bucket that no token can be in, or none for the last"


def test_infinite_sampler_log_prob_is_a_difference_of_twenty_and_masked_nan_is_ignored():
    learner, sampler, mask = batch()
    sampler[mask.nonzero()[0][0], mask.nonzero()[0][1]] = -math.inf
    learner[~mask] = math.nan
    metrics = reduced((learner, sampler, mask))
    assert metrics["mismatch/abs_logp_max"] == 20 and all(math.isfinite(v) for v in metrics.values())


def test_fully_masked_batch_reports_nothing():
    learner, sampler, mask = batch()
    assert reduced((learner, sampler, torch.zeros_like(mask))) == {}


def test_repeats_marks_the_second_copy_of_an_ngram_only():
    tokens = torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3, 4, 4, 4, 4, 4, 4]])
    marked = error_tokens.repeats(tokens, torch.ones_like(tokens).bool())
    # "1 2 3 4" returns at index 8; the first "4 4 4 4" ends at 11, its repeats are the tokens after it
    assert marked[0].nonzero().flatten().tolist() == [8, 12, 13]
    hidden = torch.ones_like(tokens).bool()
    hidden[0, 5] = False
    assert error_tokens.repeats(tokens, hidden)[0, 8].item() is False


def test_repeats_equal_a_loop_over_the_tokens():
    g = torch.Generator().manual_seed(0)
    for rows, width, vocabulary in ((6, 200, 3), (4, 90, 2), (3, 3, 2), (2, 4, 1), (5, 300, 40)):
        tokens = torch.randint(0, vocabulary, (rows, width), generator=g)
        mask = torch.rand(rows, width, generator=g) < 0.8
        mask[0] = False
        expected = torch.zeros_like(mask)
        for row in range(rows):
            seen, window = set(), ()
            for column in mask[row].nonzero().flatten().tolist():
                window = (*window, int(tokens[row, column]))[-4:]
                expected[row, column] = len(window) == 4 and window in seen
                seen.add(window)
        assert torch.equal(error_tokens.repeats(tokens, mask), expected), (rows, width, vocabulary)


def test_error_token_rates_by_sign():
    tokens = torch.arange(1, 15).repeat(2, 1)
    experience = types.SimpleNamespace(
        sequences=torch.cat([tokens[:, :1], tokens], 1),
        action_mask=torch.ones(2, 14),
        rollout_log_probs=torch.full((2, 14), -1.0),
        advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 14),
    )
    experience.rollout_log_probs[1, :7] = -10.0
    sums = Sums()
    sums.merge(error_tokens.statistics(experience))
    metrics = sums.metrics()
    assert metrics["error_token/low_prob_rate"] == 0.25
    assert metrics["error_token/low_prob_rate_pos"] == 0 and metrics["error_token/low_prob_rate_neg"] == 0.5


def test_writer_reader_and_progress_line(tmp_path):
    out = writer.MetricsWriter(str(tmp_path))
    out.write(1, {"rollout/reward_mean": torch.tensor(0.25), "mismatch/kl": math.nan, "text": "not a number"})
    out.write(2, {"rollout/reward_mean": 0.5})
    out.write(2, {"rollout/reward_mean": 0.75})
    rows = load_run(tmp_path).rows
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["rollout/reward_mean"] == 0.75
    assert rows[0]["mismatch/kl"] is None and "text" not in rows[0]
    for line in open(out.path):
        json.loads(line)
    line = progress.step_line(rows[0])
    assert "step    1" in line and "0.250" in line and "-" in line


@pytest.mark.parametrize("scheme", ["w4a16:g32", "w8a8", "fp8"])
def test_changed_codes_counts_what_differs(scheme):
    from qarl_openrlhf.metrics.changed_codes import ChangedCodes
    from qarl_openrlhf.quant.packing import count_changed_codes, quantize_weight
    from qarl_openrlhf.quant.scheme import QuantScheme

    scheme = QuantScheme.parse(scheme)
    torch.manual_seed(0)
    w = torch.randn(16, 64, dtype=torch.bfloat16)
    moved = w.clone()
    moved[3, :7] *= -1
    old, new = quantize_weight(w, scheme), quantize_weight(moved, scheme)
    watcher = ChangedCodes()
    norm = ("norm.weight", torch.ones(64, dtype=torch.bfloat16))
    differ = count_changed_codes(old, new)[0]
    for packed, changed, in_all in ((old, 0, 0), (new, differ, differ), (new, 0, differ), (old, differ, 0)):
        stream = [(f"layer.{suffix}", t) for suffix, t in packed.tensors().items()] + [norm]
        assert list(watcher.watch(stream)) == stream
        assert watcher.metrics() == {
            "sync/changed_code_frac": changed / w.numel(),
            "sync/changed_code_frac_total": in_all / w.numel(),
        }
    assert differ > 0


@pytest.mark.parametrize(
    "value, text",
    [(0.0, "0%"), (1.0, "100%"), (0.123, "12%"), (0.0999, "10%"), (0.0029, "0.29%"), (4.2e-6, "0.00042%"), (1 / 134e6, "7.5e-07%"), (1e-3, "0.1%")],
)
def test_small_shares_are_not_rounded_to_nothing(value, text):
    assert progress.share(value) == text
    assert f"changed {text:>8}" in progress.step_line({"step": 1, "sync/changed_code_frac": value})


@pytest.mark.parametrize("codes", [True, False])
def test_a_bf16_run_has_no_codes_to_tell_of(tmp_path, codes):
    out = writer.MetricsWriter(str(tmp_path))
    shown = []

    class Stop:  # one step is written before it is set
        def wait(self, seconds: float) -> bool:
            out.write(1, {"rollout/reward_mean": 0.5, "sync/changed_code_frac": 0.0, "rollout/tok_per_s": 7.0})
            return True

    progress.follow(str(tmp_path), Stop(), lambda line, flush: shown.append(line), codes=codes)
    assert len(shown) == 1 and ("changed" in shown[0]) == codes
    assert "reward    0.500" in shown[0] and "tok/s        7" in shown[0]


def test_a_run_in_a_used_directory_is_followed_from_its_first_line(tmp_path):
    old = writer.MetricsWriter(str(tmp_path))
    old.note("of the run before")
    tail = progress._Tail(old.notes_path)
    (tmp_path / "notes.jsonl").rename(tmp_path / "moved")
    new = writer.MetricsWriter(str(tmp_path))
    for text in ("a first, long enough to reach beyond the old file's end", "second"):
        new.note(text)
    assert [row["note"] for row in tail.new_rows()] == ["a first, long enough to reach beyond the old file's end", "second"]
    new.note("third")
    assert [row["note"] for row in tail.new_rows()] == ["third"]
