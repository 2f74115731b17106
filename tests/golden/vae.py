"""`WanVideoVAE` against "Wan2.1 VAE" files: streaming and whole-clip, with and without normalisation."""

from collections.abc import Iterator

import torch
from torch import Tensor

from telefuser.models.wan_video_vae import WanVideoVAE
from tests.golden.case import Case, NotCheckedError, Row

LIMIT = 2e-5


def build(case: Case) -> WanVideoVAE:
    names = ("latents_mean", "latents_std")
    statistics = {name: case.config[name] for name in names if case.config.get(name) is not None}
    return case.load(WanVideoVAE.from_config({**case.config["class_args"], **statistics}))


def check(case: Case) -> Iterator[Row]:
    if torch.float32 not in case.dtypes:
        raise NotCheckedError("the reference runs the VAE in float32 only")
    vae = build(case)
    tensors = case.tensors()
    for run in case.config["runs"]:
        compare = _encode if run["op"] == "encode" else _decode
        yield from compare(case, vae, tensors, run["tensors"])


def _encode(case: Case, vae: WanVideoVAE, tensors: dict[str, Tensor], name: str) -> Iterator[Row]:
    video = tensors[f"{name}.x"].unsqueeze(0).to(case.device)
    for mode, streaming in (("streaming", True), ("whole clip", False)):
        latent = vae.encode(video, streaming=streaming)[0]
        yield case.max_abs(f"float32 {name} latent {mode}", latent, tensors[f"{name}.latent"], LIMIT)
    moments = torch.cat(vae.encode_moments(video), dim=1)[0]
    yield case.max_abs(f"float32 {name} moments", moments, tensors[f"{name}.moments"], LIMIT)


def _decode(case: Case, vae: WanVideoVAE, tensors: dict[str, Tensor], name: str) -> Iterator[Row]:
    latents = tensors[f"{name}.z"].unsqueeze(0).to(case.device)
    unclamped = tensors[f"{name}.video_unclamped"]
    for mode, streaming in (("streaming", True), ("whole clip", False)):
        video = vae.decode(latents, streaming=streaming)[0]
        yield case.max_abs(f"float32 {name} video {mode}", video, unclamped.clamp(-1, 1), LIMIT)
    chunks = torch.cat(list(vae.decode_chunks(latents)), dim=2)[0]
    yield case.max_abs(f"float32 {name} video chunks", chunks, unclamped.clamp(-1, 1), LIMIT)
    statistics = (torch.tensor(case.config[key], device=case.device) for key in ("latents_mean", "latents_std"))
    mean, std = (values.view(1, -1, 1, 1, 1) for values in statistics)
    raw = vae.decode_raw(latents * std + mean)[0]
    yield case.max_abs(f"float32 {name} video unclamped", raw, unclamped, LIMIT)
