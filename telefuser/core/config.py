"""Plain settings that check themselves: a wrong value fails where it is written, not in the middle of a run.

Every dataclass is frozen: a checked object stays valid and models can share it; `dataclasses.replace` makes a changed
copy.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any


class AttnImplType(Enum):
    """What computes attention. `AUTO` is the fastest exact backend that can run here."""

    TORCH_SDPA = auto()
    TORCH_CUDNN = auto()
    SAGE_ATTN_2_8_8 = auto()
    SAGE_ATTN_2_8_16 = auto()
    SAGE_ATTN_2_8_8_SM90 = auto()
    SPARGE_ATTN = auto()
    FLASH_ATTN_2 = auto()
    FLASH_ATTN_3 = auto()
    FLASH_ATTN_4 = auto()
    RADIAL_ATTN = auto()
    LOCAL_SPARSE_ATTN = auto()
    AUTO = auto()
    TRITON_INT8 = auto()

    @property
    def takes_sparse_config(self) -> bool:
        """True for the patterns `SparseAttentionConfig` describes; SpargeAttn finds its own blocks and needs none."""
        return self in (AttnImplType.RADIAL_ATTN, AttnImplType.LOCAL_SPARSE_ATTN)

    @classmethod
    def parse(cls, name: "str | AttnImplType") -> "AttnImplType":
        """The member called `name`: any case, `-` for `_`, or short ("sdpa", "fa3"); ValueError lists the choices."""
        if isinstance(name, cls):
            return name
        if isinstance(name, str):
            key = name.strip().replace("-", "_").upper()
            key = _SHORT_NAMES.get(key, key)
            if key in cls.__members__:
                return cls[key]
        raise ValueError(f"attention backend {name!r} is unknown; choose one of {_choices(cls)}")


_SHORT_NAMES = {
    "SDPA": "TORCH_SDPA",
    "CUDNN": "TORCH_CUDNN",
    "FA2": "FLASH_ATTN_2",
    "FA3": "FLASH_ATTN_3",
    "FA4": "FLASH_ATTN_4",
    "SPARGE": "SPARGE_ATTN",
    "RADIAL": "RADIAL_ATTN",
    "LOCAL": "LOCAL_SPARSE_ATTN",
    "LOCAL_SPARSE": "LOCAL_SPARSE_ATTN",
}


class QuantType(Enum):
    """Storage format of quantised weights."""

    FP8 = auto()
    INT8 = auto()
    MXFP8 = auto()
    MXFP6 = auto()
    MXFP4 = auto()
    NVFP4 = auto()
    BNB_NF4 = auto()
    TORCHAO_FP8 = auto()


class QuantKernelBackend(Enum):
    """What multiplies quantised weights. `AUTO` takes the fastest one that can run here."""

    AUTO = auto()
    TF_KERNEL = auto()
    VLLM = auto()
    CUTLASS = auto()
    TORCHAO = auto()
    BITSANDBYTES = auto()
    TORCH_SCALED_MM = auto()
    NATIVE = auto()
    TRITON = auto()


@dataclass(frozen=True)
class SparseAttentionConfig:
    """One sparse pattern over the tokens of a video.

    sparse_impl: the pattern; None takes the one of the `AttentionConfig` that holds this object.
    dense_timesteps, dense_layers: the first so many denoising steps, and layers, attend densely.
    decay_factor: radial only; how fast the window narrows with the distance between two frames, larger keeps more.
    local_window_size: local only; how far a token sees to each side in (frames, rows, columns) of the video's tokens;
        one number stands for all three.
    block_size: tokens a side of one block of the mask, 64 or 128.
    use_sage_attention: take a kernel that quantises, where one is installed.
    """

    sparse_impl: AttnImplType | None = None
    dense_timesteps: int = 40
    dense_layers: int = 0
    decay_factor: float = 1.0
    local_window_size: int | tuple[int, int, int] = 6
    block_size: int = 128
    use_sage_attention: bool = False

    def __post_init__(self):
        if self.sparse_impl is not None:
            _check_enum(self, "sparse_impl", AttnImplType)
            if not self.sparse_impl.takes_sparse_config:
                raise ValueError(
                    f"sparse_impl {self.sparse_impl.name} is not a sparse pattern; "
                    "choose RADIAL_ATTN or LOCAL_SPARSE_ATTN"
                )
        _check_int(self, "dense_timesteps", minimum=0)
        _check_int(self, "dense_layers", minimum=0)
        _check_number(self, "decay_factor", positive=True)
        window = self.local_window_size
        if not isinstance(window, (list, tuple)):
            _check_int(self, "local_window_size", minimum=1)
        elif len(window) != 3 or not all(_is_int(size) and size >= 0 for size in window):
            raise ValueError(
                f"SparseAttentionConfig.local_window_size is {window!r}; give one number of at least 1, or "
                "(frames, rows, columns) of at least 0 each"
            )
        else:
            # Masks are cached by it.
            object.__setattr__(self, "local_window_size", tuple(window))
        # The block kernels tile by 64 or 128 tokens; any other size would read across a tile.
        if self.block_size not in (64, 128):
            raise ValueError(f"block_size is {self.block_size!r}; the sparse kernels take 64 or 128")
        _check_bool(self, "use_sage_attention")

    def should_use_dense(self, numeral_timestep: int, layer_idx: int) -> bool:
        """Whether layer `layer_idx` attends densely at denoising step `numeral_timestep` (both count from 0)."""
        return numeral_timestep < self.dense_timesteps or layer_idx < self.dense_layers


@dataclass(frozen=True)
class AttentionConfig:
    """How `attention` computes.

    attn_impl: backend or sparse pattern. One that cannot run here is replaced by TORCH_SDPA with one warning.
    sparse_config: details of a sparse pattern; filled with defaults when `attn_impl` is one, refused when it is dense.
    scale: factor on q·k before the softmax; None is head_dim ** -0.5.
    dropout: probability of dropping an attention weight, in [0, 1).
    strict: raise instead of replacing an explicit `attn_impl` that cannot run here.
    """

    attn_impl: AttnImplType = AttnImplType.AUTO
    sparse_config: SparseAttentionConfig | None = None
    scale: float | None = None
    dropout: float = 0.0
    is_causal: bool = False
    strict: bool = False

    def __post_init__(self):
        _check_enum(self, "attn_impl", AttnImplType)
        self._settle_sparse_config()
        if self.scale is not None:
            _check_number(self, "scale", positive=True)
        _check_number(self, "dropout")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"AttentionConfig.dropout is {self.dropout!r}; give a probability of at least 0 and below 1"
            )
        _check_bool(self, "is_causal")
        _check_bool(self, "strict")

    def _settle_sparse_config(self):
        sparse, impl = self.sparse_config, self.attn_impl
        if sparse is not None and not isinstance(sparse, SparseAttentionConfig):
            raise ValueError(f"AttentionConfig.sparse_config is {sparse!r}; give a SparseAttentionConfig or None")
        if not impl.takes_sparse_config:
            if sparse is not None:
                raise ValueError(
                    f"attn_impl {impl.name} takes no sparse_config; "
                    "use AttentionConfig.radial_attention() or .local_sparse_attention(), or leave sparse_config out"
                )
            return
        sparse = sparse or SparseAttentionConfig()
        if sparse.sparse_impl not in (None, impl):
            raise ValueError(f"attn_impl {impl.name} and sparse_config.sparse_impl {sparse.sparse_impl.name} disagree")
        object.__setattr__(self, "sparse_config", replace(sparse, sparse_impl=impl))

    @classmethod
    def dense_attention(cls, attn_impl: AttnImplType = AttnImplType.FLASH_ATTN_2, **kwargs: Any) -> "AttentionConfig":
        """Attention over all keys by `attn_impl`; `kwargs` are the other fields."""
        config = cls(attn_impl=attn_impl, **kwargs)
        if config.is_sparse():
            raise ValueError(f"attn_impl {attn_impl.name} is sparse; dense_attention() takes a dense backend")
        return config

    @classmethod
    def radial_attention(
        cls,
        dense_timesteps: int = 40,
        dense_layers: int = 0,
        decay_factor: float = 1.0,
        use_sage_attention: bool = False,
        block_size: int = 128,
        **kwargs: Any,
    ) -> "AttentionConfig":
        """Radial attention (arXiv 2506.19852): the window narrows with the distance in time; `kwargs` as above."""
        sparse = SparseAttentionConfig(
            sparse_impl=AttnImplType.RADIAL_ATTN,
            dense_timesteps=dense_timesteps,
            dense_layers=dense_layers,
            decay_factor=decay_factor,
            use_sage_attention=use_sage_attention,
            block_size=block_size,
        )
        return cls(attn_impl=AttnImplType.RADIAL_ATTN, sparse_config=sparse, **kwargs)

    @classmethod
    def local_sparse_attention(
        cls,
        dense_timesteps: int = 40,
        dense_layers: int = 0,
        local_window_size: int | tuple[int, int, int] = 6,
        block_size: int = 128,
        **kwargs: Any,
    ) -> "AttentionConfig":
        """Attention within a window of frames, rows and columns around each token; `kwargs` as above."""
        sparse = SparseAttentionConfig(
            sparse_impl=AttnImplType.LOCAL_SPARSE_ATTN,
            dense_timesteps=dense_timesteps,
            dense_layers=dense_layers,
            local_window_size=local_window_size,
            block_size=block_size,
        )
        return cls(attn_impl=AttnImplType.LOCAL_SPARSE_ATTN, sparse_config=sparse, **kwargs)

    def is_sparse(self) -> bool:
        """Whether `attn_impl` is a sparse pattern."""
        return self.sparse_config is not None

    def should_use_dense(self, numeral_timestep: int = 0, layer_idx: int = 0) -> bool:
        """Whether this step and layer (both count from 0) attend densely; always True for a dense config."""
        return self.sparse_config is None or self.sparse_config.should_use_dense(numeral_timestep, layer_idx)


class ParallelConfigError(ValueError, RuntimeError):
    """Degrees and devices disagree. A RuntimeError too, because callers of `validate` catch that."""


_DEGREES = ("dp_degree", "cfg_degree", "sp_ulysses_degree", "sp_ring_degree", "pp_degree", "tp_degree")


@dataclass(frozen=True)
class ParallelConfig:
    """How one run is split over devices. The product of the degrees is the number of devices.

    device_ids: indices of the devices, or None for the first `world_size` visible ones.
    dp: copies for different prompts; cfg: the conditional and the unconditional pass; sp_ulysses, sp_ring: the tokens;
    pp: the layers; tp: the width of each layer.
    timeout: seconds that a collective waits for the other processes.
    """

    device_ids: list[int] | None = None
    dp_degree: int = 1
    cfg_degree: int = 1
    sp_ulysses_degree: int = 1
    sp_ring_degree: int = 1
    pp_degree: int = 1
    tp_degree: int = 1
    enable_fsdp: bool = False
    timeout: int = 600
    queue_with_cpu: bool = False
    worker_intra_op_threads: int = 1

    def __post_init__(self):
        for name in (*_DEGREES, "timeout", "worker_intra_op_threads"):
            _check_int(self, name, minimum=1)
        if self.cfg_degree > 2:
            raise ValueError(f"cfg_degree is {self.cfg_degree}; guidance makes two passes, so give 1 or 2")
        _check_bool(self, "enable_fsdp")
        _check_bool(self, "queue_with_cpu")
        if self.device_ids is not None:
            self._check_device_ids()
        self.validate()

    def _check_device_ids(self):
        ids = self.device_ids
        if not isinstance(ids, (list, tuple)) or not ids or not all(_is_int(i) and i >= 0 for i in ids):
            raise ValueError(
                f"ParallelConfig.device_ids is {ids!r}; give a list of device indices such as [0, 1], or None"
            )
        if len(set(ids)) != len(ids):
            raise ValueError(f"ParallelConfig.device_ids is {ids!r}; each device may appear once")
        object.__setattr__(self, "device_ids", list(ids))

    @property
    def world_size(self) -> int:
        """The number of processes, one a device."""
        return math.prod(getattr(self, name) for name in _DEGREES)

    def validate(self, num_devices: int | None = None) -> None:
        """Raise ParallelConfigError unless the degrees multiply to the number of devices.

        num_devices: what to hold them against; None takes the length of `device_ids`, or nothing without `device_ids`.
        """
        if num_devices is None:
            if self.device_ids is None:
                return
            num_devices = len(self.device_ids)
        if self.world_size != num_devices:
            degrees = " x ".join(f"{name}={getattr(self, name)}" for name in _DEGREES if getattr(self, name) > 1)
            raise ParallelConfigError(
                f"{degrees or 'all degrees 1'} need {self.world_size} device(s) but {num_devices} are given; "
                f"make the degrees multiply to {num_devices} (for example sp_ulysses_degree={num_devices}) "
                f"or give {self.world_size} device_ids"
            )


@dataclass(frozen=True)
class QuantConfig:
    """Which linear layers of a model are stored quantised, and how.

    weight_block_size: (rows, columns) that share one scale; None is one scale an output channel.
    group_size: elements that share one scale in the 4- and 6-bit formats.
    quantize_modules: only layers whose name contains one of these; None is every linear layer.
    skip_modules: never layers whose name contains one of these; by default the small ones that set the precision.
    keep_fp16_weight: keep the original weight on the CPU so that quantisation can be undone.
    """

    enabled: bool = False
    quant_type: QuantType = QuantType.FP8
    kernel_backend: QuantKernelBackend = QuantKernelBackend.AUTO
    weight_block_size: tuple[int, int] | None = None
    group_size: int = 16
    quantize_modules: tuple[str, ...] | None = None
    skip_modules: tuple[str, ...] = ("head", "time_embedding", "time_projection", "patch_embedding")
    keep_fp16_weight: bool = False

    def __post_init__(self):
        _check_bool(self, "enabled")
        _check_bool(self, "keep_fp16_weight")
        _check_enum(self, "quant_type", QuantType)
        _check_enum(self, "kernel_backend", QuantKernelBackend)
        _check_int(self, "group_size", minimum=1)
        block = self.weight_block_size
        if block is not None:
            if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(_is_int(n) and n > 0 for n in block):
                raise ValueError(
                    f"QuantConfig.weight_block_size is {block!r}; give (rows, columns) such as (128, 128), or None"
                )
            object.__setattr__(self, "weight_block_size", tuple(block))
        if self.quantize_modules is not None:
            _check_names(self, "quantize_modules")
        _check_names(self, "skip_modules")


# What torch.compile calls the fields that are Inductor options, with Inductor's own defaults.
_INDUCTOR_OPTIONS = {
    "coordinate_descent_tuning": ("coordinate_descent_tuning", False),
    "epilogue_fusion": ("epilogue_fusion", True),
    "triton_cudagraphs": ("triton.cudagraphs", False),
    "max_autotune": ("max_autotune", False),
}
_COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class CompileConfig:
    """Arguments for `torch.compile`; `get_compile_kwargs()` gives them ready to pass on."""

    enabled: bool = False
    backend: str = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    coordinate_descent_tuning: bool = False
    epilogue_fusion: bool = True
    triton_cudagraphs: bool = False
    max_autotune: bool = False

    def __post_init__(self):
        for name in ("enabled", "fullgraph", *_INDUCTOR_OPTIONS):
            _check_bool(self, name)
        if self.dynamic is not None:
            _check_bool(self, "dynamic")
        if not isinstance(self.backend, str) or not self.backend:
            raise ValueError(
                f'CompileConfig.backend is {self.backend!r}; give the name of a backend such as "inductor"'
            )
        if self.mode is not None and self.mode not in _COMPILE_MODES:
            raise ValueError(f"CompileConfig.mode is {self.mode!r}; choose one of {', '.join(_COMPILE_MODES)}, or None")
        changed = [name for name, (_, default) in _INDUCTOR_OPTIONS.items() if getattr(self, name) != default]
        # torch.compile takes a mode or options, never both, and only Inductor knows these options.
        if changed and self.mode is not None:
            raise ValueError(f"mode {self.mode!r} and {', '.join(changed)} exclude each other; leave one of them out")
        if (changed or self.mode is not None) and self.backend != "inductor":
            what = ", ".join(changed) if changed else "mode"
            raise ValueError(f'{what} works with backend "inductor" only, not {self.backend!r}')

    def get_compile_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `torch.compile`; options appear only where they differ from Inductor's defaults."""
        kwargs: dict[str, Any] = {"backend": self.backend, "fullgraph": self.fullgraph, "dynamic": self.dynamic}
        options = {
            option: getattr(self, name)
            for name, (option, default) in _INDUCTOR_OPTIONS.items()
            if getattr(self, name) != default
        }
        if self.mode is not None:
            kwargs["mode"] = self.mode
        if options:
            kwargs["options"] = options
        return kwargs


def _choices(enum: type[Enum]) -> str:
    return ", ".join(enum.__members__)


def _is_int(value: object) -> bool:
    # bool is an int to Python, yet `dense_layers=True` is a slip.
    return isinstance(value, int) and not isinstance(value, bool)


def _check_enum(owner: object, name: str, enum: type[Enum]) -> None:
    value = getattr(owner, name)
    if not isinstance(value, enum):
        raise ValueError(
            f"{type(owner).__name__}.{name} is {value!r}; give a member of {enum.__name__}: {_choices(enum)}"
        )


def _check_bool(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if not isinstance(value, bool):
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; give True or False")


def _check_int(owner: object, name: str, minimum: int) -> None:
    value = getattr(owner, name)
    if not _is_int(value) or value < minimum:
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; give a whole number of at least {minimum}")


def _check_number(owner: object, name: str, positive: bool = False) -> None:
    value = getattr(owner, name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (positive and value <= 0):
        wanted = "a finite number above 0" if positive else "a finite number"
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; give {wanted}")


def _check_names(owner: object, name: str) -> None:
    value = getattr(owner, name)
    if (
        isinstance(value, str)
        or not isinstance(value, (list, tuple))
        or not all(isinstance(item, str) for item in value)
    ):
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; give a tuple of names such as ('head',)")
    object.__setattr__(owner, name, tuple(value))
