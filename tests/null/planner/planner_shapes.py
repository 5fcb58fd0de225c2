"""Descriptions of real models for the tests of this folder."""

from __future__ import annotations

import pathlib

import quire
from quire.config.model import read_arch

SHAPES = pathlib.Path(quire.__file__).parent / "bench" / "shapes"
LLAMA_8B = read_arch(SHAPES / "llama-3.1-8b")
QWEN_600M = read_arch(SHAPES / "qwen3-0.6b")
