"""Which secrets are masked in recorded logs, and that ordinary lines stay as they are."""

from __future__ import annotations

import base64

import pytest

from meshwright_worker.evidence.masking import MASK, Masker

NOTHING = Masker({})


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ("{'Authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
        ('headers = {"authorization": "hunter2hunter2"}', "hunter2hunter2"),
        ("curl -H 'X: Bearer 0123456789abcdef0'", "0123456789abcdef0"),
        ("cloning https://user:pa55@git.example/repo.git", "pa55"),
        ("cloning https://x-access-token:abc@git.example/repo.git", "abc@"),
        ("cloning https://0123456789abcdef0123@git.example/repo.git", "0123456789abcdef0123"),
        ("GET https://bucket/x?X-Amz-Signature=00ff00ff&partNumber=2", "00ff00ff"),
        ("GET https://api/x?api_key=abcd&limit=2", "abcd&"),
        ("api_key='s3cr3tvalue'", "s3cr3tvalue"),
        ("WANDB_API_KEY=s3cr3tvalue python train.py", "s3cr3tvalue"),
        ('{"password": "correct-horse"}', "correct-horse"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("using AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("using hf_abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrst"),
        ("using ghp_abcdefghijklmnopqrstuvwxyz", "ghp_abcdef"),
        ("jwt eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abc-_def", "eyJzdWIiOiIxMjM0"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAK\n-----END RSA PRIVATE KEY-----\n", "IBAAK"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEow\nIBAAK", "IBAAK"),
        ("IEowIBAAK\nMIIE\n-----END PRIVATE KEY-----\nnext", "IBAAK"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, secret: str) -> None:
    masked = NOTHING.mask(text)
    assert secret not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "prefix",
    [
        *("hf_", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "sk-", "AIza"),
        *(f"xox{kind}-" for kind in "abeprs"),
    ],
)
def test_tokens_of_well_known_services_are_masked_wherever_they_are(prefix: str) -> None:
    assert NOTHING.mask(f"logged in with {prefix}{'a1' * 16}, step 3") == f"logged in with {MASK}, step 3"


@pytest.mark.parametrize("prefix", ["AKIA", "ASIA"])
def test_ids_of_permanent_and_temporary_keys_are_masked(prefix: str) -> None:
    assert NOTHING.mask(f"signed by {prefix}{'A1' * 8}") == f"signed by {MASK}"


@pytest.mark.parametrize("name", ["sig", "signature", "X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token"])
def test_signed_addresses_are_masked(name: str) -> None:
    masked = NOTHING.mask(f"GET https://store/x?part=2&{name}=0f0f0f failed")
    assert masked == f"GET https://store/x?part=2&{name}={MASK} failed"


def test_a_secret_that_is_a_part_of_another_one_leaves_nothing_of_it() -> None:
    masker = Masker({"A": "correct-horse", "B": "correct-horse-battery-staple"}, {"A", "B"})
    assert masker.mask("with correct-horse-battery-staple and correct-horse") == f"with {MASK} and {MASK}"


@pytest.mark.parametrize(
    "text",
    [
        "step 12/100 loss=3.4012 lr=0.001 tokens/s=123456 step_seconds=0.41",
        "tokens=4096 tokens_per_second: 12345.6",
        "max_token: 2048, pad_token=0",
        "loading https://huggingface.co/org/model/resolve/main/config.json",
        "RuntimeError: [gloo] Connection closed by peer [10.0.0.7]:41234",
        "store tcp://10.0.0.1:29500, file:///data/train.jsonl",
        'File "/opt/train.py", line 12, in forward',
        "user@host: nothing to hide",
    ],
)
def test_ordinary_lines_stay(text: str) -> None:
    assert NOTHING.mask(text) == text


def test_values_of_secret_variables_are_masked_in_every_encoding() -> None:
    value = 'top "secret"/value'
    masker = Masker({"STORE": value, "MODE": "training", "SHORT": "abc"}, {"STORE", "SHORT"})
    encoded = base64.b64encode(value.encode()).decode()
    text = f'{value} {value!r} {encoded} top%20%22secret%22%2Fvalue top \\"secret\\"/value training abc'
    masked = masker.mask(text)
    assert "secret" not in masked
    assert encoded not in masked
    assert masked.endswith("training abc"), "a short value would mask ordinary words"


def test_variables_are_secret_by_name() -> None:
    environment = {"HF_TOKEN": "value-one", "DB_PASSWORD": "value-two", "TOKENIZERS_PARALLELISM": "disabled"}
    assert Masker(environment).mask("value-one value-two disabled") == "*** *** disabled"


@pytest.mark.parametrize(("value", "masked"), [("abcde", "abcde"), ("abcdef", MASK)])
def test_values_of_six_characters_are_masked_and_shorter_ones_are_words(value: str, masked: str) -> None:
    assert Masker({"KEY": value}, {"KEY"}).mask(f"got {value}") == f"got {masked}"


def test_a_secret_in_several_lines_is_masked_line_by_line() -> None:
    masker = Masker({"KEY_FILE": "first-line\nsecond-line"}, {"KEY_FILE"})
    assert "second-line" not in masker.mask("[rank 0] second-line")


def test_long_lines_take_little_time() -> None:
    text = "x" * 65536 + "\n" + "a=" * 30000 + "\n" + "https://" * 8000
    assert NOTHING.mask(text)
