"""What every rank of a spawned group runs; each check compares with attention or a model on one process.

Rank r draws the same whole tensors as all others and keeps its part.
"""

import math
import time
from functools import partial

import torch
import torch.distributed as dist

from telefuser import distributed
from telefuser.core.config import AttentionConfig, AttnImplType, ParallelConfig
from telefuser.distributed.parallelize import own_bytes
from telefuser.models.wan_video_dit import WanModel
from telefuser.models.wan_video_vae import WanVideoVAE
from telefuser.ops.attention import MaskMap, SparseAttentionState, attention, long_context_attention
from telefuser.ops.quantized_linear import WAN_HIGH_PRECISION, replace_linear_layers
from telefuser.pipelines import parallel_decode
from telefuser.pipelines.decode import decode_frames
from telefuser.pipelines.denoise import denoise
from telefuser.pipelines.parallel_decode import decode_shared, plan_parts
from telefuser.pipelines.wan_video import WanPipeline
from telefuser.schedulers import make_scheduler
from tests.tolerances import rel_error

TINY_DIT = {
    "dim": 48,
    "in_dim": 4,
    "ffn_dim": 64,
    "out_dim": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "num_heads": 4,
    "num_layers": 2,
    "text_len": 8,
}


_meshes = {}


def mesh_of(**degrees):
    """A mesh over the whole group, made once; what the sequence's degrees leave over becomes dp."""
    key = tuple(sorted(degrees.items()))
    if key not in _meshes:
        config = ParallelConfig(dp_degree=dist.get_world_size() // math.prod(degrees.values()), **degrees)
        _meshes[key] = distributed.create_device_mesh_from_config(config)
    return _meshes[key]


def part_index(mesh):
    ulysses = distributed.get_world_size(mesh, "ulysses")
    return distributed.get_rank(mesh, "ring") * ulysses + distributed.get_rank(mesh, "ulysses")


def own(mesh, x, lengths=None):
    """This rank's part of the tokens in dim 1, dealt as `tensor_split` does or in the given lengths."""
    parts = distributed.get_world_size(mesh, "ring") * distributed.get_world_size(mesh, "ulysses")
    pieces = x.tensor_split(parts, dim=1) if lengths is None else x.split(lengths, dim=1)
    return pieces[part_index(mesh)]


def draw(tokens, heads, kv_heads=None, batch=2, dim=16, v_dim=16, dtype=torch.float32):
    g = torch.Generator().manual_seed(tokens)
    kv_heads = kv_heads or heads
    shapes = ((batch, tokens, heads, dim), (batch, tokens, kv_heads, dim), (batch, tokens, kv_heads, v_dim))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def attention_error(degrees, tokens, heads, kv_heads=None, lengths=None, v_dim=16, dtype=torch.float32, **options):
    """Largest deviation of this rank's part from its rows of attention over the whole sequence; shapes are checked."""
    mesh = mesh_of(**degrees)
    q, k, v = draw(tokens, heads, kv_heads, v_dim=v_dim, dtype=dtype)
    want = own(mesh, attention(q.double(), k.double(), v.double(), **options), lengths)
    got = long_context_attention(*(own(mesh, t, lengths) for t in (q, k, v)), device_mesh=mesh, **options)
    assert got.dtype is dtype
    return rel_error(got, want)


def layouts_and_known_counts(degrees):
    """Errors with BNSD in and out, and with the lengths given instead of exchanged."""
    mesh = mesh_of(**degrees)
    whole = draw(33, 4)
    q, k, v = (own(mesh, t) for t in whole)
    want = own(mesh, attention(*whole, scale=0.3))
    counts = [len(part) for part in torch.arange(33).tensor_split(dist.get_world_size())]
    options = {"device_mesh": mesh, "scale": 0.3, "token_counts": counts}
    heads_first = long_context_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), input_layout="BNSD", output_layout="BNSD", **options
    )
    mixed = long_context_attention(q, k, v, output_layout="BNSD", **options)
    return [rel_error(out.transpose(1, 2), want) for out in (heads_first, mixed)]


def perturbed_memory_changes_nothing(degrees):
    """Whether the result is bit-equal when fresh buffers hold NaN: nothing that was never written is read."""
    mesh = mesh_of(**degrees)
    q, k, v = (own(mesh, t) for t in draw(26, 4))
    want = long_context_attention(q, k, v, device_mesh=mesh)
    allocate, allocate_like = torch.Tensor.new_empty, torch.empty_like
    torch.Tensor.new_empty = lambda self, *args, **kwargs: allocate(self, *args, **kwargs).fill_(float("nan"))
    torch.empty_like = lambda x: allocate_like(x).fill_(float("nan") if x.is_floating_point() else 0)
    try:
        got = long_context_attention(q, k, v, device_mesh=mesh)
    finally:
        torch.Tensor.new_empty, torch.empty_like = allocate, allocate_like
    return torch.equal(got, want)


def ulysses_gradient_error(heads):
    """Errors of the gradients of this rank's q, k, v against those of one process."""
    mesh = mesh_of(sp_ulysses_degree=dist.get_world_size())
    whole = [t.requires_grad_() for t in draw(13, heads)]
    attention(*whole).square().sum().backward()
    parts = [own(mesh, t.detach()).clone().requires_grad_() for t in whole]
    long_context_attention(*parts, device_mesh=mesh).square().sum().backward()
    return [rel_error(part.grad, own(mesh, t.grad)) for part, t in zip(parts, whole)]


def ring_with_backend_that_gives_no_lse():
    """Error and warnings of a ring where the chosen backend cannot return the log-sum-exp."""
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("telefuser").addHandler(handler)
    config = AttentionConfig.dense_attention(AttnImplType.SPARGE_ATTN)
    errors = [attention_error({"sp_ring_degree": 2}, 32, 4, attention_config=config) for _ in range(2)]
    logging.getLogger("telefuser").removeHandler(handler)
    return errors, records


def sparse_error(degrees):
    """Errors of radial and local sparse attention in parts against the same on one process."""
    mesh, errors = mesh_of(**degrees), []
    whole, state_of = draw(9 * 10 * 13, 5), MaskMap(9 * 10 * 13, 9, grid=(9, 10, 13))
    for config in (
        AttentionConfig.radial_attention(dense_timesteps=0, decay_factor=0.2, block_size=64),
        AttentionConfig.local_sparse_attention(dense_timesteps=0, local_window_size=2, block_size=64),
    ):
        options = {"attention_config": config, "sparse_state": SparseAttentionState(config, state_of)}
        want = attention(*whole, **options)
        assert rel_error(want, attention(*whole)) > 0.1
        got = long_context_attention(*(own(mesh, t) for t in whole), device_mesh=mesh, **options)
        errors.append(rel_error(got, own(mesh, want)))
    return errors


def absent_partner():
    """Rank 1 stays away for longer than the mesh's timeout: the seconds until rank 0 gives up, and its error."""
    mesh = distributed.create_device_mesh_from_config(ParallelConfig(sp_ulysses_degree=2, timeout=1))
    if dist.get_rank() == 1:
        time.sleep(2)
        return None
    start = time.monotonic()
    try:
        long_context_attention(*draw(4, 2), device_mesh=mesh)
    except RuntimeError as error:
        return time.monotonic() - start, str(error)
    return None


def message_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "no error"


def refusals():
    """The messages of calls that must be refused on every rank, by name."""
    size = dist.get_world_size()
    ulysses, ring = mesh_of(sp_ulysses_degree=size), mesh_of(sp_ring_degree=size)
    q, k, v = (own(ulysses, t) for t in draw(9, 4))
    radial = AttentionConfig.radial_attention()
    one_is_wrong = k[..., :8] if dist.get_rank() == 1 else k
    one_differs = [t[:1] for t in (q, k, v)] if dist.get_rank() == 1 else [q, k, v]
    cross = draw(9 + 2 * dist.get_rank(), 4)
    unnamed = torch.distributed.device_mesh.init_device_mesh("cpu", (size,))

    def call(q, k, v, mesh, **options):
        return message_of(long_context_attention, q, k, v, device_mesh=mesh, **options)

    return {
        "mask": call(q, k, v, ulysses, attn_mask=torch.ones(1, 1, dtype=torch.bool)),
        "sparse ring": call(q, k, v, ring, attention_config=radial),
        "config": call(q, k, v, ring, attention_config="sdpa"),
        "dropout ring": call(q, k, v, ring, attention_config=AttentionConfig(dropout=0.1)),
        "gradient ring": call(q.clone().requires_grad_(), k, v, ring),
        "one wrong": call(q, one_is_wrong, v, ulysses),
        "one differs": call(*one_differs, ulysses),
        "counts": call(q, k, v, ulysses, token_counts=[9] * size),
        "causal parts": call(q, cross[1], cross[2], ring, is_causal=True),
        "other device": call(q.to("meta"), k.to("meta"), v.to("meta"), ulysses),
        "unnamed": call(q, k, v, unnamed),
        "size": message_of(distributed.create_device_mesh_from_config, ParallelConfig(sp_ulysses_degree=size + 1)),
        "sp with tp": message_of(
            distributed.create_device_mesh_from_config, ParallelConfig(sp_ulysses_degree=2, tp_degree=size // 2)
        ),
        "backend": message_of(distributed.create_device_mesh_from_config, ParallelConfig(dp_degree=size), "npu"),
    }


def describe_mesh(**degrees):
    _meshes.clear()
    mesh = mesh_of(**degrees)
    names = distributed.get_mesh_dim_names(mesh)
    return {
        "names": names,
        "device_type": mesh.device_type,
        "shape": tuple(mesh.shape),
        "coordinate": {name: distributed.get_rank(mesh, name) for name in names},
        "ranks": {name: distributed.get_ranks(mesh, name) for name in names},
        "strategy": distributed.get_attention_strategy(mesh),
        "is_last": distributed.get_device_mesh() is mesh,
    }


def make_dit(**changes):
    torch.manual_seed(0)
    model = WanModel(**{**TINY_DIT, **changes}).eval()
    for parameter in model.parameters():  # the zero head would hide everything
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@torch.inference_mode()
def dit_errors(degrees, size, per_token, dtype=torch.float32, fp8=False, **changes):
    """The model's error against one process, and whether every rank holds the very same result."""
    model = make_dit(**changes).to(dtype)
    if fp8:
        # q, k and v of merged projections are slices of one tensor.
        replace_linear_layers(model, skip=WAN_HIGH_PRECISION)
        model.merge_projections()
    g = torch.Generator().manual_seed(1)
    x, context = torch.randn(2, 4, *size, generator=g), torch.randn(2, 7, 16, generator=g).to(dtype)
    tokens = size[0] * size[1] * size[2] // 4
    timestep = torch.rand(2, tokens, generator=g) * 1000 if per_token else torch.tensor([900.0, 500.0])
    want = model(x, timestep, context)
    model.enable_usp(mesh_of(**degrees))
    got = model(x, timestep, context)
    everyone = [torch.empty_like(got) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, got)
    return rel_error(got, want), all(torch.equal(other, got) for other in everyone)


@torch.inference_mode()
def sparse_dit_error(degrees):
    """The model's error under radial attention against one process, and how far that is from dense."""
    model = make_dit()
    g = torch.Generator().manual_seed(3)
    x, context, timestep = torch.randn(2, 4, 9, 14, 14, generator=g), torch.randn(2, 7, 16, generator=g), torch.ones(2)
    config = AttentionConfig.radial_attention(dense_timesteps=1, dense_layers=1, decay_factor=0.2, block_size=64)
    state = SparseAttentionState(config, MaskMap(9 * 7 * 7, 9))
    state.update(numeral_timestep=1)
    dense, want = model(x, timestep, context), model(x, timestep, context, sparse_state=state)
    model.enable_usp(mesh_of(**degrees))
    got = model(x, timestep, context, sparse_state=state)
    return rel_error(got, want), rel_error(want, dense)


@torch.inference_mode()
def sampling_error(guidance, **degrees):
    """Error of a sampling loop whose guidance passes and tokens are split, bit-equality over ranks, and model calls."""
    model, calls = make_dit(), []
    g = torch.Generator().manual_seed(2)
    noise = torch.randn(1, 4, 3, 2, 6, generator=g)
    contexts = [model.prepare_context(torch.randn(1, length, 16, generator=g)) for length in (7, 2)]

    def counted(*args):
        calls.append(args)
        return model(*args)

    want = denoise(model, make_scheduler("unipc", 3, 3.0), noise, *contexts, guidance)
    mesh = mesh_of(**degrees)
    model.enable_usp(mesh)
    got = denoise(counted, make_scheduler("unipc", 3, 3.0), noise, *contexts, guidance, device_mesh=mesh)
    everyone = [torch.empty_like(got) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, got)
    return rel_error(got, want), all(torch.equal(other, got) for other in everyone), len(calls)


def embedded_model_video(**degrees):
    """Largest difference between the pixels of the embedded model's video on one process and on all of them."""
    pipeline = WanPipeline.from_pretrained("tiny", device="cpu")
    # 2 x 5 x 3 latent tokens: no degree divides them.
    request = {"height": 80, "width": 48, "num_frames": 5, "steps": 2, "seed": 0}
    want = pipeline("a red circle moves to the right", **request).frames
    pipeline.dit.enable_usp(mesh_of(**degrees))
    got = pipeline("a red circle moves to the right", **request).frames
    assert want.float().std() > 1
    return (got.int() - want.int()).abs().max().item()


@torch.no_grad()
def embedded_dit_errors(**degrees):
    """Errors of the embedded transformer under guidance on 5x8x8 tokens and on 5x5x3, which no degree divides."""
    dit, mesh = WanPipeline.from_pretrained("tiny", device="cpu").dit, mesh_of(**degrees)
    g, errors = torch.Generator().manual_seed(3), []
    for size, length in (((5, 16, 16), 11), ((5, 10, 6), 1)):
        noise = torch.randn(1, 16, *size, generator=g)
        contexts = [dit.prepare_context(torch.randn(1, n, dit.text_dim, generator=g)) for n in (length, 5)]
        outputs = []
        for usp_mesh in (None, mesh):
            dit.device_mesh = usp_mesh
            scheduler = make_scheduler("euler", 1, 3.0)
            outputs.append(denoise(dit, scheduler, noise, *contexts, 5.0, device_mesh=usp_mesh))
        errors.append(rel_error(outputs[1], outputs[0]))
    return errors


def embedded_pipeline_video(**degrees):
    """Largest pixel difference of a pipeline on all processes to one by itself, and the seeds that no caller gave."""
    request = {"height": 80, "width": 48, "num_frames": 5, "steps": 1}
    want = WanPipeline.from_pretrained("tiny", device="cpu", parallel=None)("a red circle", seed=0, **request).frames
    config = ParallelConfig(**degrees, timeout=30)
    pipeline = WanPipeline.from_pretrained("tiny", device="cpu", parallel=config)
    video = pipeline("a red circle", seed=0, **request)
    free = pipeline("a red circle", **request)
    own_seed = message_of(pipeline, "a red circle", seed=dist.get_rank(), **request)
    difference = (video.frames.int() - want.int()).abs().max().item()
    return difference, free.seed, free.frames.sum().item(), own_seed, video.settings["parallel"]


def fsdp_errors(dtype, **degrees):
    """Error of a model whose weights and tokens are spread, and the share of the weights that this process holds."""
    model = make_dit().eval()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in WanModel.FP32_PARAMETERS):
            parameter.data = parameter.data.to(dtype)
    g = torch.Generator().manual_seed(4)
    x, context = torch.randn(1, 4, 5, 2, 6, generator=g), torch.randn(1, 7, 16, generator=g)
    with torch.no_grad():
        want = model(x, torch.tensor([700.0]), context)
    whole, mesh = own_bytes(model), mesh_of(**degrees)
    model.enable_usp(mesh)
    distributed.shard_model(model, "cpu")
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            prepared = model.prepare_context(context)
            outputs += [model(x, torch.tensor([700.0]), prepared) for _ in range(2)]
    return max(rel_error(got, want) for got in outputs), own_bytes(model) / whole


def fsdp_refusals():
    model = make_dit()
    model.register_buffer("packed", torch.zeros(2, dtype=torch.float8_e4m3fn))
    return [message_of(distributed.shard_model, module, "cpu") for module in (model, torch.nn.Linear(2, 2))]


def make_vae():
    torch.manual_seed(5)
    vae = WanVideoVAE(dim=4, dim_mult=(1, 2, 2, 2), num_res_blocks=1).eval()
    for name, parameter in vae.named_parameters():
        if parameter.ndim > 2 and not name.endswith("gamma"):
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return vae


def shared_decoding(height, width, **degrees):
    """Largest difference to one process's frames, their spread, and the planned share; all on an area of latents."""
    mesh, vae = mesh_of(**degrees), make_vae()
    latents = torch.randn(16, 3, height, width, generator=torch.Generator().manual_seed(6))
    parts, share = plan_parts(vae, height, width, dist.get_world_size())
    got, want = decode_shared(vae, latents, mesh), decode_frames(vae, latents)
    if got is None:
        return None, None, share, len(parts)
    return (got.int() - want.int()).abs().max().item(), want.float().std().item(), share, len(parts)


def shared_decoding_with_a_failure(error_type, fails_at="decode_part_chunks"):
    """What each process gets where one fails at its part, or at the room for the exchange."""
    mesh, vae = mesh_of(sp_ulysses_degree=dist.get_world_size()), make_vae()
    owner = vae if fails_at == "decode_part_chunks" else parallel_decode
    works = getattr(owner, fails_at)

    def fails(*args):
        if dist.get_rank() == 1:
            raise error_type("no room")
        return works(*args)

    setattr(owner, fails_at, fails)
    try:
        decode_shared(vae, torch.randn(16, 2, 24, 24), mesh)
    except RuntimeError as error:
        return type(error).__name__, str(error)
    finally:
        setattr(owner, fails_at, works)
    return None


def collectives_of_attention(degrees):
    """What one call sends and in which order, by the names of the calls."""
    from telefuser.distributed import comm
    from telefuser.ops.attention import long_context

    events = []

    def noted(name, call):
        def wrapper(*args, **kwargs):
            events.append(name)
            return call(*args, **kwargs)

        return wrapper

    mesh = mesh_of(**degrees)
    parts = [own(mesh, t) for t in draw(24, 4)]
    counts = [24 // dist.get_world_size()] * dist.get_world_size()
    places = [
        (dist, "all_to_all_single"), (dist, "all_gather"), (comm.Ring, "start"), (comm.Ring, "finish"),
        (long_context, "attention"),
    ]  # fmt: skip
    originals = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, call in originals:
        setattr(place, name, noted(name, call))
    try:
        long_context_attention(*parts, device_mesh=mesh, token_counts=counts)
    finally:
        for place, name, call in originals:
            setattr(place, name, call)
    return events


def dit_training_is_refused():
    model = make_dit()
    model.enable_usp(mesh_of(sp_ulysses_degree=dist.get_world_size()))
    x, context = torch.randn(1, 4, 1, 4, 4), torch.randn(1, 7, 16)
    return message_of(model, x, torch.tensor([1.0]), context)


def execute(source):
    """Run a block of the specification with a tiny `dit`, then the model on its mesh: the error against one process."""
    dit = make_dit()
    x, context = torch.randn(1, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 2, 16)
    with torch.inference_mode():
        want = dit(x, torch.tensor([700.0]), context)
        exec(compile(source, "<specification block>", "exec"), {"dit": dit})
        return rel_error(dit(x, torch.tensor([700.0]), context), want)


ULYSSES_2, RING_2 = {"sp_ulysses_degree": 2}, {"sp_ring_degree": 2}
ULYSSES_4, RING_4, USP = {"sp_ulysses_degree": 4}, {"sp_ring_degree": 4}, {**ULYSSES_2, **RING_2}
# On four processes the last two leave dp = 2: two sequences at a time, each on half the ranks.
STRATEGIES = {"ulysses": ULYSSES_4, "ring": RING_4, "usp": USP, "dp ulysses": ULYSSES_2, "dp ring": RING_2}
WHOLE = {"ulysses": ULYSSES_4, "ring": RING_4, "usp": USP}
MIXED = {"cfg ulysses": {"cfg_degree": 2, **ULYSSES_2}, "cfg ring": {"cfg_degree": 2, **RING_2}}

# Tokens and options of attention that each strategy must get right; 3 tokens leave a rank of four with none.
ATTENTION = {
    "33 tokens": {"tokens": 33, "heads": 4},
    "31 tokens": {"tokens": 31, "heads": 4},
    "26 tokens, causal": {"tokens": 26, "heads": 4, "is_causal": True},
    "3 tokens": {"tokens": 3, "heads": 4},
    "5 heads": {"tokens": 14, "heads": 5},
    "2 heads": {"tokens": 14, "heads": 2},
    "grouped heads": {"tokens": 32, "heads": 8, "kv_heads": 2},
    "groups cut by ranks": {"tokens": 14, "heads": 6, "kv_heads": 2},
    "groups cut within a rank": {"tokens": 14, "heads": 6, "kv_heads": 3},
    "12 heads in 6 groups": {"tokens": 14, "heads": 12, "kv_heads": 6},
    "wide v, scale": {"tokens": 14, "heads": 4, "v_dim": 24, "scale": 0.5},
    "causal config": {"tokens": 14, "heads": 4, "attention_config": AttentionConfig(is_causal=True)},
    "bfloat16": {"tokens": 33, "heads": 4, "dtype": torch.bfloat16},
    "float64": {"tokens": 14, "heads": 4, "dtype": torch.float64},
}
DIT = {
    "15 tokens": {"size": (5, 2, 6), "per_token": False},
    "15 tokens, a timestep each": {"size": (5, 2, 6), "per_token": True},
    "3 tokens": {"size": (1, 2, 6), "per_token": True},
    "3 heads": {"size": (1, 6, 6), "per_token": False, "dim": 36, "num_heads": 3},
    "bfloat16": {"size": (5, 2, 6), "per_token": False, "dtype": torch.bfloat16},
    "FP8": {"size": (5, 2, 6), "per_token": False, "fp8": True},
}

FOUR = {
    **{
        f"attention: {strategy}: {name}": partial(attention_error, degrees, **case)
        for strategy, degrees in STRATEGIES.items()
        for name, case in ATTENTION.items()
    },
    **{
        f"uneven parts: {strategy}": partial(attention_error, degrees, 23, 4, lengths=[1, 11, 0, 11])
        for strategy, degrees in list(STRATEGIES.items())[:3]
    },
    **{f"layouts: {name}": partial(layouts_and_known_counts, STRATEGIES[name]) for name in ("ulysses", "ring", "usp")},
    **{f"poison: {name}": partial(perturbed_memory_changes_nothing, degrees) for name, degrees in STRATEGIES.items()},
    **{
        f"dit: {strategy}: {name}": partial(dit_errors, STRATEGIES[strategy], **case)
        for strategy in ("ulysses", "ring", "usp")
        for name, case in DIT.items()
    },
    "sampling: cfg": partial(sampling_error, 5.0, cfg_degree=2),
    "sampling: cfg ulysses": partial(sampling_error, 5.0, cfg_degree=2, **ULYSSES_2),
    "sampling: cfg ring": partial(sampling_error, 5.0, cfg_degree=2, **RING_2),
    "sampling: cfg ring, no guidance": partial(sampling_error, 1.0, cfg_degree=2, **RING_2),
    "embedded model": partial(embedded_model_video, **USP),
    **{
        f"embedded dit: {name}": partial(embedded_dit_errors, **degrees) for name, degrees in {**WHOLE, **MIXED}.items()
    },
    "pipeline": partial(embedded_pipeline_video, cfg_degree=2, sp_ulysses_degree=2),
    "pipeline with FSDP": partial(embedded_pipeline_video, cfg_degree=2, sp_ring_degree=2, enable_fsdp=True),
    **{
        f"fsdp: {name}: {dtype}": partial(fsdp_errors, dtype, **degrees)
        for name, degrees in {"dp": {}, **WHOLE, **MIXED}.items()
        for dtype in (torch.float32, torch.bfloat16)
    },
    "refusals of fsdp": fsdp_refusals,
    **{f"decode: {h}x{w}": partial(shared_decoding, h, w, **USP) for h, w in ((24, 24), (23, 31), (1, 40), (8, 8))},
    "decode: error": partial(shared_decoding_with_a_failure, RuntimeError),
    "decode: no memory": partial(shared_decoding_with_a_failure, torch.OutOfMemoryError),
    "decode: no room": partial(shared_decoding_with_a_failure, torch.OutOfMemoryError, "_buffers"),
    **{f"collectives: {name}": partial(collectives_of_attention, degrees) for name, degrees in WHOLE.items()},
    "sparse": partial(sparse_error, ULYSSES_4),
    "gradient: 5 heads": partial(ulysses_gradient_error, 5),
    "gradient: 2 heads": partial(ulysses_gradient_error, 2),
    "training": dit_training_is_refused,
    "refusals": refusals,
    "mesh: usp": partial(describe_mesh, **USP),
    "mesh: ulysses": partial(describe_mesh, **ULYSSES_4),
    "mesh: cfg ring": partial(describe_mesh, cfg_degree=2, sp_ring_degree=2),
    "mesh: dp": describe_mesh,
}
TWO = {
    **{
        f"attention: {strategy}: {name}": partial(attention_error, degrees, **ATTENTION[name])
        for strategy, degrees in (("ulysses", ULYSSES_2), ("ring", RING_2))
        for name in ("33 tokens", "31 tokens", "bfloat16")
    },
    "no lse": ring_with_backend_that_gives_no_lse,
    "dit": partial(dit_errors, ULYSSES_2, **DIT["15 tokens, a timestep each"]),
    "sparse dit": partial(sparse_dit_error, ULYSSES_2),
    "gradient: 5 heads": partial(ulysses_gradient_error, 5),
    "embedded dit: cfg": partial(embedded_dit_errors, cfg_degree=2),
    "embedded dit: ulysses": partial(embedded_dit_errors, **ULYSSES_2),
    "embedded dit: ring": partial(embedded_dit_errors, **RING_2),
    "decode: 24x24": partial(shared_decoding, 24, 24, **RING_2),
    "absent partner": absent_partner,
}
