"""A table of interchangeable implementations of one operator: a declared record a backend, one probe, one fallback.

A record says where its function comes from and what it needs; the table finds out, lazily and once, whether that is
there, and says why not. `ops/attention/backends.py` holds a table. Building one imports no vendor package and touches
no device.
"""

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch

from telefuser import kernel, platforms
from telefuser.ops.base import WITHOUT_TRITON

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """One place a backend's function may come from.

    module, function: what to import. `tf_kernel` is asked of the platform, which owns that import.
    needs: keywords without which the adapter cannot call the function.
    install: how to get it, for the message to someone who lacks it.
    built_flag: a name in the function's module that is False when the package was built without these kernels.
    generations: replaces the record's, for a source that runs on fewer GPUs.
    """

    module: str
    function: str
    needs: tuple[str, ...] = ()
    install: str = ""
    built_flag: str = ""
    generations: tuple[int | tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Backend:
    """What every record declares; a table's own records add what their operator cares about.

    impl: the enum member that names it.
    run: the adapter, called with the probed `Entry` first.
    sources: alternatives in order of preference; empty for what PyTorch brings along.
    generations: NVIDIA compute capabilities that run it: 8 is every 8.x, (8, 9) only that one; empty is every platform.
    is_triton: a Triton kernel of ours: NVIDIA GPUs of these generations and AMD GPUs, without a package.
    requires: a last question, asked after the others: None when all is there, else the reason.
    """

    impl: Enum
    run: Callable
    sources: tuple[Source, ...] = ()
    generations: tuple[int | tuple[int, int], ...] = ()
    is_triton: bool = False
    requires: Callable[[], str | None] | None = None

    @property
    def is_nvidia_only(self) -> bool:
        """Vendor packages are CUDA code: an AMD, Ascend or CPU machine never imports one, installed or not."""
        return bool(self.sources or self.generations) and not self.is_triton

    @property
    def is_gpu_only(self) -> bool:
        """Vendor packages and our kernels: tensors on a CPU beside the GPU are not theirs."""
        return self.is_nvidia_only or self.is_triton


@dataclass(frozen=True)
class Entry:
    """A function that was found, and the keywords it names (None: it cannot be inspected, so it is given all)."""

    function: Callable | None = None
    keywords: frozenset[str] | None = frozenset()

    def accepts(self, keyword: str) -> bool:
        """Whether the function names this keyword; a `**kwargs` that would swallow it does not count."""
        return self.keywords is None or keyword in self.keywords

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function without the keywords that the installed version does not have."""
        return self.function(*args, **{key: value for key, value in kwargs.items() if self.accepts(key)})


class BackendTable:
    """The records of one operator, what each can do here, and the fallback when one cannot.

    title: what the table chooses, for messages ("attention").
    fallback: the backend that always works.
    absent: the reason given for an enum member without a record.
    """

    def __init__(self, title: str, fallback: Enum, absent: str):
        self.title = title
        self.fallback = fallback
        self.absent = absent
        self._records: dict[Enum, Backend] = {}
        self._probed: dict[tuple, Entry | str] = {}
        self._broken: dict[Enum, str] = {}
        self._failed: dict[Enum, set[str]] = {}
        self._worked: set[Enum] = set()
        self._warned: set[tuple] = set()

    def register(self, record: Backend) -> Backend:
        """Add a record; a second one for the same member is a ValueError."""
        if record.impl in self._records:
            raise ValueError(f"{self.title}: {record.impl.name} has a record already")
        self._records[record.impl] = record
        return record

    def record(self, impl: Enum) -> Backend | None:
        """The record of `impl`, or None."""
        return self._records.get(impl)

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._records.values())

    def is_present(self, impl: Enum) -> bool:
        """Whether `impl` could be here, judged without an import or a device: an NVIDIA platform, the package found."""
        record = self._records[impl]
        if record.is_nvidia_only and not isinstance(platforms.current_platform, platforms.CudaPlatform):
            return False
        return not record.sources or any(is_installed(source.module) for source in record.sources)

    def probe(self, impl: Enum, device: torch.device | None = None) -> Entry | str:
        """The function of `impl`, or the reason why there is none here. Answered once a platform and GPU generation.

        device: where the tensors are; None for the current device. Its capability is asked for here, not at import.
        """
        record = self._records.get(impl)
        if record is None:
            return self.absent
        if impl in self._broken:
            return self._broken[impl]
        platform = platforms.current_platform
        if record.is_gpu_only and device is not None and device.type != platform.device_type:
            # Asking about the GPU would start it for somebody who runs on the CPU beside it.
            return f"the tensors are on {device}, not on the GPU"
        arch = platform.cuda_arch(device) if record.is_gpu_only else None
        key = (platform, impl, arch)
        if key not in self._probed:
            self._probed[key] = _probe(record, platform, arch)
        return self._probed[key]

    def reason(self, impl: Enum, device: torch.device | None = None) -> str | None:
        """Why `impl` cannot be used here, or None when it can."""
        found = self.probe(impl, device)
        return found if isinstance(found, str) else None

    def fall_back(self, wanted: Enum, reason: str, strict: bool = False, kind: str = "unavailable") -> Backend:
        """The fallback's record, with one warning a process for `wanted` and `kind` of reason.

        strict: raise ValueError with the same text instead.
        kind: what tells reasons apart. The text will not do: "20 tokens are too few" must not warn again for 21.
        """
        text = f"{self.title}: {wanted.name} cannot be used: {reason}. Fallback: {self.fallback.name}."
        if strict:
            raise ValueError(text)
        self.warn_once((wanted, kind), text)
        return self._records[self.fallback]

    def mark_failed(self, impl: Enum, call: str, error: Exception) -> None:
        """Leave `impl` out where `call` comes again, and everywhere once it failed at two kinds and never worked."""
        reason = f"it failed when called: {_first_line(error)}"
        failed = self._failed.setdefault(impl, set())
        failed.add(call)
        if len(failed) > 1 and impl not in self._worked:
            self._broken[impl] = reason
            self.warn_once((impl, "broken"), f"{self.title}: {impl.name} is left out: {reason}")
        else:
            self.warn_once((impl, call), f"{self.title}: {impl.name} is left out for {call}: {reason}")

    def run(
        self,
        choose: Callable[[frozenset[Enum]], tuple[Backend, Entry]],
        compute: Callable[[Backend, Entry], Any],
        describe: Callable[[], str],
        first: tuple[Backend, Entry] | None = None,
        is_replaceable: bool = True,
    ) -> Any:
        """`compute` with what `choose` names; a backend that fails is left out of such calls and the next one tried.

        choose: gets the members that failed at such a call before, and names another.
        describe: the call's shapes in words: calls of the same words are of one kind. Asked after a failure only.
        first: a choice that the caller has made already, tried before `choose` is asked.
        is_replaceable: False for a backend that was asked for by name; its error is then the caller's. So is one of
        the fallback, and running out of memory, which says nothing about the backend.
        """
        without = self._failed_at(describe()) if self._failed and is_replaceable else frozenset()
        record, entry = first if first is not None and first[0].impl not in without else choose(without)
        while True:
            try:
                result = compute(record, entry)
            except torch.OutOfMemoryError:
                raise
            # A package can fail in any way. Nobody asked for it by name: the error is logged and the next one tried.
            except Exception as error:
                if not is_replaceable or record.impl is self.fallback:
                    raise
                self.mark_failed(record.impl, describe(), error)
            else:
                self._worked.add(record.impl)
                return result
            without |= {record.impl}
            record, entry = choose(without)

    def _failed_at(self, call: str) -> frozenset[Enum]:
        return frozenset(impl for impl, calls in self._failed.items() if call in calls)

    def warn_once(self, key: tuple, text: str) -> None:
        """Log `text` as a warning unless something was logged under `key` in this process."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s", text)

    def forget(self) -> None:
        """Drop every cached answer and given warning; for tests, and after a package was installed."""
        self._probed.clear()
        self._broken.clear()
        self._failed.clear()
        self._worked.clear()
        self._warned.clear()


def is_installed(module: str) -> bool:
    """Whether `module` can be found, without importing anything.

    `importlib.util.find_spec` would import the parents of a dotted name. A folder without `__init__.py` does not count:
    flash-attn-4 alone leaves such a `flash_attn` behind, which is not FlashAttention 2.
    """
    spec, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        if name in sys.modules:
            loaded = sys.modules[name]
            spec = getattr(loaded, "__spec__", None)
            if loaded is None:
                return False
            if spec is None:
                continue
        else:
            spec = _find_spec(name, spec)
        if spec is None:
            return False
    return spec is None or spec.origin is not None


def _find_spec(name: str, parent: ModuleSpec | None) -> ModuleSpec | None:
    if parent is not None:
        return PathFinder.find_spec(name, parent.submodule_search_locations)
    try:
        return importlib.util.find_spec(name) if "." not in name else None
    # An import hook may refuse a package instead of not finding it.
    except ImportError:
        return None


def _probe(record: Backend, platform: Any, arch: tuple[int, int] | None) -> Entry | str:
    if record.is_nvidia_only and arch is None:
        return f"it needs an NVIDIA GPU and this platform is {platform.device_name}"
    if record.is_triton and WITHOUT_TRITON.issuperset(platform.op_keys):
        return f"it needs a GPU that Triton compiles for and this platform is {platform.device_name}"
    if record.is_triton and not kernel.HAS_TRITON:
        return "Triton cannot be imported here (pip install triton)"
    if record.sources:
        found = _first_usable(record, arch)
    elif arch is not None and not _runs_on(record.generations, arch):
        found = _wrong_generation(record.generations, arch)
    else:
        found = Entry()
    if isinstance(found, Entry) and record.requires is not None:
        return record.requires() or found
    return found


def _first_usable(record: Backend, arch: tuple[int, int]) -> Entry | str:
    reasons = []
    for source in record.sources:
        generations = source.generations or record.generations
        if not is_installed(source.module):
            hint = f" ({source.install})" if source.install else ""
            reasons.append(f"package {source.module} is not installed{hint}")
        elif not _runs_on(generations, arch):
            reasons.append(_wrong_generation(generations, arch))
        else:
            found = _load(source)
            if isinstance(found, Entry):
                return found
            reasons.append(found)
    return "; ".join(dict.fromkeys(reasons))


def _load(source: Source) -> Entry | str:
    name = f"{source.module}.{source.function}"
    try:
        if source.module == "tf_kernel":
            module = platforms.current_platform.tf_kernel
        else:
            module = importlib.import_module(source.module)
    # A package built for another PyTorch can fail in any way while it loads; the reason is kept and shown.
    except Exception as error:  # noqa: BLE001
        return f"importing {source.module} failed: {type(error).__name__}: {_first_line(error)}"
    if module is None:
        return f"this platform does not offer {source.module}"
    function = getattr(module, source.function, None)
    if not callable(function):
        return f"the installed {source.module} has no function {source.function}"
    home = sys.modules.get(getattr(function, "__module__", None) or source.module)
    if source.built_flag and getattr(home, source.built_flag, True) is False:
        return f"the installed {source.module} was built without these kernels ({source.built_flag} is False)"
    keywords = _keywords(function)
    missing = [keyword for keyword in source.needs if keywords is not None and keyword not in keywords]
    if missing:
        return f"the installed {name} takes no argument {', '.join(missing)}"
    return Entry(function, keywords)


def _keywords(function: Callable) -> frozenset[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Compiled functions have no signature to read.
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _runs_on(generations: tuple[int | tuple[int, int], ...], arch: tuple[int, int]) -> bool:
    return not generations or arch[0] in generations or tuple(arch) in generations


def _wrong_generation(generations: tuple[int | tuple[int, int], ...], arch: tuple[int, int]) -> str:
    wanted = ", ".join(f"{g}.x" if isinstance(g, int) else f"{g[0]}.{g[1]}" for g in generations)
    return f"it needs compute capability {wanted} and this GPU has {arch[0]}.{arch[1]}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
