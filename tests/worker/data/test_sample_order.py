"""The stream of samples: nothing lost, nothing repeated, the same in every split."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.data import DataSource, DataSpec
from meshwright.data.tokenizers import BYTE_SEPARATOR, ByteTokenizer
from meshwright_worker.data.corpus import Corpus, CorpusError
from meshwright_worker.data.open_corpus import open_corpus
from meshwright_worker.data.permutation import Permutation
from meshwright_worker.data.sample_order import SampleDigest, SampleStream
from meshwright_worker.data.sft import PromptCompletionStream

CONTENTS = ["def f():\n    pass\n", "x = 1\n" * 40, "", "naïve = 'ü'\n", "# end"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number, content in enumerate(CONTENTS):
        (tmp_path / f"{number}.py").write_text(content)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "more.txt").write_text("more")
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "hidden.py").write_text("hidden")
    return tmp_path


@pytest.fixture
def corpus(directory: Path) -> Corpus:
    return open_corpus(DataSpec(claim_name="text", pattern="*.py"), str(directory))


def row_of(contents: list[str]) -> list[int]:
    return [token for content in contents if content for token in [*content.encode(), BYTE_SEPARATOR]]


def test_a_corpus_is_its_documents_in_order_each_with_a_separator(corpus: Corpus) -> None:
    want = row_of(CONTENTS)
    assert len(corpus) == len(want)
    assert corpus.tokens(0, len(want)).tolist() == want


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_slice_of_a_corpus(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    contents = data.draw(st.lists(st.text("ab\n", max_size=9), min_size=1, max_size=5).filter(any))
    root = tmp_path_factory.mktemp("corpus")
    for number, content in enumerate(contents):
        (root / str(number)).write_text(content)
    corpus, want = open_corpus(DataSpec(claim_name="text"), str(root)), row_of(contents)
    start = data.draw(st.integers(0, len(want)))
    stop = data.draw(st.integers(start, len(want)))
    assert corpus.tokens(start, stop).tolist() == want[start:stop]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.py", {"0", "1", "3", "4"}),
        ("**/*", {"0", "1", "3", "4", "deep"}),
        ("**", {"0", "1", "3", "4", "deep"}),
        ("**/*.txt", {"deep"}),
        ("deep/*", {"deep"}),
        ("[0].py", set()),
        ("?.py", {"0", "1", "3", "4"}),
    ],
)
def test_patterns(directory: Path, pattern: str, names: set[str]) -> None:
    """Hidden entries never match; a bracket is a letter like any other."""
    contents = {str(number): content for number, content in enumerate(CONTENTS)} | {"deep": "more"}
    spec = DataSpec(claim_name="text", pattern=pattern)
    if not names:
        with pytest.raises(CorpusError, match=r"`data.pattern: \[0\].py` matches no file; files there: 0.py, 1.py"):
            open_corpus(spec, str(directory))
        return
    corpus = open_corpus(spec, str(directory))
    assert corpus.tokens(0, len(corpus)).tolist() == row_of([contents[name] for name in sorted(names)])


def test_the_standard_library_is_python_source() -> None:
    corpus = open_corpus(DataSpec(source=DataSource.PYTHON_STDLIB), None)
    assert len(corpus) > 3_000_000
    assert "import" in ByteTokenizer().decode(corpus.tokens(0, 20000).tolist())


def test_a_file_that_shrinks_is_noticed(directory: Path, corpus: Corpus) -> None:
    (directory / "1.py").write_text("x")
    with pytest.raises(CorpusError, match="became shorter"):
        corpus.tokens(0, len(corpus))


def test_missing_text_names_the_field(tmp_path: Path, corpus: Corpus) -> None:
    with pytest.raises(CorpusError, match=r"`data.claimName`"):
        open_corpus(DataSpec(claim_name="text"), None)
    with pytest.raises(CorpusError, match=rf"`training.sequenceLength` may be at most {len(corpus) - 1}"):
        SampleStream(corpus, len(corpus), 0)


def test_identity_names_text_length_and_seed(directory: Path, corpus: Corpus) -> None:
    other = open_corpus(DataSpec(claim_name="text", pattern="1.py"), str(directory))
    identities = [SampleStream(c, n, s).identity for c, n, s in [(corpus, 8, 0), (corpus, 9, 0), (corpus, 8, 1)]]
    assert len({*identities, SampleStream(other, 8, 0).identity}) == 4
    assert SampleStream(corpus, 8, 0).identity == identities[0]


@given(st.integers(1, 700), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_permutation_is_one(size: int, key: int) -> None:
    order = Permutation(size, str(key))
    assert sorted(order(index) for index in range(size)) == list(range(size))


def test_a_permutation_mixes() -> None:
    orders = [[Permutation(5000, key)(index) for index in range(5000)] for key in ("0", "1")]
    assert orders[0] != orders[1]
    steps = [abs(a - b) for a, b in zip(orders[0], orders[0][1:], strict=False)]
    assert 1400 < sum(steps) / len(steps) < 1950  # a random order has a mean step of n / 3


@pytest.mark.parametrize("index", [-1, 10])
def test_a_permutation_has_bounds(index: int) -> None:
    with pytest.raises(IndexError):
        Permutation(10, "")(index)
    with pytest.raises(ValueError, match="0 things"):
        Permutation(0, "")


def test_an_epoch_holds_every_token_once(corpus: Corpus) -> None:
    stream = SampleStream(corpus, 8, seed=3)
    count = stream.samples_per_epoch
    want = corpus.tokens(0, count * 8 + 1).tolist()
    for epoch in range(3):
        rows = [tuple(row) for row in stream.batch(epoch * count, count).tolist()]
        assert Counter(rows) == Counter(tuple(want[8 * i : 8 * i + 9]) for i in range(count))
    assert stream.batch(0, count).tolist() != stream.batch(count, count).tolist()


@pytest.mark.parametrize("replicas", [1, 2, 3, 6])
def test_replicas_share_a_batch_without_gap_or_overlap(corpus: Corpus, replicas: int) -> None:
    whole = SampleStream(corpus, 8, seed=1)
    share = 12 // replicas
    for consumed in (0, 12, 24):
        parts = [SampleStream(corpus, 8, seed=1).batch(consumed + d * share, share) for d in range(replicas)]
        assert torch.equal(torch.cat(parts), whole.batch(consumed, 12))


def digest_of(stream: SampleStream, parts: list[tuple[int, int]]) -> int:
    total = 0
    for first, count in parts:
        digest = SampleDigest()
        digest.add(range(first, first + count), stream.batch(first, count))
        total += digest.value
    return total % (1 << 63)


def test_the_digest_knows_what_was_fed_but_not_by_whom_or_when(corpus: Corpus) -> None:
    stream = SampleStream(corpus, 8, seed=1)
    want = digest_of(stream, [(0, 12)])
    assert digest_of(stream, [(6, 6), (0, 3), (3, 3)]) == want
    assert digest_of(stream, [(0, 11)]) != want  # one lost
    assert digest_of(stream, [(0, 12), (3, 1)]) != want  # one repeated
    assert digest_of(stream, [(0, 11), (3, 1)]) != want  # one for another
    assert digest_of(SampleStream(corpus, 8, seed=2), [(0, 12)]) != want
    assert 0 <= want < 1 << 63


def test_text_survives_the_tokenizer() -> None:
    text = "def f(x):\n    return 'ü€' # \x00\n"
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*b"a", BYTE_SEPARATOR, *b"b", 300]) == "a\nb"


@pytest.mark.parametrize("kind", [SampleStream, PromptCompletionStream])
def test_two_threads_may_read_at_the_border_of_epochs(kind: type, corpus: Corpus, monkeypatch: pytest.MonkeyPatch):
    """Gradients are repeated next to the thread that reads ahead. A sample was that of another epoch."""

    def stream() -> SampleStream | PromptCompletionStream:
        if kind is SampleStream:
            return SampleStream(corpus, 16, seed=3)
        return PromptCompletionStream([([n], [n + 1]) for n in range(16)], 8, seed=3, separator=BYTE_SEPARATOR)

    size = stream().samples_per_epoch
    expected = stream().batch(size, size)
    read = stream()

    def read_there(self: object, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name == "_order":
            monkeypatch.undo()
            read.batch(0, 1)  # the other thread: a sample of the epoch before
            monkeypatch.setattr(kind, "__setattr__", read_there)

    monkeypatch.setattr(kind, "__setattr__", read_there)
    assert torch.equal(read.batch(size, size), expected)
