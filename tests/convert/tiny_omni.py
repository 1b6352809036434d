"""A full Qwen2.5-Omni as transformers saves it, with few and narrow layers, and loading one."""

import json
import logging
from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedModel, Qwen2_5OmniConfig, Qwen2Tokenizer
from transformers import Qwen2_5OmniForConditionalGeneration as Omni

ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
# The published proportions: 7B has 7 queries to a key and a head of its own.
SIZES = {
    "3B": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1},
    "7B": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
}
AUDIO = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 32,
    "fullatt_block_indexes": [0],
    "patch_size": 2,
}
TALKER = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_parameters": ROPE,
}
VOCODER = {
    "dit_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "emb_dim": 16,
        "num_embeds": 33,
        "mel_dim": 8,
        "enc_emb_dim": 8,
        "enc_dim": 8,
        "enc_channels": [8, 8, 8, 8, 24],
        "enc_attention_channels": 4,
        "enc_res2net_scale": 2,
        "enc_se_channels": 4,
    },
    "bigvgan_config": {
        "mel_dim": 8,
        "upsample_initial_channel": 16,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
    },
}


def save_omni(
    folder: Path, size: str, vocab: int, dtype: torch.dtype, max_shard_size: str = "1GB"
) -> Path:
    """Thinker, talker and vocoder (in float32, as always) with random weights, and the voices."""
    width = SIZES[size]["hidden_size"]
    text = SIZES[size] | {
        "vocab_size": vocab,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "rope_parameters": ROPE,
        "tie_word_embeddings": False,
    }
    thinker = {
        "audio_config": AUDIO | {"output_dim": width},
        "vision_config": VISION | {"out_hidden_size": width},
        "text_config": text,
    }
    talker = TALKER | {"embedding_size": width}
    torch.manual_seed(0)
    model = Omni(
        Qwen2_5OmniConfig(thinker_config=thinker, talker_config=talker, token2wav_config=VOCODER)
    ).to(dtype)
    model.token2wav.float()
    model.generation_config.max_new_tokens = 77
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    torch.save({"Chelsie": {"bos_token": 5}}, folder / "spk_dict.pt")
    return folder


def read_quietly(cls: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    """The model that transformers reads; no weight may be missing, left over or misfit."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        # Omni's own method, which adds the voices, gives no report.
        load = super(Omni, Omni).from_pretrained if cls is Omni else cls.from_pretrained
        model, report = load(folder, output_loading_info=True)
    finally:
        logger.removeHandler(handler)
    assert not any(report.values()), report
    # The published talker, too, has ids of the thinker in its config.
    said = [message for message in said if "within the vocabulary" not in message]
    assert not said, said
    return model


def save_tokenizer(folder: Path) -> None:
    """As many tokens as the published one has, in the files that transformers 4 wrote."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    vocab |= {f"word{i}": i for i in range(len(vocab), 151643)}
    roles = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], unk_token=None, bos_token=None)
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>"]
    names += [f"<|special{i}|>" for i in range(len(names), 22)]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save_pretrained(folder)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    decoder = {str(token.pop("id")): token for token in added}
    files = {
        "vocab.json": vocab,
        "added_tokens.json": {token["content"]: int(id) for id, token in decoder.items()},
        "special_tokens_map.json": roles | {"additional_special_tokens": names},
        "tokenizer_config.json": roles
        | {
            "added_tokens_decoder": decoder,
            "additional_special_tokens": names,
            "model_max_length": 32768,
            "tokenizer_class": "Qwen2Tokenizer",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
