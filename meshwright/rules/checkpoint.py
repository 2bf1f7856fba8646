"""Rules on `checkpoint`: where checkpoints are, and how an object store is used."""

from __future__ import annotations

import re

from meshwright.api.checkpoint import SECRET_VARIABLES, CheckpointSpec, Encryption, StoreSpec
from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.rules.rule import Rule

_CREDENTIALS = re.compile(r"://[^/]*:[^/]*@|^s3a?://[^/]*@|[?#]")
_CREDENTIALS_CEL = "'://[^/]*:[^/]*@|^s3a?://[^/]*@|[?#]'"
_NO_RUN = r"^/|[A-Z][^/]*://|^(s3a?|gs):///|://$|(^|/)[.][.]?(/|$)|^memory:|::|[ ?#]|://[^/]*:[^/]*@|^s3a?://[^/]*@"
"""What `checkpoint.resumeFrom` must not contain, also in CEL."""
_S3 = re.compile(r"^s3a?://")
_WITH_SECRET = re.compile(f"^({'|'.join(SECRET_VARIABLES)})://")
_MEMORY = re.compile(r"^memory:|::")
_NO_URI = "!has(self.checkpoint) || !has(self.checkpoint.uri)"
_NO_STORE = "!has(self.checkpoint) || !has(self.checkpoint.store)"
_NO_BEST = (
    "!has(self.checkpoint) || !(has(self.checkpoint.keepBest)"
    " || (has(self.checkpoint.store) && has(self.checkpoint.store.keepBest)))"
)
_NO_SOURCE = "!has(self.checkpoint) || !has(self.checkpoint.resumeFrom)"


def _checkpoint(spec: Spec) -> CheckpointSpec:
    return spec.checkpoint if spec.checkpoint is not None else CheckpointSpec(claim_name="any")


def _store(spec: Spec) -> StoreSpec:
    return _checkpoint(spec).store or StoreSpec()


def _uri(spec: Spec) -> str:
    return _checkpoint(spec).uri or ""


def _is_somewhere(spec: Spec) -> bool:
    return _checkpoint(spec).claim_name is not None or _checkpoint(spec).uri is not None


def _options_fit_the_scheme(spec: Spec) -> bool:
    store = _store(spec)
    return _S3.match(_uri(spec)) is not None or (store.encryption is None and store.region is None)


def _interval_is_a_multiple(spec: Spec) -> bool:
    every, timed = _store(spec).every_steps, _checkpoint(spec).every is not None
    return every is None or timed or every % _checkpoint(spec).interval == 0


def _one_interval(options: CheckpointSpec | StoreSpec) -> bool:
    return options.every is None or options.every_steps is None


def _command_saves_itself(spec: Spec) -> bool:
    store = _store(spec)
    ours = (store.every_steps, store.every, store.keep, store.keep_for, store.keep_every_steps)
    return spec.runtime.command is None or not any(ours)


def _command_has_no_interval(spec: Spec) -> bool:
    checkpoint = _checkpoint(spec)
    return spec.runtime.command is None or not any((checkpoint.every, checkpoint.keep_for, checkpoint.keep_every_steps))


def _keeps_best(spec: Spec) -> bool:
    return _checkpoint(spec).keeps_best


def _best_is_evaluated(spec: Spec) -> bool:
    evaluated = spec.training is not None and spec.training.evaluation is not None
    return not _keeps_best(spec) or (spec.runtime.command is None and evaluated)


def _evaluated_after_rounds(spec: Spec) -> bool:
    training = spec.training
    if not _keeps_best(spec) or training is None or training.outer is None or training.evaluation is None:
        return True
    return training.evaluation.every_steps % training.outer.every_steps == 0


def _command_writes_itself(spec: Spec) -> bool:
    checkpoint = _checkpoint(spec)
    ours = (checkpoint.staging, checkpoint.writer, checkpoint.resume_from)
    return spec.runtime.command is None or not any(ours)


def _source_is_on_a_claim(spec: Spec) -> bool:
    checkpoint = _checkpoint(spec)
    return checkpoint.resume_from is None or checkpoint.resume_uri is not None or checkpoint.claim_name is not None


def _one_beginning(spec: Spec) -> bool:
    training = spec.training
    if _checkpoint(spec).resume_from is None or training is None:
        return True
    return training.initial_weights is None or training.lora is not None


CHECKPOINT_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "checkpoint",
        "needs `claimName`, `uri` or both: name a PersistentVolumeClaim, or the prefix of an object store",
        "!has(self.checkpoint) || has(self.checkpoint.claimName) || has(self.checkpoint.uri)",
        _is_somewhere,
    ),
    Rule(
        "checkpoint.uri",
        "must not contain credentials, a query or a fragment, because specs are not secret: put the credentials into a "
        "Secret and name it in `checkpoint.store.secretName`, or use the pods' identity",
        f"{_NO_URI} || !self.checkpoint.uri.matches({_CREDENTIALS_CEL})",
        lambda spec: _CREDENTIALS.search(_uri(spec)) is None,
    ),
    Rule(
        "checkpoint.uri",
        "must be the prefix of a store that all ranks share, without `memory://` and without a chain of schemes "
        "(`::`): use a URI such as `s3://bucket/prefix`",
        f"{_NO_URI} || !self.checkpoint.uri.matches('^memory:|::')",
        lambda spec: _MEMORY.search(_uri(spec)) is None,
    ),
    Rule(
        "checkpoint.store",
        "needs `checkpoint.uri`, whose object store it describes, or a URI in `checkpoint.resumeFrom`: set one, or "
        "remove this field",
        f"{_NO_STORE} || has(self.checkpoint.uri)"
        " || (has(self.checkpoint.resumeFrom) && self.checkpoint.resumeFrom.matches('://'))",
        lambda spec: _checkpoint(spec).store is None or bool(_checkpoint(spec).uris),
    ),
    Rule(
        "checkpoint.store",
        "`encryption` and `region` are supported only with `s3://`: remove them, and set them for the bucket",
        f"{_NO_STORE} || !has(self.checkpoint.uri) || self.checkpoint.uri.matches('^s3a?://')"
        " || !(has(self.checkpoint.store.encryption) || has(self.checkpoint.store.region))",
        lambda spec: not _uri(spec) or _options_fit_the_scheme(spec),
    ),
    Rule(
        "checkpoint.store.kmsKey",
        "needs `checkpoint.store.encryption: KMS`: set it, or remove the key",
        f"{_NO_STORE} || !has(self.checkpoint.store.kmsKey)"
        " || (has(self.checkpoint.store.encryption) && self.checkpoint.store.encryption == 'KMS')",
        lambda spec: _store(spec).kms_key is None or _store(spec).encryption is Encryption.KMS,
    ),
    Rule(
        "checkpoint.store.secretName",
        f"is supported only with {', '.join(f'`{scheme}://`' for scheme in SECRET_VARIABLES)}: for other schemes, set "
        "the variables or mount the file that the scheme's package reads, with `workers.env` and `workers.volumes`",
        f"{_NO_STORE} || !has(self.checkpoint.store.secretName)"
        f" || (has(self.checkpoint.uri) && self.checkpoint.uri.matches('{_WITH_SECRET.pattern}'))"
        f" || (has(self.checkpoint.resumeFrom) && self.checkpoint.resumeFrom.matches('{_WITH_SECRET.pattern}'))",
        lambda spec: _store(spec).secret_name is None or any(map(_WITH_SECRET.match, _checkpoint(spec).uris)),
    ),
    Rule(
        "checkpoint.resumeFrom",
        "must be a path on the claim, such as `base-0a1b2c3d`, or a URI with a bucket, such as "
        "`s3://bucket/base-0a1b2c3d`, without a leading `/`, `..`, spaces, capitals in the scheme, `memory://`, `::`, "
        "a query, and credentials, which belong in a Secret (`checkpoint.store.secretName`)",
        f"{_NO_SOURCE} || !self.checkpoint.resumeFrom.matches('{_NO_RUN}')",
        lambda spec: re.search(_NO_RUN, _checkpoint(spec).resume_from or "") is None,
    ),
    Rule(
        "checkpoint.resumeFrom",
        "is a path on the claim `checkpoint.claimName`: set that too, or use a URI",
        f"{_NO_SOURCE} || has(self.checkpoint.claimName) || self.checkpoint.resumeFrom.matches('://')",
        _source_is_on_a_claim,
    ),
    Rule(
        "checkpoint.resumeFrom",
        "is not supported with `training.initialWeights` without `training.lora`, because the checkpoint has all "
        "weights: remove one of them",
        f"{_NO_SOURCE} || !has(self.training) || !has(self.training.initialWeights) || has(self.training.lora)",
        _one_beginning,
    ),
    Rule(
        "checkpoint.every",
        "is not supported with `checkpoint.everySteps`: remove one of them",
        "!has(self.checkpoint) || !has(self.checkpoint.every) || !has(self.checkpoint.everySteps)",
        lambda spec: _one_interval(_checkpoint(spec)),
    ),
    Rule(
        "checkpoint.store.every",
        "is not supported with `checkpoint.store.everySteps`: remove one of them",
        f"{_NO_STORE} || !has(self.checkpoint.store.every) || !has(self.checkpoint.store.everySteps)",
        lambda spec: _one_interval(_store(spec)),
    ),
    Rule(
        "checkpoint.store.everySteps",
        "must be a multiple of `checkpoint.everySteps` (default: 100), because both tiers save the same copy: use a "
        "multiple, or change `checkpoint.everySteps`",
        f"{_NO_STORE} || !has(self.checkpoint.store.everySteps) || has(self.checkpoint.every)"
        " || self.checkpoint.store.everySteps"
        " % (has(self.checkpoint.everySteps) ? self.checkpoint.everySteps : 100) == 0",
        _interval_is_a_multiple,
    ),
    Rule(
        "checkpoint.store",
        "`everySteps`, `every`, `keep`, `keepFor` and `keepEverySteps` are not supported with `runtime.command`, which "
        "saves checkpoints itself: remove them",
        f"!has(self.runtime.command) || {_NO_STORE}"
        " || !(has(self.checkpoint.store.everySteps) || has(self.checkpoint.store.every)"
        " || has(self.checkpoint.store.keep) || has(self.checkpoint.store.keepFor)"
        " || has(self.checkpoint.store.keepEverySteps))",
        _command_saves_itself,
    ),
    Rule(
        "checkpoint",
        "`staging`, `writer` and `resumeFrom` are not supported with `runtime.command`, which saves and loads "
        "checkpoints itself: remove them",
        "!has(self.runtime.command) || !has(self.checkpoint) || !(has(self.checkpoint.staging)"
        " || has(self.checkpoint.writer) || has(self.checkpoint.resumeFrom))",
        _command_writes_itself,
    ),
    Rule(
        "checkpoint",
        "`every`, `keepFor` and `keepEverySteps` are not supported with `runtime.command`, which saves checkpoints "
        "itself: remove them",
        "!has(self.runtime.command) || !has(self.checkpoint) || !(has(self.checkpoint.every)"
        " || has(self.checkpoint.keepFor) || has(self.checkpoint.keepEverySteps))",
        _command_has_no_interval,
    ),
    Rule(
        "checkpoint.keepBest",
        "needs `training.evaluation`, which `runtime.command` does not have: add it, or remove this field",
        f"{_NO_BEST} || (!has(self.runtime.command) && has(self.training) && has(self.training.evaluation))",
        _best_is_evaluated,
    ),
    Rule(
        "training.evaluation.everySteps",
        "must be a multiple of `training.outer.everySteps` with `checkpoint.keepBest`, because islands differ until "
        "their round ends",
        f"{_NO_BEST} || !has(self.training) || !has(self.training.outer) || !has(self.training.evaluation)"
        " || self.training.evaluation.everySteps % self.training.outer.everySteps == 0",
        _evaluated_after_rounds,
    ),
)
