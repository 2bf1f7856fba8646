"""Reading the `config.json` of models published on Hugging Face."""
