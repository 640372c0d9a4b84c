"""Real text that is on every machine: the sources of the Python standard library, one token a byte."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

# Not part of the standard library, or not there in every installation of it.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


def standard_library_text(limit_bytes: int) -> bytes:
    """The first `limit_bytes` of all `.py` files of the standard library, by folder and name.

    The same in every process of one Python installation: the order does not depend on the file system.
    """
    text = bytearray()
    for folder, subfolders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)  # os.walk goes on into what is left here
        for name in sorted(files):
            if name.endswith(".py"):
                text += Path(folder, name).read_bytes() + b"\n"
        if len(text) >= limit_bytes:
            break
    return bytes(text[:limit_bytes])


class TextWindows(Dataset[tuple[Tensor, Tensor]]):
    """The text cut into windows of `context` tokens, each with its target: one token later."""

    def __init__(self, text: bytes, context: int) -> None:
        if len(text) <= context:
            raise ValueError(f"{len(text)} bytes of text do not fill one window of {context} tokens")
        self.text = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
