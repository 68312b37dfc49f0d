"""A small Qwen3 that partly solves a reasoning-gym task, with prompts: `python -m qarl_openrlhf.data.small_qwen3 OUT_DIR`.

Reinforcement learning needs a policy that solves some problems and not others. This makes one of any size from nothing, with a
tokenizer of bytes: supervised training on problems with their solutions until it solves the share `--stop_at`. With `--base`
it teaches a model that there is, of any architecture, in that model's own tokens; with `--scheme` through that scheme's weights
(straight-through, as QaRL trains), so that the quantized policy is the one that learns, and with `--both N` in BF16, too, N steps
for each of the others: one start for arms that sample in either. OUT_DIR gets

    model/          Hugging Face directory, BF16 (`--actor.model_name_or_path`)
    prompts.jsonl   prompts for reinforcement learning (`--data.input_key input --data.label_key label`)
    heldout.jsonl   the same columns, for evaluation
    training.json   settings, learning curve, share solved, longest response in tokens

No problem is in two of supervised training, prompts and held-out set. Hidden and intermediate size are multiples of 256, so
that every scheme runs, W4A8 included; a `--base` has its own. The same arguments give the same files on the same machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from qarl_openrlhf.data.reasoning_gym import DataError, parse_setting, problems, rows_of
from qarl_openrlhf.data.worked_sums import STYLES, distinct, prompt_style, response, supervised
from qarl_openrlhf.files import atomic_directory, let_umask_rule, why_unwritable
from qarl_openrlhf.lines import write_jsonl
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.scheme import QuantScheme

RECORD = "training.json"
VERSION = 1
CHECKED = 256  # problems that the share solved is taken from, during training and at its end


@dataclass(frozen=True)
class Settings:
    """What determines OUT_DIR, but for the machine. DataError names the setting that cannot be."""

    task: str = "chain_sum"
    config: dict = field(default_factory=lambda: {"min_terms": 4, "max_terms": 4, "min_digits": 2, "max_digits": 2})
    style: str = "steps"
    exclude: str | None = None
    slips: float = 0.0
    prompts: int = 1024
    heldout: int = 512
    base: str | None = None
    scheme: str = "bf16"
    both: int = 0
    layers: int = 4
    hidden: int = 256
    intermediate: int = 768
    steps: int = 1000
    batch_size: int = 64
    lr: float = 1e-3
    stop_at: float | None = None
    check_every: int = 100
    seed: int = 0

    def __post_init__(self):
        for name in ("hidden", "intermediate"):
            if getattr(self, name) < 256 or getattr(self, name) % 256:
                raise DataError(f"--{name} {getattr(self, name)}: give a multiple of 256, which every scheme can quantize")
        for name in ("prompts", "heldout", "layers", "steps", "batch_size", "check_every"):
            if getattr(self, name) < 1:
                raise DataError(f"--{name} {getattr(self, name)}: give 1 or more")
        if not 0 <= self.slips < 1 or (self.slips and self.style != "steps"):
            raise DataError(f"--slips {self.slips}: give a share of partial results, 0 or more and under 1 (with --style steps)")
        try:
            scheme = QuantScheme.parse(self.scheme)
        except QuantError as error:
            raise DataError(f"--scheme {self.scheme}: {error}") from None
        if scheme.rollout_only:
            raise DataError(f"--scheme {self.scheme}: nothing is rolled out here: write {replace(scheme, rollout_only=False)}")
        if self.both < 0:
            raise DataError(f"--both {self.both}: give a number of steps, 0 or more")
        if self.both and not scheme.quantized:
            raise DataError(f"--both: --scheme {self.scheme} is BF16 itself: name a quantization scheme, e.g. --scheme w4a16")
        if not self.lr > 0:
            raise DataError(f"--lr {self.lr}: give a positive learning rate")
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise DataError(f"--stop_at {self.stop_at}: give a share of solved problems, above 0 and at most 1")


def load_base(directory: str):
    """(model in FP32, tokenizer) of a Hugging Face directory. DataError where there is none, or no token ends a response."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"--base {directory}: no causal language model with a tokenizer: {str(error).splitlines()[0]}") from None
    if tokenizer.eos_token_id is None:
        raise DataError(f"--base {directory}: its tokenizer has no end token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def convert(model, settings: Settings) -> dict:
    """Let the model compute in BF16 and through the scheme's weights: context managers by scheme, the settings' own last.

    DataError where one of its layers cannot run the scheme.
    """
    from contextlib import nullcontext
    from functools import partial

    from qarl_openrlhf.quant.convert import convert_model
    from qarl_openrlhf.quant.linear import quantized_forward

    scheme = QuantScheme.parse(settings.scheme)
    try:
        convert_model(model, replace(scheme, rollout_only=scheme.quantized), cache="dequant")
    except QuantError as error:
        raise DataError(f"--scheme {settings.scheme}: {error}") from None
    return {"bf16": nullcontext} | ({settings.scheme: partial(quantized_forward, model)} if scheme.quantized else {})


def build_model(settings: Settings, tokenizer):
    """A random Qwen3 in FP32: heads of 64 features, two query heads a key-value head, embeddings and output layer apart."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = settings.hidden // 64
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(settings.seed)
    return Qwen3ForCausalLM(config).float()


@dataclass(frozen=True)
class Sets:
    """Problems of which none is in two of the three: ``entries`` (reasoning-gym's) and ``rows`` (as they are written) of "prompts" and
    "heldout"; ``pairs``, endless (prompt, response) of supervised training."""

    entries: dict[str, list[dict]]
    rows: dict[str, list[dict]]
    pairs: Iterator[tuple[str, str]]


def draw(settings: Settings) -> Sets:
    """DataError for a task that there is not, that has too few problems, or that lacks what the style needs."""
    task, config, seed, exclude = settings.task, settings.config, settings.seed, settings.exclude
    entries, apart = {}, set()
    for name, count in (("heldout", settings.heldout), ("prompts", settings.prompts)):
        entries[name] = distinct(problems(task, config, f"{name} {seed}", exclude), count, but=apart)
        apart |= {entry["question"] for entry in entries[name]}
    pairs = supervised(task, config, settings.style, seed, exclude, slips=settings.slips, but=apart)
    next(pairs)  # a task without what the style needs is an error here, before torch is imported
    return Sets(entries, {name: rows_of(task, entries[name], [], prompt_style(settings.style)) for name in ("prompts", "heldout")}, pairs)


class Pupil:
    """The model that is taught, with its tokenizer and the ``forms`` that it computes in. DataError for a device or base that is not there."""

    def __init__(self, settings: Settings, sets: Sets, device: str):
        import torch

        from qarl_openrlhf.data.byte_tokenizer import byte_tokenizer

        if device == "cuda" and not torch.cuda.is_available():
            raise DataError("--device cuda: torch sees no GPU")
        if device == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32: finer than the BF16 in which the weights are saved
        if settings.base:
            model, self.tokenizer = load_base(settings.base)
            torch.manual_seed(settings.seed)
        else:
            self.tokenizer = byte_tokenizer()
            model = build_model(settings, self.tokenizer)
        self.settings, self.sets, self.model = settings, sets, model.to(device)
        self.forms = convert(self.model, settings)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        entries = [*sets.entries["prompts"], *sets.entries["heldout"]]
        self.lengths = [len(self.tokenizer(response(entry, settings.style))["input_ids"]) + 1 for entry in entries]

    def solved(self, name: str, temperature: float, form: str) -> float:
        """The share of the first CHECKED problems of a set that it solves in a form."""
        from qarl_openrlhf.data.pretrain import solved

        rows, length = self.sets.rows[name][:CHECKED], max(self.lengths) + 8
        with self.forms[form]():
            return solved(self.model, self.tokenizer, rows, max_new_tokens=length, temperature=temperature, seed=self.settings.seed)

    def train(self, show: Callable[[str], None]) -> list[dict]:
        """Teach it until it solves enough, in every form that it is taught in, and round it to BF16; returns the curve."""
        import torch

        from qarl_openrlhf.data.pretrain import train

        settings = self.settings
        taught = [settings.scheme, *["bf16"] * settings.both]
        curve = train(
            self.model,
            self.tokenizer,
            self.sets.pairs,
            steps=settings.steps,
            batch_size=settings.batch_size,
            lr=settings.lr,
            check=lambda: min(self.solved("prompts", 1.0, form) for form in sorted(set(taught))),
            check_every=settings.check_every,
            stop_at=settings.stop_at,
            show=show,
            forms=[self.forms[form] for form in taught],
        )
        self.model = self.model.to(torch.bfloat16)  # what is saved is what is measured
        self.model.quant_cache.invalidate()
        return curve

    def shares(self) -> dict[str, float]:
        """Shares solved, in the settings' scheme and, where that is another, in BF16."""
        scheme = self.settings.scheme
        found = {
            "prompts_sampled": self.solved("prompts", 1.0, scheme),
            "heldout_sampled": self.solved("heldout", 1.0, scheme),
            "heldout_greedy": self.solved("heldout", 0.0, scheme),
        }
        if len(self.forms) > 1:
            found |= {f"heldout_{how}_bf16": self.solved("heldout", temperature, "bf16") for how, temperature in (("sampled", 1.0), ("greedy", 0.0))}
        return found

    def apart(self) -> float:
        """Nats a token between its two forms, on right responses."""
        from qarl_openrlhf.data.pretrain import apart_in

        rows, entries = self.sets.rows["heldout"][:CHECKED], self.sets.entries["heldout"]
        written = [(row["input"], response(entry, self.settings.style)) for row, entry in zip(rows, entries)]
        return apart_in(self.forms.values(), self.model, self.tokenizer, written)


def make(out: Path, settings: Settings, *, device: str = "cpu", show=print) -> dict | None:
    """Fills the directory `out`; returns its training.json, or None when `out` already holds what `settings` make.

    `out` appears in one rename, complete or not at all. DataError when it holds anything else, or for settings that fail.
    """
    stamp = _stamp_of(settings)
    if _holds(out, stamp):
        return None
    sets = draw(settings)
    pupil = Pupil(settings, sets, device)
    lengths = pupil.lengths
    show(f"{pupil.parameters / 1e6:.2f}M parameters; responses of {min(lengths)} to {max(lengths)} tokens")
    curve = pupil.train(show)
    record = {
        "settings": stamp,
        "parameters": pupil.parameters,
        "response_tokens": {"mean": round(sum(lengths) / len(lengths), 1), "max": max(lengths)},
        "solved": pupil.shares(),
        "curve": curve,
    }
    if len(pupil.forms) > 1:
        record["apart"] = pupil.apart()
        show(f"BF16 and {settings.scheme} are {record['apart']:.4f} nats a token apart on right responses")
    with atomic_directory(out) as part:
        pupil.model.save_pretrained(part / "model")
        let_umask_rule(part / "model")
        pupil.tokenizer.save_pretrained(part / "model")
        for name, rows in sets.rows.items():
            write_jsonl(part / f"{name}.jsonl", rows)
        (part / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def _stamp_of(settings: Settings) -> dict:
    stamp = {"version": VERSION, **asdict(settings)}
    for name, before in (("base", None), ("scheme", "bf16"), ("both", 0)):  # a directory made before there were these is still right
        if stamp[name] == before:
            del stamp[name]
    return stamp


def _holds(out: Path, stamp: dict) -> bool:
    """Whether `out` was made with these settings; DataError where it cannot be made."""
    if out.is_dir() and any(out.iterdir()):
        if _stamp_in(out) == stamp:
            return True
        raise DataError(f"{out} exists and does not hold this model: remove it or name another")
    if reason := why_unwritable(out.parent if out.is_dir() else out):
        raise DataError(f"{out}: {reason}: name a directory that can be written to")
    return False


def _stamp_in(out: Path) -> dict | None:
    try:
        return json.loads((out / RECORD).read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_parser() -> argparse.ArgumentParser:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m qarl_openrlhf.data.small_qwen3",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("out_dir", help="directory to write; left alone when it already holds this model")
    parser.add_argument("--task", default=default.task, help="reasoning-gym task")
    config = list(default.config.items())
    parser.add_argument("--config", type=parse_setting, nargs="*", default=config, metavar="NAME=VALUE")
    parser.add_argument("--style", choices=STYLES, default=default.style, help="steps: each partial result on a line")
    parser.add_argument("--exclude", default=None, metavar="TEXT", help="drop problems whose question contains TEXT")
    parser.add_argument("--slips", type=float, default=default.slips, help="share of partial results that training has wrong")
    parser.add_argument("--prompts", type=int, default=default.prompts, help="prompts for reinforcement learning")
    parser.add_argument("--heldout", type=int, default=default.heldout, help="held-out problems")
    parser.add_argument("--base", metavar="MODEL_DIR", help="teach this model (not a new Qwen3 of --layers, --hidden ...)")
    parser.add_argument("--scheme", default=default.scheme, help="teach through the weights of this quantization scheme, e.g. w4a16:g64")
    parser.add_argument(
        "--both", type=int, default=default.both, metavar="N", help="teach in BF16, too, N steps for each through --scheme, until both solve --stop_at"
    )
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--hidden", type=int, default=default.hidden, help="a multiple of 256; heads have 64 features")
    parser.add_argument("--intermediate", type=int, default=default.intermediate, help="a multiple of 256")
    parser.add_argument("--steps", type=int, default=default.steps, help="training steps at most")
    parser.add_argument("--batch_size", type=int, default=default.batch_size, help="problems a step")
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--stop_at", type=float, default=None, help="end at this share of prompts solved, at temperature 1")
    parser.add_argument("--check_every", type=int, default=default.check_every, help="steps between looks at the share solved")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights, problems and sampling")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    return parser


def main(argv: list[str] | None = None) -> None:
    given = vars(make_parser().parse_args(argv))
    out, device = Path(given.pop("out_dir")), given.pop("device")
    try:
        settings = Settings(**given | {"config": dict(given["config"])})
        record = make(out, settings, device=device, show=lambda line: print(f"small_qwen3: {line}", flush=True))
    except (DataError, OSError) as error:
        raise SystemExit(f"small_qwen3: error: {error}") from None
    if record is None:
        print(f"small_qwen3: already there: {out}")
    else:
        shares = ", ".join(f"{name} {share:.3f}" for name, share in record["solved"].items())
        print(f"small_qwen3: wrote {out}: solved {shares}; responses of up to {record['response_tokens']['max']} tokens")


if __name__ == "__main__":
    main()
