"""Checkpoints in and out: Hugging Face folders <-> Orbax, and loading either one.

``from_hf.from_hf``, ``to_hf.to_hf`` and ``load.load`` are the entry points;
``hf_folder.write_model_folder`` exports a model trained here. Importing them loads neither jax
nor orbax.
"""
