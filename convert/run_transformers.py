"""transformers' Qwen2.5-Omni thinker as a ``Runner``."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from transformers import DynamicCache, Qwen2_5OmniThinkerConfig
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker

from ai_jax.convert.mapping import VISION
from ai_jax.convert.source import Source
from ai_jax.errors import UserError

# Its name changed within transformers 5.
_CACHE = "cache" if "cache" in inspect.signature(Thinker.forward).parameters else "past_key_values"


class Transformers:
    """The Hugging Face folder of ``source``, read and run in float32 by transformers alone."""

    def __init__(self, source: Source, max_len: int):
        config = Qwen2_5OmniThinkerConfig.from_pretrained(source.path)
        # The stock model reads blocks of 2 s; the same weights listen in chunks.
        config.audio_config.n_window = source.config.audio.n_window
        config.audio_token_id = source.config.stream.format.audio
        # Nothing is seen here: the vision tower's layers would only fill memory.
        config.vision_config.depth = 0
        with _quiet():
            model, found = Thinker.from_pretrained(
                source.path,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        self._model = model.eval()
        _check(found, source)
        self._cache = DynamicCache(config=config.text_config)
        self._length = 0

    def one_pass(self, tokens: list[int], mel_cfm: np.ndarray) -> np.ndarray:
        return self._forward(tokens, mel_cfm, 0)

    def read(self, tokens: list[int], mel_fm: np.ndarray | None = None) -> np.ndarray:
        mel_cfm = None if mel_fm is None else mel_fm[None]
        logits_tv = self._forward(tokens, mel_cfm, self._length, **{_CACHE: self._cache})
        self._length += len(tokens)
        return logits_tv[-1]

    def _forward(
        self, tokens: list[int], mel_cfm: np.ndarray | None, start: int, **cache: DynamicCache
    ) -> np.ndarray:
        inputs = {"input_ids": torch.tensor([tokens])}
        if mel_cfm is not None:
            mel_fm = mel_cfm.reshape(-1, mel_cfm.shape[-1])
            inputs["input_features"] = torch.from_numpy(mel_fm).T[None]
            inputs["feature_attention_mask"] = torch.ones(1, len(mel_fm), dtype=torch.long)
        # Without vision the three axes of positions are one counter. Left to itself, the model
        # would start it anew in a cached step of several tokens.
        positions = torch.arange(start, start + len(tokens)).expand(3, 1, -1)
        with torch.inference_mode():
            out = self._model(**inputs, position_ids=positions, use_cache=bool(cache), **cache)
        return out.logits[0].numpy()


def _check(found: dict, source: Source) -> None:
    """Every weight but those of the vision tower must have come from the folder."""
    for key in ("missing_keys", "mismatched_keys"):
        for entry in found[key]:
            name = entry if isinstance(entry, str) else entry[0]
            if VISION not in name:
                what = key.removesuffix("_keys")
                raise UserError(f"{source.path}: to transformers, the tensor '{name}' is {what}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings of what it leaves unused, nor a progress bar where nobody looks at it."""
    log = transformers.logging
    level = log.get_verbosity()
    bar = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    if not sys.stderr.isatty():
        log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()
