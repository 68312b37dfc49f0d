"""ARC-C, GPQA-Diamond and MMLU-Pro by lm-evaluation-harness, on its vLLM backend."""

from __future__ import annotations

from importlib.util import find_spec

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.engine.offline import engine_settings

# our name -> (lm-eval's task, the metric that is the score, its few-shot examples; None: the task's own)
TASKS = {
    "arc-c": ("arc_challenge", "acc_norm,none", 25),
    "gpqa-diamond": ("gpqa_diamond_cot_zeroshot", "exact_match,flexible-extract", None),
    "mmlu-pro": ("mmlu_pro", "exact_match,custom-extract", None),
}
INSTALL = "pip install 'lm-eval==0.4.13'"


def require() -> None:
    """DataError with the install command where lm-eval is missing."""
    if find_spec("lm_eval") is None:
        raise DataError(f"--tasks {', '.join(TASKS)} need lm-evaluation-harness, which is not installed: {INSTALL}")


def run(directory: str, names: list[str], *, limit: int | None = None, **choice) -> dict[str, dict]:
    """{our name: {"avg", "stderr", "items", "k"}}. choice: see `engine_settings`."""
    require()
    import lm_eval

    from qarl_openrlhf.engine import plugin

    settings, _ = engine_settings(directory, **choice)
    del settings["logprobs_mode"]  # the harness scores texts at temperature 1, whatever it samples with
    plugin.register()
    results = {}
    for name in names:
        task, metric, shots = TASKS[name]
        found = lm_eval.simple_evaluate(
            model="vllm", model_args={"pretrained": directory, **settings}, tasks=[task], num_fewshot=shots, limit=limit, batch_size="auto"
        )
        scores = found["results"][task]
        if metric not in scores:
            raise DataError(f"lm-eval's {task} reports no '{metric}' but {', '.join(scores)}: another version? Written for {INSTALL}")
        kind, _, filter_name = metric.partition(",")
        error = scores.get(f"{kind}_stderr,{filter_name}")
        count = sum(samples["effective"] for samples in found["n-samples"].values())
        results[name] = {"avg": scores[metric], "stderr": error if isinstance(error, float) else 0.0, "items": count, "k": 1}
    return results
