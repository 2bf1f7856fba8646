"""`spec.data`: the text to train on."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel, ClaimName

RelativePath = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^/].*$")]


class DataSource(StrEnum):
    """Where training text comes from."""

    PYTHON_STDLIB = "PythonStdlib"
    FILES = "Files"


class DataFormat(StrEnum):
    """Format of the files."""

    TEXT = "Text"
    JSON_LINES = "JSONLines"
    PARQUET = "Parquet"
    TOKENS = "Tokens"
    PROMPT_COMPLETION = "PromptCompletion"


class Tokenizer(StrEnum):
    """The tokenizer."""

    BYTE = "Byte"
    BPE = "BPE"
    SENTENCE_PIECE = "SentencePiece"


class OnCorrupt(StrEnum):
    """What happens to a record that cannot be read."""

    FAIL = "Fail"
    SKIP = "Skip"


class Packing(StrEnum):
    """What a row of tokens consists of."""

    TEXT = "Text"
    """A piece of the text. Attention does not see where documents end."""
    DOCUMENTS = "Documents"
    """The same piece as separate documents: each has its own positions, attends only to itself, and does not predict
    the next document."""


class MixturePart(ApiModel):
    """One corpus of a mixture."""

    path: RelativePath
    """Directory of the corpus, relative to the volume's root or to `uri`."""
    weight: Annotated[float, Field(gt=0, le=1000000)] = 1.0
    """Weight of the corpus. Its share of the samples is this over the sum of all weights, to a thousandth."""


class DataSpec(ApiModel):
    """The text to train on."""

    source: DataSource = DataSource.FILES
    """`PythonStdlib`: the source code of the Python standard library in the image. `Files`: the files of a volume or
    behind a URI."""
    claim_name: ClaimName | None = None
    """PersistentVolumeClaim that contains the files, mounted read-only. `source: Files` needs this or `uri`."""
    uri: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[a-z][a-z0-9+.-]*://.+$")] | None = None
    """Directory of the files as a URI that fsspec can read, such as `s3://bucket/text`. The image must contain the
    package for the scheme, and `workers.env` the credentials. Excludes `claimName`."""
    pattern: Annotated[str, Field(min_length=1, max_length=253)] = "**/*"
    """Pattern of the files to read with `source: Files`, relative to the root. The tokenizer's file is never read as
    text."""
    format: DataFormat = DataFormat.TEXT
    """Format of the files. `Text`: each file is a document. `JSONLines`: each line is a document; `.gz`, `.zst`, `.xz`
    and `.bz2` are decompressed. `Parquet`: each row is a document. `Tokens`: the output of `meshwright data tokenize`,
    memory-mapped. The other formats, except text with `tokenizer: Byte`, are tokenized on every worker when it starts.
    `PromptCompletion`: each line is a JSON object with the strings `prompt` and `completion`, for supervised
    fine-tuning. A record is a sequence, and only its completion is predicted; decompressed as `JSONLines`."""
    field: Annotated[str, Field(min_length=1, max_length=253)] = "text"
    """Field or column that contains the text, with `format: JSONLines` or `Parquet`."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Fraction of the tokens that is excluded from training, for `training.evaluation`: the last documents of each
    corpus."""
    tokenizer: Tokenizer = Tokenizer.BYTE
    """`Byte`: the 256 byte values and a document separator; needs `model.vocabSize` of at least 257. `BPE`: a
    `tokenizer.json` of the library tokenizers. `SentencePiece`: a model of that library. With `format: Tokens` it must
    be the tokenizer that wrote the tokens."""
    tokenizer_file: RelativePath | None = None
    """The tokenizer's file, relative to the volume's root or to `uri`. Required unless `tokenizer` is `Byte`."""
    packing: Packing = Packing.TEXT
    """What a row of tokens is. `Text`: a piece of the text, across documents. `Documents`: the same piece as separate
    documents, each with positions from 0 and attention only to itself. None predicts the next one."""
    balance: bool = False
    """Whether the rows of a step are distributed over replicas and micro-batches by the cost of their documents, so
    that no replica waits for one with longer ones. Needs `packing: Documents`."""
    on_corrupt_record: OnCorrupt = OnCorrupt.FAIL
    """What happens to a record that cannot be read. `Fail`: the job fails, with the file and line. `Skip`: the record
    is counted, logged and left out. `format: Text` with `tokenizer: Byte` can read every file, UTF-8 or not."""
    mixture: Annotated[list[MixturePart], Field(max_length=64, json_schema_extra={"x-list-map-key": "path"})] = []
    """Several corpora, from which samples are taken by weight. By default all files that match `pattern` are one
    corpus."""
