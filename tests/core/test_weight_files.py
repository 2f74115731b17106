"""Headers of weight files: what is read, and what each broken file is told."""

import json
import pickle
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from telefuser.core import weight_files
from telefuser.core.weight_files import CheckpointError, WeightSet, read_header, shard_files

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}


@pytest.fixture(params=["safetensors", "pth"])
def good_file(request, tmp_path):
    file = tmp_path / f"good.{request.param}"
    if request.param == "pth":
        torch.save(TENSORS, file)
    else:
        save_file(TENSORS, file)
    return file


def refusal(file, *parts):
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(file), *parts):
        assert part in message, message
    return message


def test_header_gives_shapes_and_dtypes(good_file):
    entries = read_header(good_file)
    assert {key: (entry.shape, entry.dtype, entry.num_bytes) for key, entry in entries.items()} == {
        "a.weight": ((2, 3), "float32", 24),
        "b.bias": ((2,), "bfloat16", 4),
    }


def test_tensors_come_back_bit_equal_across_remaps(good_file, monkeypatch):
    monkeypatch.setattr(weight_files, "_REMAP_BYTES", 0)
    read = {key: tensor.clone() for key, tensor in WeightSet([good_file]).tensors()}
    assert read.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key], tensor)


def test_truncated_files_are_told_from_sizes(good_file):
    data = good_file.read_bytes()
    for keep in (len(data) - 1, len(data) // 2, 30):
        good_file.write_bytes(data[:keep])
        refusal(good_file, "runcated", "Download it again")


def test_empty_file_is_refused(good_file):
    good_file.write_bytes(b"")
    refusal(good_file, "empty")


def test_file_longer_than_its_header_is_refused(tmp_path):
    file = tmp_path / "long.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes() + b"xx")
    refusal(file, "longer")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"GGUF\x03\x00\x00\x00" + bytes(64), "GGUF"),
        (b"this is no weight file at all, just text", "not a"),
        (struct.pack("<Q", 12) + b"{not json at", "not a safetensors"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "not a safetensors"),
    ],
)
def test_other_things_under_a_weight_file_name_are_recognised(tmp_path, content, reason):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    refusal(file, reason)


def test_offsets_that_do_not_fit_the_shape_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    header = json.dumps({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refusal(file, "'w'", "8 bytes")


class RunsCode:
    def __reduce__(self):
        return (print, ("the pickle ran code",))


def test_pickle_that_runs_code_is_refused_without_running_it(tmp_path, capsys):
    file = tmp_path / "evil.pth"
    torch.save({"weight": torch.zeros(2), "payload": RunsCode()}, file)
    refusal(file, "run code", "print", "safetensors")
    plain = tmp_path / "plain.pth"
    plain.write_bytes(pickle.dumps({"weight": RunsCode()}))
    refusal(plain, "plain pickle", "safetensors")
    assert "ran code" not in capsys.readouterr().out


def test_pth_that_is_no_flat_state_dict_is_refused(tmp_path):
    file = tmp_path / "nested.pth"
    torch.save({"state_dict": TENSORS, "step": 3}, file)
    refusal(file, "flat dict", "state_dict", "step")
    torch.save([torch.zeros(2)], file)
    refusal(file, "flat dict", "list")


@pytest.mark.filterwarnings("ignore")
def test_pth_tensors_of_other_kinds_are_refused_by_name(tmp_path):
    file = tmp_path / "odd.pth"
    odd = {
        "sparse": torch.ones(2).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.ones(2, device="meta"),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    }
    for kind, tensor in odd.items():
        torch.save({"some.weight": tensor}, file)
        refusal(file, "some.weight" if kind != "nested" else "", kind if kind != "nested" else "")
    torch.save({3: torch.ones(2)}, file)
    refusal(file, "key 3 is no name")


def test_damaged_pickle_inside_an_intact_zip_is_one_clear_error(tmp_path):
    file = tmp_path / "damaged.pth"
    torch.save({f"weight_{i}": torch.zeros(1) for i in range(100)}, file)
    content = bytearray(file.read_bytes())
    for i in range(200, 4000, 97):
        content[i] ^= 0xFF
    file.write_bytes(content)
    refusal(file)


def test_header_length_that_reads_like_a_tag_is_no_web_page(tmp_path):
    file = tmp_path / "model.safetensors"
    text = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(struct.pack("<Q", 0x3C20) + text.ljust(0x3C20) + bytes(4))
    assert read_header(file)["a"].shape == (1,)


def test_zip_that_is_not_from_torch_is_refused(tmp_path):
    file = tmp_path / "archive.pth"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "hello")
    refusal(file, "not readable as a PyTorch state dict")


def test_missing_shards_are_named(tmp_path):
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    for name in names[:2]:
        save_file({name: torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=names[2]):
        shard_files(tmp_path, names[:2])
    index = "model.safetensors.index.json"
    (tmp_path / index).write_text(json.dumps({"weight_map": {"x": "other.safetensors", "y": names[0]}}))
    with pytest.raises(CheckpointError, match=r"1 of 2 .*other.safetensors"):
        shard_files(tmp_path, [*names[:2], index])


def test_index_may_not_point_outside_its_folder(tmp_path):
    index = "model.safetensors.index.json"
    (tmp_path / index).write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside"):
        shard_files(tmp_path, [index])


def test_a_key_in_two_files_is_refused(tmp_path):
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"weight": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"two.safetensors: key 'weight' is also in one.safetensors"):
        WeightSet([tmp_path / "one.safetensors", tmp_path / "two.safetensors"])


def test_sample_finds_a_tensor_of_nan_and_no_other(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS | {"c": torch.full((4, 4), torch.nan, dtype=torch.float16)}, file)
    assert WeightSet([file]).non_finite_sample() == ("c", file)
    save_file(TENSORS, file)
    assert WeightSet([file]).non_finite_sample() is None
