"""Any training checkpoint -> a BF16 Hugging Face directory -> a directory of any scheme that `vllm serve` loads."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import torch
import transformers  # its names are loaded where they are used: they import what models are made of
from safetensors import safe_open
from torch import nn

from qarl_openrlhf.export.training_checkpoint import find_deepspeed, is_huggingface, read_deepspeed
from qarl_openrlhf.export.write import export_checkpoint
from qarl_openrlhf.quant import expert_names
from qarl_openrlhf.quant.convert import ConversionReport, convert_model, published_tensors
from qarl_openrlhf.quant.errors import QuantError
from qarl_openrlhf.quant.model_config import first_line, read_config
from qarl_openrlhf.quant.scheme import QuantScheme

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
BF16 = QuantScheme.parse("bf16")


def bf16_directory(source: str, out: str | Path, *, model: str | None = None, tag: str | None = None) -> str:
    """Write a DeepSpeed checkpoint as BF16 safetensors to `out`; a Hugging Face directory (or hub name) is returned as it is.

    model: the model the training began from, for config and tokenizer, which DeepSpeed's files lack.
    """
    step = deepspeed_step(source, tag)
    if step is None:
        return source
    if model is None:
        raise QuantError(f"{source} is a DeepSpeed checkpoint, which has no config: name the model it was trained from with --model")
    config = read_config(model)
    config.dtype = torch.bfloat16
    tensors = read_deepspeed(step)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with torch.device("meta"):
        expected = {n: p.shape for n, p in transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_parameters()}
    tensors = {name: tensor for name, tensor in tensors.items() if name in expected or "rotary" not in name}
    wrong = [n for n in expected.keys() | tensors.keys() if n not in tensors or expected.get(n) != tensors[n].shape]
    if wrong:
        name = min(wrong)
        here = list(tensors[name].shape) if name in tensors else "missing"
        there = list(expected[name]) if name in expected else "missing"
        raise QuantError(f"{step} is no checkpoint of {model}: {name} is {here} here, {there} there ({len(wrong)} parameters differ)")
    export_checkpoint(tensors.items(), config, str(out), BF16, tokenizer=_tokenizer(model), generation_config=_generation_config(model))
    return str(out)


def deepspeed_step(source: str, tag: str | None = None) -> Path | None:
    """The one of a DeepSpeed checkpoint that is read; None of a Hugging Face directory and of a hub name."""
    path = Path(source)
    if not path.exists() and _is_path(source):
        raise QuantError(f"{source} does not exist: give a DeepSpeed checkpoint, a Hugging Face directory or a hub name")
    if is_huggingface(path) or not path.exists():  # a name on the hub: transformers says if there is none
        if tag is not None:
            raise QuantError(f"--tag {tag} chooses a DeepSpeed checkpoint, and {source} is none: leave it out")
        return None
    return find_deepspeed(path, tag)


def load_learner(
    directory: str, scheme: QuantScheme, *, skip: tuple[str, ...] = (), tp: int = 1, cache: str = "packed"
) -> tuple[nn.Module, ConversionReport]:
    """The learner of a BF16 directory: the model that training would run, with its quantized forward. cache: see `convert_model`."""
    config = read_config(directory)
    if getattr(config, "quantization_config", None):
        raise QuantError(f"{directory} is quantized already; an export starts from BF16 weights (quantizing twice changes the codes)")
    model = _model(directory).eval()
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    if unknown := [pattern for pattern in skip if not any(fnmatchcase(name, pattern) for name in names)]:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise QuantError(f"--skip {unknown[0]} is no layer of {directory}; layers are called {linears[0]}, a pattern *.{linears[0].rpartition('.')[2]}")
    return model, convert_model(model, scheme, skip=skip, tp=tp, cache=cache)


def export_directory(model: nn.Module, source: str, out: str | Path, scheme: QuantScheme) -> int:
    """Write a loaded learner to `out` and read every byte back; returns the number of tensors."""
    export_checkpoint(model, model.config, str(out), scheme, tokenizer=_tokenizer(source))
    return check_bytes(model, out, scheme)


def check_bytes(model: nn.Module, directory: str | Path, scheme: QuantScheme) -> int:
    """QuantError naming the first tensor in `directory` that is not, bit for bit, what the learner publishes."""
    written = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            written |= {name: path for name in file.keys()}  # noqa: SIM118  safe_open has no iterator
    count = 0
    for name, tensor in expert_names.to_checkpoint(published_tensors(model, scheme)):
        path = written.pop(name, None)
        if path is None:
            raise QuantError(f"{directory} lacks {name}")
        with safe_open(path, "pt") as file:
            if not _same_bytes(file.get_tensor(name), tensor.cpu()):
                raise QuantError(f"{name} in {path} differs from what the learner publishes")
        count += 1
    if written:
        raise QuantError(f"{directory} has {len(written)} tensors too many, one is {min(written)}")
    return count


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = a.dtype == b.dtype and a.shape == b.shape
    return same_kind and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _is_path(source: str) -> bool:
    """Whether a name that is no file here can only have been meant as a path: the hub's are NAME or OWNER/NAME."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def _model(directory: str) -> nn.Module:
    """QuantError also for weights that are missing or of another shape: transformers would put random ones in their place."""
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # no or cut-off safetensors, a config that makes no model: many classes
        raise QuantError(f"{directory} cannot be loaded: {first_line(error)}") from None
    if missing := sorted(map(str, found["missing_keys"])):
        raise QuantError(f"{directory} lacks {len(missing)} weights of its model, one is {missing[0]}")
    if found["mismatched_keys"]:
        name, here, there = min(found["mismatched_keys"])
        raise QuantError(f"{directory}: {name} is {list(here)} in its files, {list(there)} by its config.json")
    return model


def _generation_config(source: str) -> transformers.GenerationConfig | None:
    """The model's own, whose end tokens an engine stops at besides the tokenizer's; None without one."""
    try:
        return transformers.GenerationConfig.from_pretrained(source)
    except Exception:  # none, or a broken one: what is made from config.json does
        return None


def _tokenizer(source: str):
    # Of a directory without one, transformers makes a tokenizer with an empty vocabulary.
    if Path(source).is_dir() and not any(path for pattern in TOKENIZER_FILES for path in Path(source).glob(pattern)):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except Exception:  # none, or a broken one; weights alone are an export, too: vLLM then needs --tokenizer
        return None
