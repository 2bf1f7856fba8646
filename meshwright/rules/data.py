"""Rules on the training data."""

from __future__ import annotations

from meshwright.api.data import DataFormat, DataSource, DataSpec, Packing, Tokenizer
from meshwright.data.corpus_mixture import places_of
from meshwright.rules.facts import Facts
from meshwright.rules.rule import Rule


def _data(facts: Facts) -> DataSpec:
    """The data. If there is none, data that breaks no rule."""
    return facts.data if facts.data is not None else DataSpec(source=DataSource.PYTHON_STDLIB)


def _one_place_for_files(facts: Facts) -> bool:
    data = _data(facts)
    return (data.claim_name is not None) + (data.uri is not None) == (data.source is DataSource.FILES)


def _files_alone(facts: Facts) -> bool:
    data = _data(facts)
    rows = {"packing": data.packing, "balance": data.balance, "held_out": data.held_out}
    placed = DataSpec(source=data.source, claim_name=data.claim_name, uri=data.uri, **rows)
    return data.source is DataSource.FILES or data == placed


def _tokenizer_has_file(facts: Facts) -> bool:
    data = _data(facts)
    return (data.tokenizer is Tokenizer.BYTE) == (data.tokenizer_file is None)


def _field_for_records(facts: Facts) -> bool:
    data = _data(facts)
    return data.format in (DataFormat.JSON_LINES, DataFormat.PARQUET) or data.field == "text"


def _balance_has_documents(facts: Facts) -> bool:
    return not _data(facts).balance or _data(facts).packing is Packing.DOCUMENTS


def _corpora_have_samples(facts: Facts) -> bool:
    mixture = _data(facts).mixture
    return not mixture or 0 not in places_of([part.weight for part in mixture])


DATA_RULES: tuple[Rule[Facts], ...] = (
    Rule(
        "data.balance",
        "needs `data.packing: Documents`, because all rows cost the same with other packings: change the packing, "
        "or remove this field",
        "!has(self.data) || !self.data.balance || self.data.packing == 'Documents'",
        _balance_has_documents,
    ),
    Rule(
        "data.claimName",
        "`data.source: Files` needs exactly one of `claimName` and `uri`, and other sources support neither: name the "
        "PersistentVolumeClaim that contains the files, or remove a field",
        "!has(self.data) || [has(self.data.claimName), has(self.data.uri)].filter(x, x).size()"
        " == (self.data.source == 'Files' ? 1 : 0)",
        _one_place_for_files,
    ),
    Rule(
        "data.source",
        "`data.source: PythonStdlib` does not support `pattern`, `format`, `field`, `tokenizer`, `tokenizerFile`, "
        "`onCorruptRecord` and `mixture`: remove them, or use `source: Files`",
        "!has(self.data) || self.data.source == 'Files' || (self.data.pattern == '**/*' && self.data.format == 'Text'"
        " && self.data.field == 'text' && self.data.tokenizer == 'Byte' && !has(self.data.tokenizerFile)"
        " && self.data.onCorruptRecord == 'Fail' && (!has(self.data.mixture) || self.data.mixture.size() == 0))",
        _files_alone,
    ),
    Rule(
        "data.tokenizerFile",
        "is required with `data.tokenizer: BPE` and `SentencePiece`, and is not supported with `Byte`: set or "
        "remove it",
        "!has(self.data) || (self.data.tokenizer == 'Byte') != has(self.data.tokenizerFile)",
        _tokenizer_has_file,
    ),
    Rule(
        "data.field",
        "needs `data.format: JSONLines` or `Parquet`: remove it, or change the format",
        "!has(self.data) || self.data.format in ['JSONLines', 'Parquet'] || self.data.field == 'text'",
        _field_for_records,
    ),
    Rule(
        "data.mixture",
        "must have no weight below a thousandth of the sum of all weights, because such a corpus would have no "
        "samples: raise it, or leave the corpus out",
        None,
        _corpora_have_samples,
    ),
)
