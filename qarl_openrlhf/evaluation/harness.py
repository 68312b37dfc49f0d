"""ARC-C, GPQA-Diamond and MMLU-Pro by lm-evaluation-harness, on its vLLM backend."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from qarl_openrlhf.data.reasoning_gym import DataError
from qarl_openrlhf.engine.offline import engine_settings
from qarl_openrlhf.files import atomic_file
from qarl_openrlhf.preflight.hub import Wanted

# our name -> (lm-eval's task, the metric that is the score, its few-shot examples (None: the task's own), its set on the hub)
TASKS = {
    "arc-c": ("arc_challenge", "acc_norm,none", 25, "allenai/ai2_arc"),
    "gpqa-diamond": ("gpqa_diamond_cot_zeroshot", "exact_match,flexible-extract", None, "Idavidrein/gpqa"),
    "mmlu-pro": ("mmlu_pro", "exact_match,custom-extract", None, "TIGER-Lab/MMLU-Pro"),
}
SETTINGS = ("model", "weights", "scheme", "engine", "seed")  # of `Settings`, those that its scores depend on
INSTALL = "pip install --no-deps -r requirements/eval.txt"


def name_of(argument: str) -> str | None:
    """'arc-c' or 'arc-c=DIR' -> 'arc-c'; None for what is no task of lm-eval's."""
    name = argument.partition("=")[0]
    return name if name in TASKS else None


def require(arguments: list[str]) -> None:
    """DataError where lm-eval is missing (with the install command), or a DIR is none."""
    if find_spec("lm_eval") is None:
        raise DataError(f"--tasks {', '.join(TASKS)} need lm-evaluation-harness, which is not installed: {INSTALL}")
    for argument in arguments:
        name, _, directory = argument.partition("=")
        if "=" in argument and not Path(directory).is_dir():
            raise DataError(
                f"--tasks {argument}: {directory} is no directory; it must hold what the hub's {TASKS[name][3]} holds "
                f"(hf download --repo-type dataset {TASKS[name][3]} --local-dir DIR)"
            )


def on_hub(arguments: list[str]) -> list[Wanted]:
    """The data sets that are not given as a DIR."""
    names = [argument for argument in arguments if "=" not in argument]
    return [Wanted("--tasks", "datasets", TASKS[name][3], _with_a_copy(name), shown=name) for name in names]


def _with_a_copy(name: str) -> str:
    hub = TASKS[name][3]
    return f"with a copy of it on this machine (hf download --repo-type dataset {hub} --local-dir DIR) write --tasks {name}=DIR"


def check_data(arguments: list[str]) -> None:
    """DataError for a data set that cannot be loaded, before a model is: absent, gated, wrong columns or splits."""
    from lm_eval.tasks import TaskManager

    for argument in arguments:
        name, _, data = argument.partition("=")
        with _loading(argument), _tasks(TASKS[name][0], data) as chosen:
            (chosen.get("task_manager") or TaskManager()).load(chosen["tasks"])


@contextmanager
def _loading(argument: str) -> Iterator[None]:
    name, _, data = argument.partition("=")
    try:
        yield
    except (OSError, ValueError) as error:  # the hub's classes for offline, gated, unknown; wrong columns or splits
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise DataError(f"--tasks {argument}: {data or TASKS[name][3]} cannot be loaded or run ({reason}): {_with_a_copy(name)}") from None


def run(
    directory: str, arguments: list[str], out: Path, *, limit: int | None = None, chat: bool = False, **choice
) -> Iterator[dict]:
    """Yields {our name: {"avg", "stderr", "items", "k", "chat"}} when a task is done; items and responses go to `out`/NAME.jsonl.

    arguments: NAME, or NAME=DIR with a copy of its data set; limit: items of each task (of each of MMLU-Pro's 14 subjects);
    chat: apply the model's chat template; choice: see `engine_settings`.
    """
    require(arguments)
    import lm_eval

    from qarl_openrlhf.engine import plugin
    from qarl_openrlhf.patches.vllm_cpu import lm_eval_backend

    settings, _ = engine_settings(directory, **choice)
    del settings["logprobs_mode"]  # the harness scores texts at temperature 1, whatever it samples with
    plugin.register()
    model = lm_eval_backend()(pretrained=directory, batch_size="auto", **settings)  # one engine for all tasks
    for argument in arguments:
        name, _, data = argument.partition("=")
        task, metric, shots, _ = TASKS[name]
        with _loading(argument), _tasks(task, data) as chosen:
            found = lm_eval.simple_evaluate(
                model=model, num_fewshot=shots, limit=limit, apply_chat_template=chat, bootstrap_iters=0, **chosen
            )
        scores = found["results"][task]
        if metric not in scores:
            raise DataError(
                f"lm-eval's {task} reports no '{metric}' but {', '.join(scores)}: another version? Written for {INSTALL}"
            )
        _write_samples(out / f"{name}.jsonl", found["samples"])
        kind, _, filter_name = metric.partition(",")
        error = scores.get(f"{kind}_stderr,{filter_name}")
        count = sum(samples["effective"] for samples in found["n-samples"].values())
        stderr = error if isinstance(error, float) else 0.0
        yield {name: {"avg": scores[metric], "stderr": stderr, "items": count, "k": 1, "chat": chat}}


@contextmanager
def _tasks(task: str, data: str) -> Iterator[dict]:
    """Arguments of `simple_evaluate` that choose the task; with `data`, it reads that directory in place of the hub."""
    if not data:
        yield {"tasks": [task]}
        return
    from lm_eval.tasks import TaskManager

    kind = "group" if task == "mmlu_pro" else "task"
    with tempfile.TemporaryDirectory(prefix="qarl-lm-eval-") as made:
        # A cache of its own: `datasets` would take files that have changed in a directory for those it has read before.
        local = {"dataset_path": str(Path(data).resolve()), "dataset_kwargs": {"cache_dir": f"{made}/cache"}}
        group = {"group": "qarl_local", "task": [{kind: task, **local}]}
        (Path(made) / "qarl_local.yaml").write_text(json.dumps(group), encoding="utf-8")  # JSON is YAML
        yield {"tasks": ["qarl_local"], "task_manager": TaskManager(include_path=made)}


def _write_samples(path: Path, samples: dict[str, list[dict]]) -> None:
    keep = ("doc_id", "doc", "target", "filter", "resps", "filtered_resps", "exact_match", "acc", "acc_norm")
    with atomic_file(path) as part, open(part, "w", encoding="utf-8") as file:
        for task, rows in samples.items():
            for row in rows:
                kept = {"task": task} | {key: row[key] for key in keep if key in row}
                file.write(json.dumps(kept, ensure_ascii=False, default=str) + "\n")
