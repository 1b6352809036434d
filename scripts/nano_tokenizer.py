"""Train the tokenizer of the nano model: 1,016 byte-level BPE tokens, then eight special ones.

    python scripts/nano_tokenizer.py ai_jax/assets/nano/tokenizer.json

The sentences and words that the model says come first, so that each is a handful of tokens; the
licence text fills the rest of the vocabulary with common English.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ai_jax.config import ModelConfig, preset
from ai_jax.data import nano

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<silent>",
    "<response>",
)
WEIGHT = 50  # how often what the model says counts beside the filling text


def train(vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` entries, the special ones last."""
    licence = Path(__file__).parent.parent / "LICENSE"
    said = [*nano.ALERTS.values(), *nano.WORDS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*said * WEIGHT, licence.read_text(encoding="utf-8")], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    assert tokenizer.get_vocab_size() == vocab_size
    return tokenizer


def main() -> None:
    out = Path(sys.argv[1])
    model = preset("model", "nano", ModelConfig)
    tokenizer = train(model.text.vocab_size)
    fmt = model.stream.format
    named = {"pad": "<|endoftext|>", "eos": "<|im_end|>", "audio": "<|AUDIO|>"}
    named |= {"silent": "<silent>", "response": "<response>"}
    for field, token in named.items():
        assert tokenizer.token_to_id(token) == getattr(fmt, field), field
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out))
    print(f"{out}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
