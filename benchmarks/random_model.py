"""A model of random weights in a known shape, with a tokenizer and prompts: `python benchmarks/random_model.py SHAPE OUT_DIR`.

For trying a recipe on a machine that holds no download. OUT_DIR is a Hugging Face directory (`--actor.model_name_or_path`), and
`prompts.jsonl` in it has columns `prompt` and `label` for `benchmarks/mismatch_reward.py`. Tokens are bytes, in a vocabulary of
the shape's size: whatever the model samples has a text.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers

from qarl_openrlhf.bench import sync
from qarl_openrlhf.data.byte_tokenizer import byte_tokenizer
from qarl_openrlhf.files import atomic_directory

PROMPTS = 512
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def save_tokenizer(directory: Path, vocabulary: int) -> int:
    """Writes it; returns the id that ends a response."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer.json"
    made = json.loads(path.read_text())
    words = made["model"]["vocab"]
    others = len(tokenizer) - len(words)  # special tokens and the like come after all words
    words |= {f"<|more_{i}|>": i for i in range(len(words), vocabulary - others)}
    path.write_text(json.dumps(made))
    return transformers.AutoTokenizer.from_pretrained(directory).eos_token_id


def make(shape: str, out: Path, layers: int | None, device: str) -> int:
    """Fills the directory `out`; returns the number of parameters."""
    config = sync.config_of(shape, layers)
    with atomic_directory(out) as part:
        config.eos_token_id, config.bos_token_id = save_tokenizer(part, config.vocab_size), None
        model = sync.masters_of(getattr(transformers, config.architectures[0]), config, device)
        torch.manual_seed(sync.SEED)
        with torch.no_grad():  # log-probs of a text are finite and differ
            for name, parameter in model.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
        model.save_pretrained(part)
        with open(part / "prompts.jsonl", "w", encoding="utf-8") as file:
            for i in range(PROMPTS):
                prompt = f"Write the number {i} in words, then the letters of the alphabet. " * (1 + i % 4)
                file.write(json.dumps({"prompt": prompt, "label": "e"}) + "\n")
    return sum(parameter.numel() for parameter in model.parameters())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sync.SHAPES)
    parser.add_argument("out_dir", type=Path, help="left alone when it is there")
    parser.add_argument("--layers", type=int, help="default: all of the shape's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main() -> None:
    given = make_parser().parse_args()
    if given.out_dir.exists():
        print(f"random_model: already there: {given.out_dir}")
        return
    parameters = make(given.shape, given.out_dir, given.layers, given.device)
    print(f"random_model: wrote {given.out_dir}: {parameters / 1e9:.2f} billion parameters")


if __name__ == "__main__":
    main()
