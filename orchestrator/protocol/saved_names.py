"""Tells by its name whether a file is a state that a program has saved, to nodes and head alike."""

from __future__ import annotations

import re

ENDINGS = "pt|pth|pth.tar|ckpt|chkpt|bin|safetensors|npz|npy|pkl|h5|keras|distcp|joblib|msgpack"
SAVED = re.compile(
    r"\.metadata|[^.].*\.(" + ENDINGS.replace(".", r"\.") + r")|(?!\.).*(ckpt|checkpoint)[^.]*",
    re.IGNORECASE,
)


def is_saved(name: str) -> bool:
    return SAVED.fullmatch(name) is not None
