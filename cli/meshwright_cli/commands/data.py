"""`meshwright data`: tokenize text once for all runs, and verify or show the tokens."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from meshwright.api.data import DataFormat, OnCorrupt, Tokenizer
from meshwright.data.documents import SkippedRecords
from meshwright.data.errors import DataError
from meshwright.data.files import Directory, FileEntry, open_directory
from meshwright.data.shards import MANIFEST, SHARD_SUFFIX, SHARD_TOKENS, TokenShards, TokensManifest
from meshwright.data.tokenize import Progress as Done
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import open_tokenizer
from meshwright.data.verify_shards import verify
from meshwright_cli.commands.data_upload import upload

_SHOWN_TOKENS = 200
_OPTIONS = {
    "pattern": "--pattern",
    "format": "--format",
    "field": "--field",
    "tokenizer": "--tokenizer",
    "tokenizerFile": "--tokenizer-file",
    "onCorruptRecord": "--skip-corrupt",
    "uri": "the directory",
}
"""The command's options for the fields of a job."""


@click.group()
def data() -> None:
    """Tokenize training text, and verify or show tokens."""


@data.command("tokenize")
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--pattern", default="**/*", show_default=True, help="Pattern of the files, relative to SOURCE.")
@click.option(
    "--format",
    "kind",
    type=click.Choice([f.value for f in DataFormat if f not in (DataFormat.TOKENS, DataFormat.PROMPT_COMPLETION)]),
    default=DataFormat.TEXT.value,
    show_default=True,
    help="Format of the input files.",
)
@click.option("--field", default="text", show_default=True, help="Field or column that contains the text.")
@click.option(
    "--tokenizer",
    "kind_of_tokenizer",
    type=click.Choice([t.value for t in Tokenizer]),
    default=Tokenizer.BYTE.value,
    show_default=True,
    help="Tokenizer to use.",
)
@click.option(
    "--tokenizer-file", type=click.Path(path_type=Path), help="Path of a tokenizer.json or a SentencePiece model."
)
@click.option("--skip-corrupt", is_flag=True, help="Skip and count records that cannot be read.")
@click.option(
    "--shard-tokens",
    type=click.IntRange(1),
    default=SHARD_TOKENS,
    show_default=True,
    help="Number of tokens per shard.",
)
def tokenize_command(
    source: str,
    target: Path,
    pattern: str,
    kind: str,
    field: str,
    kind_of_tokenizer: str,
    tokenizer_file: Path | None,
    skip_corrupt: bool,
    shard_tokens: int,
) -> None:
    """Tokenize a directory or URI into token shards.

    Reads the text files of SOURCE and writes shards to the new directory TARGET. A job reads TARGET with
    `data.format: Tokens`.
    """
    console = Console(stderr=True)
    with _errors():
        tokenizer = open_tokenizer(Tokenizer(kind_of_tokenizer), tokenizer_file)
        policy = OnCorrupt.SKIP if skip_corrupt else OnCorrupt.FAIL
        directory = open_directory(source)
        token_source = TextSource(
            directory, pattern, DataFormat(kind), field, policy, _relative_name(directory, tokenizer_file)
        )
        with _progress(console) as bar:
            task = bar.add_task("tokenizing", total=None)

            def report_progress(done: Done) -> None:
                bar.update(task, completed=done.bytes, total=done.of_bytes, description=done.file[-40:] or "done")

            _check_target(target)
            entries = _without_tokens(token_source.files())
            manifest, skipped = tokenize(token_source, tokenizer, target, report_progress, shard_tokens, entries)
    _print_skipped(console, skipped)
    click.echo(_summary(manifest))


def _check_target(target: Path) -> None:
    """Text that has shards beside it is rejected as text, so a directory with other files is not written to.

    Raises:
        DataError: the directory has files that no interrupted run of the command has left.
    """
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    others = [name for name in names if not name.startswith(".") and not name.endswith(SHARD_SUFFIX)]
    if others and MANIFEST not in others:
        raise DataError(f"{target} contains `{others[0]}`: choose a new or an empty directory for the tokens")


@data.command("verify")
@click.argument("directory")
def verify_command(directory: str) -> None:
    """Verify the checksums of all token shards.

    DIRECTORY is a local directory or a URI with token shards. Exits with 1 if a shard is damaged.
    """
    with _errors():
        manifest, problems = verify(open_directory(directory))
    if problems:
        raise click.ClickException("\n  ".join([f"{len(problems)} shards are damaged:", *problems]))
    click.echo(f"intact: {_summary(manifest)}")


@data.command("show")
@click.argument("directory")
@click.option("--start", type=click.IntRange(0), default=0, show_default=True, help="Position of the first token.")
@click.option("--count", type=click.IntRange(1), default=_SHOWN_TOKENS, show_default=True, help="Number of tokens.")
@click.option(
    "--tokenizer-file",
    type=click.Path(path_type=Path),
    help="Path of the tokenizer that wrote the tokens. Not needed for bytes.",
)
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
def show_command(directory: str, start: int, count: int, tokenizer_file: Path | None, output: str) -> None:
    """Print tokens as text.

    DIRECTORY is a local directory or a URI with token shards.
    """
    with _errors():
        shards = TokenShards(open_directory(directory))
        if start >= len(shards):
            raise click.ClickException(f"--start must be less than the number of tokens ({len(shards)}), got {start}")
        tokens = shards.tokens(start, min(len(shards), start + count)).tolist()
        if output == "json":
            click.echo(json.dumps({**shards.manifest.wire(), "start": start, "tokens": tokens}))
            return
        kind = {"byte": Tokenizer.BYTE, "bpe": Tokenizer.BPE}.get(
            shards.manifest.tokenizer.split("/")[0], Tokenizer.SENTENCE_PIECE
        )
        tokenizer = open_tokenizer(kind, tokenizer_file)
    if tokenizer.identity != shards.manifest.tokenizer:
        raise click.ClickException(
            f"--tokenizer-file: must be the tokenizer that wrote these tokens (`{shards.manifest.tokenizer}`)"
        )
    click.echo(_summary(shards.manifest))
    click.echo(tokenizer.decode(tokens))


def _without_tokens(entries: list[FileEntry]) -> list[FileEntry]:
    """The files to tokenize.

    Raises:
        DataError: some are tokens of an earlier run, whose bytes would be read as text.
    """
    for entry in entries:
        if posixpath.basename(entry.name) == MANIFEST:
            raise DataError(
                f"{entry.name}: its directory has tokens, which are no text: exclude it with `data.pattern`"
            )
    return entries


def _summary(manifest: TokensManifest) -> str:
    skipped = f", {manifest.skipped:,} records skipped" if manifest.skipped else ""
    return (
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens of a vocabulary of {manifest.vocabulary:,} in "
        f"{len(manifest.shards)} shards ({manifest.dtype}){skipped}"
    )


@contextmanager
def _errors() -> Iterator[None]:
    """Exit with a one-line message if something cannot be read or written."""
    try:
        yield
    except DataError as error:
        raise click.ClickException(_as_options(str(error))) from None
    except OSError as error:
        # The error for a full disk has no file name.
        where = f"{error.filename}: " if error.filename is not None else "reading or writing failed: "
        raise click.ClickException(f"{where}{error.strerror or error}") from None


def _as_options(message: str) -> str:
    """A message about fields of a job, with the command's options in place of the fields."""

    def option(field: re.Match[str]) -> str:
        name, value = field["name"], field["value"]
        if name == "uri" and value:
            return value
        return f"{_OPTIONS[name]} {value}" if value else _OPTIONS[name]

    return re.sub(rf"`data\.(?P<name>{'|'.join(_OPTIONS)})(?:: (?P<value>[^`]*))?`", option, message)


def _relative_name(directory: Directory, file: Path | None) -> str | None:
    """The path of a file in a directory, if it is there: the tokenizer's own file is not read as text."""
    root = directory.local("")
    if file is None or root is None:
        return None
    resolved = file.parent.resolve() / file.name
    return resolved.relative_to(root.resolve()).as_posix() if resolved.is_relative_to(root.resolve()) else None


def _print_skipped(console: Console, skipped: SkippedRecords) -> None:
    for example in skipped.examples:
        console.print(f"skipped: {example}", markup=False, emoji=False, highlight=False)
    if skipped.count > len(skipped.examples):
        console.print(f"and {skipped.count - len(skipped.examples)} more")


def _progress(console: Console) -> Progress:
    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


data.add_command(upload)
