from tests.data.conftest import bpe_file

__all__ = ["bpe_file"]
