from tests.data.conftest import bpe_file, sentencepiece_file

__all__ = ["bpe_file", "sentencepiece_file"]
