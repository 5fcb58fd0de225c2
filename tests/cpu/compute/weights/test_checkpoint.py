"""Which files a checkpoint consists of, and every kind of folder that is refused."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import pytest
import safetensors.torch
import torch

from quire.compute.weights.checkpoint import open_checkpoint, open_shard, read_into
from quire.core.errors import LoadError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.bfloat16)}


def write(path: pathlib.Path, *names: str) -> None:
    safetensors.torch.save_file({name: TENSORS[name] for name in names}, path)


def write_index(folder: pathlib.Path, **weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(folder: pathlib.Path, *parts: str) -> None:
    with pytest.raises(LoadError) as caught:
        open_checkpoint(folder)
    for part in parts:
        assert part in caught.value.message, caught.value.message


def test_one_file(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "model.safetensors", "a", "b")
    (shard,) = open_checkpoint(tmp_path)
    assert {entry.name for entry in shard.entries} == {"a", "b"}
    entry = next(entry for entry in shard.entries if entry.name == "a")
    buffer = bytearray(entry.n_bytes)
    with open_shard(shard) as descriptor:
        read_into(descriptor, memoryview(buffer), entry.start, shard.path)
    assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32).view(2, 3), TENSORS["a"])


def test_one_file_of_another_name(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "weights.safetensors", "a")
    assert len(open_checkpoint(tmp_path)) == 1


def test_link_to_a_regular_file(tmp_path: pathlib.Path) -> None:
    """The hub's cache is made of links."""
    write(tmp_path / "blob", "a")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert open_checkpoint(tmp_path)[0].entries[0].name == "a"


def test_shards(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "one.safetensors", "a")
    write(tmp_path / "two.safetensors", "b")
    write_index(tmp_path, a="one.safetensors", b="two.safetensors")
    assert [shard.path.name for shard in open_checkpoint(tmp_path)] == ["one.safetensors", "two.safetensors"]


def test_index_refusals(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "one.safetensors", "a")
    write(tmp_path / "two.safetensors", "a", "b")
    refused(tmp_path, "2 .safetensors files but no model.safetensors.index.json")
    write_index(tmp_path, a="one.safetensors", b="three.safetensors")
    refused(tmp_path, "three.safetensors: No such file")
    write_index(tmp_path, a="one.safetensors", c="one.safetensors")
    refused(tmp_path, "places tensor 'c' in one.safetensors, which does not hold it")
    write_index(tmp_path, a="one.safetensors", b="two.safetensors")
    refused(tmp_path, "tensor 'a' is in both one.safetensors and two.safetensors")
    for name in ("../one.safetensors", "/etc/passwd", "one.bin", 3, ""):
        write_index(tmp_path, a=name)
        refused(tmp_path, "must be the name of a .safetensors file")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000):
        index.write_text(text)
        refused(tmp_path, "model.safetensors.index.json")


def test_truncated_by_one_byte(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, "a", "b")
    os.truncate(path, path.stat().st_size - 1)
    refused(tmp_path, f"{path} is truncated")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights(name: str, tmp_path: pathlib.Path) -> None:
    torch.save({"a": 1}, tmp_path / name)
    refused(tmp_path, f"only pickled weights ({name})", "never read", "save_pretrained")


def test_not_regular(tmp_path: pathlib.Path) -> None:
    refused(tmp_path / "nowhere", "is not a folder")
    refused(tmp_path, "no .safetensors file")
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    refused(tmp_path, "not a regular file")
    path.unlink()
    path.mkdir()
    refused(tmp_path, "not a regular file")
    path.rmdir()
    path.symlink_to("/dev/zero")
    refused(tmp_path, "not a regular file")
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    refused(tmp_path, f"cannot open {path}: No such file")
    path.unlink()
    path.symlink_to(path)
    refused(tmp_path, f"cannot open {path}")


def test_changed_between_header_and_weights(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, "a")
    (shard,) = open_checkpoint(tmp_path)
    shutil.copy(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    with pytest.raises(LoadError, match="changed while being loaded"), open_shard(shard):
        pass


def test_changed_while_open(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, "a")
    (shard,) = open_checkpoint(tmp_path)
    with pytest.raises(LoadError, match="changed while being loaded"), open_shard(shard):
        with open(path, "r+b") as file:
            file.write(bytes(8))
        os.utime(path, ns=(0, 0))


def test_truncated_while_open(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, "a")
    (shard,) = open_checkpoint(tmp_path)
    with pytest.raises(LoadError, match="was truncated meanwhile"), open_shard(shard) as descriptor:
        os.truncate(path, 20)
        read_into(descriptor, memoryview(bytearray(24)), shard.entries[0].start, path)
