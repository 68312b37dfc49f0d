"""Whole two-step training runs on the machine's GPUs, side by side, each with a Ray head of its own."""

import time
from contextlib import contextmanager

from qarl_openrlhf.report import load_run
from tests.e2e.conftest import two_steps, write_prompts
from tests.e2e.test_faults import Run
from tests.tiny_models import VOCABULARY, make_tokenizer, random_model, save_tiny_model

LIMIT_S = 400


def save_tiny_moe(directory) -> str:
    """Eight experts of a size that vLLM's kernels take in groups of 128."""

    def spread(name: str, parameter) -> None:
        if "norm" in name:
            parameter.uniform_(0.8, 1.2)

    shape = dict(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, max_position_embeddings=512)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256)
    tokens = dict(bos_token_id=None, eos_token_id=2, pad_token_id=3)
    rest = dict(tie_word_embeddings=False, initializer_range=0.08)
    random_model("qwen3_moe", spread, **shape, **experts, **tokens, **rest).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return str(directory)


def save_models(tmp_path_factory) -> dict[str, str]:
    """{"dense": directory, "moe": directory} of tiny random models."""
    moe = save_tiny_moe(tmp_path_factory.mktemp("moe"))
    return {"dense": save_tiny_model(tmp_path_factory.mktemp("dense"), "qwen3", hidden=256), "moe": moe}


def selected(request, runs: dict[str, dict]) -> dict[str, dict]:
    """Those that the chosen tests of the module (``-k``) ask for by their parameter "name"; all for a test that takes "runs" only."""
    mine = [item for item in request.session.items if item.module is request.module and "runs" in item.fixturenames]
    names = {item.callspec.params.get("name") if hasattr(item, "callspec") else None for item in mine}
    return {name: changes for name, changes in runs.items() if name in names or None in names}


def flags_of(model: str, prompts: str, out: str, changes: dict) -> dict:
    return two_steps(model, prompts, out) | {
        "device": "cuda",
        "train.colocate_all": True,
        "train.batch_size": 16,  # one update a rollout: all of its micro-batches come before any update
        "vllm.gpu_memory_utilization": 0.05,
        # fixed: the runs beside it grow and shrink while vLLM would measure what of the card is free
        "vllm.engine_args": '{"kv_cache_memory_bytes": 268435456}',
        "vllm.enforce_eager": True,  # graphs and torch.compile: test_parity, test_engine_modes
        "quant.kernel": "triton",
        "objective.name": "tbpo",
        "sync.probe_tol": 0.5,  # a random model's log-probs are far apart
        **changes,
    }


@contextmanager
def side_by_side(changes: dict[str, dict], models: dict[str, str], tmp_path_factory):
    """{name: (exit status, end of its output, rows of its metrics)}; a name that begins with "moe" has the model of experts."""
    prompts, logs = write_prompts(tmp_path_factory.mktemp("data")), tmp_path_factory.mktemp("logs")
    flags = {}
    for name, changed in changes.items():
        model = models["moe" if name.startswith("moe") else "dense"]
        flags[name] = flags_of(model, prompts, str(tmp_path_factory.mktemp(name)), changed)
    started = {name: Run(wanted, logs / f"{name}.txt") for name, wanted in flags.items()}
    until = time.monotonic() + LIMIT_S
    finished = {}
    try:
        for name, run in started.items():
            try:
                status = run.process.wait(max(1.0, until - time.monotonic()))
            except Exception as error:
                status = repr(error)
            rows = load_run(flags[name]["ckpt.output_dir"]).rows if run.metrics.exists() else []
            finished[name] = status, run.text[-3000:], rows
        for run in started.values():
            if run.process.poll() is not None:
                run.assert_gone()
        yield finished
    finally:
        for run in started.values():
            run.end()


def rows_of(finished: dict, name: str) -> list[dict]:
    """The two rows of a run that ended well."""
    status, text, rows = finished[name]
    assert status == 0, f"{name} ended with {status}:\n{text}"
    assert [row["step"] for row in rows] == [1, 2]
    return rows


def assert_aligned(rows: list[dict], name: str) -> None:
    """What has to hold of every run: verified pushes, r = 1 before the first update, an engine near the learner, new codes (BF16 has none)."""
    for row in rows:
        assert row["sync/checksum_ok"] == 1.0 and row["sync/probe_abs_logp"] < 0.5
        # log r is exactly 0 for every token before the first update: its mean is, and the mean of r is 1.
        assert row["objective/ppo_kl"] == 0.0 and row["objective/ratio_mean"] == 1.0
        assert row["objective/in_band_frac_by_update/0"] == 1.0
        assert 0 < row["memory/learner_peak_gib"] <= row["memory/learner_reserved_gib"]
        print(f"{name}: mean |delta logp| to the engine {row['mismatch/abs_logp_mean']:.4f}")
        assert row["mismatch/abs_logp_mean"] < 0.25
    assert rows[-1]["sync/changed_code_frac"] > 0 or "bf16" in name
