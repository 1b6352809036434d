"""What several tests share: the tiny model and a byte-level tokenizer for it."""

import os

# Compiling takes most of the time of these tests. JAX reads this when it is imported, and so do the
# processes that tests start; set it to 0 to test what users run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import hypothesis
import jax
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from ai_jax.config import ModelConfig, preset
from ai_jax.tokens import TextTokenizer

# How long an example takes is the machine's business: no test is timed.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory):
    """Programs that several tests compile are compiled once, also by parallel workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    return preset("model", "tiny", ModelConfig)


@pytest.fixture(scope="session")
def byte_tokenizer() -> TextTokenizer:
    """Byte-level without merges, one special token: a character may span several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.add_special_tokens([AddedToken("<silent>", special=True)])
    return TextTokenizer(tok)
