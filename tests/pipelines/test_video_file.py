"""Video files: what is written can be read back, what fails leaves no half file and keeps the frames."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from telefuser.pipelines import video_file
from telefuser.pipelines.video_file import VideoWriteError, check_output, read_video, write_video

METADATA = {"prompt": 'a "red" circle 圆', "seed": 2**63 - 1, "settings": {"steps": 4, "guidance": 5.0}}


def moving_square(num_frames=9, height=64, width=96) -> torch.Tensor:
    frames = torch.zeros(num_frames, height, width, 3, dtype=torch.uint8)
    frames[..., 0] = 255
    for i in range(num_frames):
        frames[i, 16:48, 4 * i : 4 * i + 32] = torch.tensor([20, 90, 210], dtype=torch.uint8)
    return frames


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov", ".MP4"])
def test_frames_rate_and_metadata_come_back(tmp_path, suffix):
    frames = moving_square()
    path = write_video(frames, tmp_path / f"clip{suffix}", 16, METADATA)
    back, fps, metadata = read_video(path)
    assert back.shape == frames.shape
    assert (fps, metadata) == (16.0, METADATA)
    # Away from edges, which the halved chroma smears, a colour survives to 4 of 255.
    difference = (back.int() - frames.int()).abs()
    assert difference[:, 2:12].max() <= 4
    assert difference[4, 24:40, 24:40].max() <= 4
    assert difference.float().mean() < 3


def test_colours_are_bt709_and_say_so(tmp_path):
    path = write_video(moving_square(), tmp_path / "clip.mp4", 16)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        tags = (context.pix_fmt, context.color_primaries, context.color_trc, context.colorspace, context.color_range)
        assert tags == ("yuv420p", 1, 1, 1, 1)
        luma = next(container.decode(stream)).to_ndarray(format="yuv420p")[4, 50]
    # 16 + 219 * 0.2126 = 62.6 for pure red under BT.709; BT.601 gives 81.5.
    assert abs(int(luma) - 62.6) < 2


def test_one_frame_and_fractional_rates_are_written(tmp_path):
    path = write_video(moving_square(1), tmp_path / "one.mp4", 23.976)
    back, fps, metadata = read_video(path)
    assert back.shape[0] == 1
    assert fps == pytest.approx(23.976, abs=1e-3)
    assert metadata == {}


def test_only_the_finished_file_is_left_with_ordinary_permissions(tmp_path):
    path = write_video(moving_square(), tmp_path / "clip.mp4", 16)
    assert os.listdir(tmp_path) == ["clip.mp4"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        (torch.zeros(2, 16, 16, 3), "uint8"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.uint8), r"\[F, H, W, 3\]"),
        (torch.zeros(0, 16, 16, 3, dtype=torch.uint8), "uint8"),
        (torch.zeros(2, 17, 16, 3, dtype=torch.uint8), "even size"),
    ],
)
def test_frames_that_are_no_video_are_refused(tmp_path, frames, match):
    with pytest.raises(ValueError, match=match):
        write_video(frames, tmp_path / "clip.mp4", 16)
    assert os.listdir(tmp_path) == []


def test_rates_that_are_no_positive_number_are_refused(tmp_path):
    for fps in (0, -1):
        with pytest.raises(ValueError, match="fps"):
            write_video(moving_square(1), tmp_path / "clip.mp4", fps)


def test_outputs_are_checked_before_the_run(tmp_path):
    assert check_output(tmp_path / "clip.mp4", 81, 480, 832) == tmp_path / "clip.mp4"
    assert os.listdir(tmp_path) == []
    (tmp_path / "folder.mp4").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")
    for path, match in [
        (tmp_path / "clip.avi", r"must end in \.mp4"),
        (tmp_path / "clip", "must end in"),
        (tmp_path / "absent" / "clip.mp4", "create it first"),
        (tmp_path / "folder.mp4", "is a folder"),
        (tmp_path / "pipe.mp4", "a device or a pipe"),
        (tmp_path / f"{'x' * 300}.mp4", "name too long"),
        # Fits as it is, not with what the temporary file and the frames that are kept add to it.
        (tmp_path / f"{'x' * 245}.mp4", "name too long"),
        (tmp_path / "a\0.mp4", "null"),
        (tmp_path / "\ud800.mp4", "surrogates"),
    ]:
        with pytest.raises(ValueError, match=match):
            check_output(path)
    assert sorted(os.listdir(tmp_path)) == ["folder.mp4", "pipe.mp4"]


def test_a_folder_that_takes_no_file_is_found_before_the_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(video_file, "open", refuse, raising=False)
    with pytest.raises(ValueError, match=r"no such file can be made.*Permission denied"):
        check_output(tmp_path / "clip.mp4")


def test_a_disk_that_is_too_full_is_found_before_the_run(tmp_path, monkeypatch):
    usage = video_file.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(video_file.shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    with pytest.raises(ValueError, match="MiB are needed, 1 MiB are free"):
        check_output(tmp_path / "clip.mp4", 81, 480, 832)


def test_a_missing_encoder_is_found_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(video_file, "ENCODER", "no_such_encoder")
    with pytest.raises(ValueError, match=r"no_such_encoder.*pip install av"):
        check_output(tmp_path / "clip.mp4")


def test_frames_are_kept_losslessly_when_encoding_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(video_file, "CRF", "no number")
    frames = moving_square()
    (tmp_path / "clip.mp4").write_bytes(b"an older video")
    with pytest.raises(VideoWriteError, match=r"clip\.frames\.npz") as caught:
        write_video(frames, tmp_path / "clip.mp4", 16)
    assert sorted(os.listdir(tmp_path)) == ["clip.frames.npz", "clip.mp4"]
    assert (tmp_path / "clip.mp4").read_bytes() == b"an older video"
    assert np.array_equal(np.load(caught.value.frames_path)["frames"], frames.numpy())


def test_frames_are_kept_when_the_metadata_cannot_be_written(tmp_path):
    with pytest.raises(VideoWriteError, match="frames are kept") as caught:
        write_video(moving_square(1), tmp_path / "clip.mp4", 16, {"seed": object()})
    assert caught.value.frames_path == tmp_path / "clip.frames.npz"
    assert os.listdir(tmp_path) == ["clip.frames.npz"]


def test_a_full_disk_is_named_behind_an_error_of_the_encoder(tmp_path, monkeypatch):
    def wrapped(*_):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise OSError(1447131472, "Error in PyAV callback") from error

    monkeypatch.setattr(video_file, "_encode", wrapped)
    with pytest.raises(VideoWriteError, match="the disk is full"):
        write_video(moving_square(1), tmp_path / "clip.mp4", 16)


def test_a_full_disk_is_named_and_the_frames_go_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr(video_file.tempfile, "gettempdir", lambda: str(tmp_path / "spare"))

    class FullDisk(io.FileIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_on_full_disk(path, mode):
        return FullDisk(path, mode) if Path(path).parent.name == "full" else open(path, mode)

    monkeypatch.setattr(video_file, "open", open_on_full_disk, raising=False)
    with pytest.raises(VideoWriteError, match="the disk is full") as caught:
        write_video(moving_square(), tmp_path / "full" / "clip.mp4", 16)
    assert os.listdir(tmp_path / "full") == []
    assert caught.value.frames_path == tmp_path / "spare" / "clip.frames.npz"
    assert np.load(caught.value.frames_path)["frames"].shape == (9, 64, 96, 3)


WRITER = """
    import resource, sys, torch
    from telefuser.pipelines.video_file import VideoWriteError, write_video
    frames = torch.randint(0, 255, ({frames}, 64, 64, 3), dtype=torch.uint8)
    {before}
    print("ready", flush=True)
    try:
        write_video(frames, sys.argv[1], 16)
    except VideoWriteError as error:
        print(error, error.frames_path)
"""


def start_writer(path, frames: int, before: str = "") -> subprocess.Popen:
    code = textwrap.dedent(WRITER).format(frames=frames, before=before)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no file size limit on Windows")
def test_a_write_that_the_system_cuts_off_is_an_error_not_a_short_file(tmp_path):
    """A real failure of write(2), in the last flush too: no file of this process may pass 20 kB."""
    process = start_writer(tmp_path / "clip.mp4", 9, "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "could not write" in out
    assert out.strip().endswith("None")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_leaves_no_half_file(tmp_path):
    """B134, the saving part."""
    process = start_writer(tmp_path / "clip.mp4", 6000)
    assert process.stdout.readline().strip() == "ready"
    while not os.listdir(tmp_path):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    assert os.listdir(tmp_path) == []


def test_foreign_comments_are_no_metadata(tmp_path):
    path = write_video(moving_square(1), tmp_path / "clip.mp4", 16, {"a": 1})
    assert json.loads(json.dumps(read_video(path)[2])) == {"a": 1}
    with av.open(str(tmp_path / "other.mp4"), "w") as container:
        container.metadata["comment"] = "made by hand"
        stream = container.add_stream("libx264", rate=16)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert read_video(tmp_path / "other.mp4")[2] == {}


def test_the_same_frames_give_the_same_file(tmp_path):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (5, 15, 26, 3), generator=generator, dtype=torch.uint8)
    frames = blocks.repeat_interleave(16, 1).repeat_interleave(16, 2)
    files = [write_video(frames, tmp_path / f"{index}.mp4", 8, {}) for index in range(4)]
    assert len({file.read_bytes() for file in files}) == 1
