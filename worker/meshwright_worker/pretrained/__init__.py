"""Weights of published models: read from and written in the Hugging Face layout of safetensors files."""
