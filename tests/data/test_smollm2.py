"""The converter against transformers' own reading of the same GGUF file."""

import json

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl_openrlhf.data import smollm2

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 64, 2, 4, 2, 96


def write_tiny_gguf(path, *, pre="smollm", architecture="llama", untied=False, extra_tensor=None):
    """A Llama GGUF with random Q8_0 weights and a byte-level vocabulary with SmolLM2's special tokens."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + sorted(ByteLevel.alphabet()) + ["ĠĠ", "Ġa"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(special) + [1] * (len(tokens) - len(special)))
    writer.add_token_merges(["Ġ Ġ", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")

    def add(name, *shape):
        w = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, w)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(w, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if untied:
        add("output.weight", len(tokens), HIDDEN)
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        for name, *shape in (
            ("attn_norm", HIDDEN),
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv, HIDDEN),
            ("attn_v", kv, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_norm", HIDDEN),
            ("ffn_gate", FFN, HIDDEN),
            ("ffn_up", FFN, HIDDEN),
            ("ffn_down", HIDDEN, FFN),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    if extra_tensor:
        add(extra_tensor, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("hf") / "model"
    assert smollm2.convert(out, source) is True
    return out


def test_weights_equal_what_transformers_reads(source, converted):
    ours = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert mine.keys() == reference.keys()
    for name in reference:
        assert torch.equal(mine[name], reference[name]), name
    ids = torch.arange(3, 19)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)  # config: rope, eps, heads


def test_untied_head_is_kept(tmp_path):
    smollm2.convert(tmp_path / "out", write_tiny_gguf(tmp_path / "untied.gguf", untied=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not model.config.tie_word_embeddings
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_directory_is_bf16_safetensors_with_the_right_ends(converted):
    from safetensors import safe_open

    with safe_open(converted / "model.safetensors", "pt") as file:
        assert {file.get_tensor(k).dtype for k in file.keys()} == {torch.bfloat16}
        assert "lm_head.weight" not in file.keys()  # tied
    generation = json.loads((converted / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["pad_token_id"] == 2
    assert not {"temperature", "top_p", "top_k"} & generation.keys()
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_end|>", "<|im_start|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a b"}], tokenize=False)
    assert chat == "<|im_start|>a b<|im_end|>"


def test_digits_are_split_from_spaces_as_the_model_was_trained(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    # transformers' conversion gives Ġ, Ġ, 7 here: the pre-tokenizer's digit rule is lost
    assert tokenizer.tokenize("  7") == ["ĠĠ", "7"]
    text = "7 + 12 = 19\n a é 日本 ▁ <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("x").input_ids == tokenizer("x", add_special_tokens=False).input_ids  # no BOS


def test_second_run_does_nothing_and_other_directories_are_left_alone(source, converted, tmp_path):
    before = (converted / "model.safetensors").stat().st_mtime_ns
    assert smollm2.convert(converted, source) is False
    assert (converted / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(smollm2.ConversionError, match="does not hold this conversion"):
        smollm2.convert(tmp_path, source)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_failed_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("disk full")

    monkeypatch.setattr(smollm2, "build_tokenizer", fail)  # after config.json was written
    with pytest.raises(RuntimeError):
        smollm2.convert(tmp_path / "out", source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pre": "gpt-2"}, "pre-tokenizer 'gpt-2'"),
        ({"extra_tensor": "blk.0.attn_q_norm.weight"}, "blk.0.attn_q_norm.weight"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path, change, message):
    path = write_tiny_gguf(tmp_path / "other.gguf", **change)
    with pytest.raises(smollm2.ConversionError, match=message):
        smollm2.convert(tmp_path / "out", path)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_packaged_model_answers(tmp_path):
    smollm2.convert(tmp_path / "smollm2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2", dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == tokenizer.eos_token_id and len(out) < 24  # it stops by itself
