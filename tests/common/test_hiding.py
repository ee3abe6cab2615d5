"""Secrets are hidden by value in any spelling, by name and by form."""

import base64
import json
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.common import hiding
from orchestrator.protocol.spec import Target

SECRETS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=9, max_size=60)


@given(secret=SECRETS, before=st.text(max_size=5), after=st.text(max_size=5))
def test_hide_finds_value_in_every_encoding(secret: str, before: str, after: str) -> None:
    whole = before + secret + after
    spelt = [
        whole,
        urllib.parse.quote(whole),
        urllib.parse.quote(whole, safe=""),
        urllib.parse.quote_plus(whole),
        json.dumps(whole),
        repr(secret),
        whole.encode().hex(),
    ]
    for text in spelt:
        shown = hiding.hide_secrets(text, hiding.secret_texts([secret]))
        assert shown != text, text


@given(secret=st.text("abcXYZ0189+/=-_ ü", min_size=9), before=st.binary(max_size=5))
def test_hide_finds_value_inside_base64(secret: str, before: bytes) -> None:
    """So stands `user:password` in an Authorization header."""
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        text = encode(before + secret.encode() + b"\0rest").decode()
        shown = hiding.hide_secrets(text, hiding.secret_texts([secret])).replace(
            hiding.REDACTED, ""
        )
        # The two characters that it shares with what is before and after may stay.
        assert len(shown) <= len(text) - len(secret.encode()) * 4 // 3 + 3


@pytest.mark.parametrize("value", ["{}\r", " {} ", "{}\n", "user: me\n{}\n", "\t{}\r\nother-12"])
def test_hide_ignores_surrounding_white_space(value: str) -> None:
    secrets = hiding.secret_texts([value.format("abc123xy")])
    assert hiding.hide_secrets("token=abc123xy.", secrets) == f"token={hiding.REDACTED}."


@given(secret=st.text("abc", min_size=6, max_size=20), cut=st.integers(0, 19), more=st.binary())
def test_mask_detects_beginning_of_secret(secret: str, cut: int, more: bytes) -> None:
    secret_bytes = secret.encode()
    size = min(cut, len(secret) - 1)
    output = more + secret_bytes[:size]
    seen = hiding.Mask([secret]).begun(output)
    assert seen >= (size if size >= hiding.SHORTEST else 0)
    assert seen == 0 or output.endswith(secret_bytes[:seen])


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("WANDB_API_KEY", "0123456789abcdef", True),
        ("HF_TOKEN", "hf_abcdefgh12345678", True),
        ("HF_TOKEN", "short1", False),
        ("TOKENIZER", "gpt2-medium-v3", False),
        ("MAX_TOKENS", "100000000", False),
        ("MY_LR", "abcdefgh12345678", False),
        ("WANDB_API_KEY", "0a1b2c3d4e", True),
        ("HF_TOKEN", "hf_abcdefgh1", True),
        ("SORT_KEY", "loss", False),
        ("USE_AUTH", "true", False),
        ("PASS", "12345678", False),
        ("MODEL", "llama-3-8b", False),
    ],
)
def test_is_secret_by_name_or_value(name: str, value: str, wanted: bool) -> None:
    assert hiding.is_secret(name, value) is wanted
    assert bool(hiding.secrets_of_environment({name: value})) is wanted
    assert value in hiding.secrets_of_environment({name: value}, [name])


@pytest.mark.parametrize(
    "text",
    [
        "https://me:pass@host/",
        "https://tok3n@host/",
        "Authorization: Bearer abc.def",
        "Authorization: Basic bWU6cGFzcw==",
        "a hf_abcdefghijklmnopqrstuvwxyz",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc",
    ],
)
def test_redacted_text_hides_recognisable_secrets(text: str) -> None:
    assert hiding.REDACTED in hiding.redacted_text(text)


@pytest.mark.parametrize(
    "text", ["https://host/a:b", "sk-learn", "hf_home", "a ghp_x", "step 3: eyJ", "/a/b@c"]
)
def test_redacted_text_keeps_harmless_text(text: str) -> None:
    assert hiding.redacted_text(text) == text


def test_hide_reaches_fields_of_messages() -> None:
    target = Target("script", "train.py", ("--key=hunter2-hunter2", "x"))
    assert hiding.hide_secrets([target], ["hunter2-hunter2"]) == [
        target.replace(args=("--key=(redacted)", "x"))
    ]
