from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

WORDS = ["the quick brown fox", "jumps over the lazy dog", "pack my box with five dozen jugs", "naïve café"] * 5


@pytest.fixture(scope="session")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS, trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def sentencepiece_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS), model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "text.model"
    path.write_bytes(model.getvalue())
    return path
