"""`meshwright profile`."""

from __future__ import annotations

from pathlib import Path

import click

from meshwright.api.labels import MAX_PROFILED_STEPS
from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.profiling import STEPS, Profile
from meshwright_cli.completion import complete_jobs, complete_ranks
from meshwright_cli.jobs.access import Access, cluster_options
from meshwright_cli.parameters import Duration


class StepChoice(click.ParamType[range | int]):
    """`3`, the next three steps, or `100-102`."""

    name = "N|FIRST-LAST"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> range | int:
        """Read a number of steps, or the first and the last one."""
        if isinstance(value, range | int):
            return value
        text = str(value)
        first, dash, last = text.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            self.fail(f"expected a number of steps such as 3, or a range such as 100-102, got {text}", param, ctx)
        if dash and int(last) < int(first):
            self.fail(f"the last step is before the first one: {text}", param, ctx)
        found = range(int(first), int(last) + 1) if dash else int(first)
        count = found if isinstance(found, int) else len(found)
        if not 1 <= count <= MAX_PROFILED_STEPS or first == "0":
            self.fail(f"must be 1 to {MAX_PROFILED_STEPS} steps, counted from 1, got {text}", param, ctx)
        return found


class RankChoice(click.ParamType[tuple[int, ...]]):
    """`0,3`, `0-7` or `all`."""

    name = "RANKS"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Read ranks; `all` is the empty tuple."""
        if isinstance(value, tuple):
            return value
        text = str(value)
        found: dict[int, None] = {}
        for part in text.split(",") if text != "all" else ():
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
                self.fail(f"expected ranks such as 0,3 or 0-7, or `all`, got {text}", param, ctx)
            found |= dict.fromkeys(range(int(first), int(last or first) + 1))
        return tuple(found)


@click.command(epilog="Next: open the file at https://ui.perfetto.dev, or meshwright top JOB.")
@click.argument("job", shell_complete=complete_jobs)
@click.option("--ranks", type=RankChoice(), default="0", show_default=True, shell_complete=complete_ranks,
              help="Ranks to profile, such as 0,3 or 0-7, or `all`.")  # fmt: skip
@click.option("--steps", type=StepChoice(), default=str(STEPS), show_default=True,
              help="How many of the next steps to profile, or the first and last step, such as 100-102.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False),
              help="File for the trace. Default: JOB-steps-FIRST-LAST.json.gz.")  # fmt: skip
@click.option("--timeout", type=Duration(), default="30m", show_default=True,
              help="Time in which the job must complete the last of these steps.")  # fmt: skip
@cluster_options
def profile(
    job: str, ranks: tuple[int, ...], steps: range | int, output: Path | None, timeout: float, access: Access
) -> None:
    """Profile steps of a running job with torch's profiler.

    Writes one trace of all these ranks on a common clock, which Perfetto and Chrome open. The job is not restarted: it
    stands still for some seconds before the first step, for the profiler to start. Only ranks of Meshwright's runtime
    can be profiled. You need the right to `create` `pods/exec`.
    """
    if output is not None and not output.absolute().parent.is_dir():
        raise click.UsageError(f"--output: `{output.parent}` is not a directory: create it, or choose another file")

    async def taken(client: AsyncClient) -> Profile:
        return await client.profile(job, ranks or None, steps, timeout=timeout)

    found = access.run(taken)
    first, last = found.steps.start, found.steps.stop - 1
    path = output or Path(f"{job}-steps-{first}-{last}.json.gz")
    found.write(path)
    which = f"rank {found.traces[0].rank}" if len(found.traces) == 1 else f"{len(found.traces)} ranks"
    click.echo(f"{path}: {f'step {first}' if first == last else f'steps {first} to {last}'} of {which}")
