"""Reads and writes the `config.json` of models published on Hugging Face."""
