"""`spec.data`: the text to train on."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.field_types import ShortText

RelativePath = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^/].*$")]


class DataSource(StrEnum):
    """Where training text comes from."""

    PYTHON_STDLIB = "PythonStdlib"
    FILES = "Files"


class DataFormat(StrEnum):
    """How documents lie in files."""

    TEXT = "Text"
    JSON_LINES = "JSONLines"
    PARQUET = "Parquet"
    TOKENS = "Tokens"
    PROMPT_COMPLETION = "PromptCompletion"


class Tokenizer(StrEnum):
    """How text becomes tokens."""

    BYTE = "Byte"
    BPE = "BPE"
    SENTENCE_PIECE = "SentencePiece"


class OnCorrupt(StrEnum):
    """What becomes of a record that cannot be read."""

    FAIL = "Fail"
    SKIP = "Skip"


class Packing(StrEnum):
    """What a row of tokens is made of."""

    TEXT = "Text"
    """A stretch of the text: attention does not see where documents end."""
    DOCUMENTS = "Documents"
    """The same stretch as documents: each has its own positions, attention stays inside, and no token of the next one
    is predicted from it."""


class MixturePart(ApiModel):
    """One corpus of a mixture."""

    path: RelativePath
    """Folder of the corpus, relative to the volume's root or to `uri`."""
    weight: Annotated[float, Field(gt=0, le=1000000)] = 1.0
    """Its share of the samples is this over the sum of all weights, to a thousandth."""


class DataSpec(ApiModel):
    """The text to train on."""

    source: DataSource = DataSource.FILES
    """`PythonStdlib`: the source code of the Python standard library in the image. `Files`: the files of a volume or
    behind a URI."""
    claim_name: ShortText | None = None
    """PersistentVolumeClaim that holds the files, mounted read-only. `source: Files` needs this or `uri`."""
    uri: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[a-z][a-z0-9+.-]*://.+$")] | None = None
    """Folder of the files as a URI that fsspec knows, such as `s3://bucket/text`. The image must hold the scheme's
    package, and `workers.env` the credentials. Excludes `claimName`."""
    pattern: Annotated[str, Field(min_length=1, max_length=253)] = "**/*"
    """Glob, relative to the root, of the files to read when `source` is `Files`; the tokenizer's own is never read as
    text."""
    format: DataFormat = DataFormat.TEXT
    """`Text`: each file is a document. `JSONLines`: each line is one, gzip when the name ends in `.gz`. `Parquet`: each
    row is one. `Tokens`: what `meshwright data tokenize` wrote, memory-mapped; the other formats, but for bytes of
    text, are tokenized on every worker when it starts. `PromptCompletion`: each line is a JSON object with the texts
    `prompt` and `completion`, for supervised fine-tuning: a record is a sequence, and only its completion is predicted;
    gzip as with `JSONLines`."""
    field: Annotated[str, Field(min_length=1, max_length=253)] = "text"
    """Field or column that holds the text, with `format: JSONLines` or `Parquet`."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the tokens that is never trained on, for `training.evaluation`: the last documents of each corpus."""
    tokenizer: Tokenizer = Tokenizer.BYTE
    """`Byte`: the 256 byte values and a document separator; needs `model.vocabSize` of at least 257. `BPE`: a
    `tokenizer.json` of the library tokenizers. `SentencePiece`: a model of that library. With `format: Tokens` what
    wrote them must be this one."""
    tokenizer_file: RelativePath | None = None
    """The tokenizer's file, relative to the volume's root or to `uri`. Required unless `tokenizer` is `Byte`."""
    packing: Packing = Packing.TEXT
    """What a row of tokens is. `Text`: a stretch of the text, whatever documents it touches. `Documents`: the documents
    in that stretch, each with positions from 0 and attention to itself alone; the token after a document is not
    predicted from it."""
    balance: bool = False
    """Whether the rows of a step are dealt to replicas and micro-batches by the cost of the documents in them, so that
    no replica waits for one with longer documents; the step's samples stay the same. Needs `packing: Documents`."""
    on_corrupt_record: OnCorrupt = OnCorrupt.FAIL
    """`Fail`: a record that cannot be read ends the job, with its file and line. `Skip`: it is counted, told in the log
    and left out. Bytes of text, `format: Text` with `tokenizer: Byte`, are never such a record, UTF-8 or not."""
    mixture: Annotated[list[MixturePart], Field(max_length=64, json_schema_extra={"x-list-map-key": "path"})] = []
    """Several corpora, from which samples are taken by weight; when empty, `pattern` of the whole root is one."""
