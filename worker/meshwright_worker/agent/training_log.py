"""Training progress as lines of the pod's log, for `kubectl logs -f`."""

from __future__ import annotations

from meshwright.perplexity import perplexity
from meshwright_worker.rank.task import StepReport

# Minimum interval between lines, so that fast steps do not flood the log.
LINE_SECONDS = 1.0


class TrainingLog:
    """Selects the steps to log: the first of a generation, the last of the run, else at most one per second."""

    def __init__(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._last: float | None = None

    def line(self, report: StepReport, tokens_per_second: float, now: float) -> str | None:
        """Return the line for this step, or None; `now` is monotonic seconds."""
        due = self._last is None or now - self._last >= LINE_SECONDS or report.step == self._total
        evaluated = report.evaluation_loss
        due = due or evaluated is not None
        if not due:
            return None
        self._last = now
        step = f"{report.step}/{self._total}" if self._total else str(report.step)
        return (
            f"step {step} loss={report.loss:.4f} lr={report.learning_rate:.3g} grad_norm={report.gradient_norm:.3g}"
            f" tokens/s={tokens_per_second:.0f} step_seconds={report.seconds:.3f}"
            + (f" eval_loss={evaluated:.4f} perplexity={perplexity(evaluated):.4g}" if evaluated is not None else "")
        )
