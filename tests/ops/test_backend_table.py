"""The table mechanism on a table of its own: presence, probing, fallback, one warning."""

import functools
import logging
import sys
import types
from enum import Enum, auto

import pytest
import torch

from telefuser import platforms
from telefuser.ops.backend_table import Backend, BackendTable, Entry, Source, is_installed


class Kind(Enum):
    PLAIN = auto()
    VENDOR = auto()
    LATER = auto()


class Gpu(platforms.CudaPlatform):
    def __init__(self, arch):
        super().__init__()
        self.arch = arch

    def cuda_arch(self, device=None):
        return self.arch

    @property
    def tf_kernel(self):
        return None


def run(entry, x):
    return entry.call(x)


def table_with(*sources, **declared):
    table = BackendTable("addition", Kind.PLAIN, "it is not part of this version")
    table.register(Backend(Kind.PLAIN, run))
    table.register(Backend(Kind.VENDOR, run, sources=sources, **declared))
    return table


def warnings(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def on(monkeypatch):
    def use(platform):
        monkeypatch.setattr(platforms, "current_platform", platform)

    return use


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name, source=None):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        if source is not None:
            (folder / "__init__.py").write_text(source)

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("tfstub"):
            del sys.modules[name]


def test_a_backend_of_pytorch_is_there_on_every_platform(on):
    for platform in (platforms.CpuPlatform(), platforms.RocmPlatform(), platforms.NPUPlatform()):
        on(platform)
        assert table_with().reason(Kind.PLAIN) is None


def test_a_member_without_a_record_gives_the_tables_reason():
    """S050."""
    assert table_with().reason(Kind.LATER) == "it is not part of this version"


def test_a_vendor_package_is_never_imported_off_nvidia(on, package):
    """S055, S056, S073: whatever is installed."""
    package("tfstub_vendor", "raise SystemExit('imported')")
    for platform in (platforms.CpuPlatform(), platforms.RocmPlatform(), platforms.NPUPlatform()):
        on(platform)
        table = table_with(Source("tfstub_vendor", "add"), generations=(9,))
        assert not table.is_present(Kind.VENDOR)
        assert platform.device_name in table.reason(Kind.VENDOR)
    assert "tfstub_vendor" not in sys.modules


def test_presence_is_told_without_an_import_and_without_a_device(on, package):
    """S046, B10."""
    package("tfstub_vendor", "def add(x): return x + 1")

    class NoQuestions(Gpu):
        def cuda_arch(self, device=None):
            raise AssertionError("asked for the capability")

    on(NoQuestions((9, 0)))
    assert table_with(Source("tfstub_vendor", "add"), generations=(9,)).is_present(Kind.VENDOR)
    assert not table_with(Source("tfstub_absent", "add"), generations=(9,)).is_present(Kind.VENDOR)
    assert "tfstub_vendor" not in sys.modules


def test_a_found_function_is_imported_once_and_called(on, package):
    package("tfstub_vendor", "import builtins\nbuiltins.tfstub_count += 1\ndef add(x): return x + 1")
    import builtins

    builtins.tfstub_count = 0
    on(Gpu((9, 0)))
    table = table_with(Source("tfstub_vendor", "add"), generations=(9,))
    for _ in range(3):
        entry = table.probe(Kind.VENDOR)
        assert isinstance(entry, Entry)
        assert table.record(Kind.VENDOR).run(entry, 1) == 2
    assert builtins.tfstub_count == 1
    del builtins.tfstub_count


@pytest.mark.parametrize(
    ("arch", "generations", "fits"),
    [
        ((9, 0), (9,), True),
        ((8, 6), (9,), False),
        ((8, 6), ((8, 9), 9), False),
        ((8, 9), ((8, 9), 9), True),
        ((13, 0), (8, 9, 10, 12), False),
    ],
)
def test_generations_are_named_ones_only(on, package, arch, generations, fits):
    """S052, B46: a newer GPU is not assumed to work."""
    package("tfstub_vendor", "def add(x): return x")
    on(Gpu(arch))
    reason = table_with(Source("tfstub_vendor", "add"), generations=generations).reason(Kind.VENDOR)
    assert (reason is None) is fits
    if not fits:
        assert f"{arch[0]}.{arch[1]}" in reason
        assert "tfstub_vendor" not in sys.modules


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise OSError('libcudart.so.11.0: cannot open\\nsecond line')", ("OSError", "libcudart.so.11.0")),
        ("raise RuntimeError('built for torch 2.4')", ("RuntimeError", "built for torch 2.4")),
        ("", ("has no function add",)),
        ("def add(x): return x", ("takes no argument scale",)),
        ("def add(x, **kwargs): return x", ("takes no argument scale",)),
        ("BUILT = False\ndef add(x, scale=None): return x", ("BUILT is False",)),
    ],
)
def test_an_unusable_package_is_a_reason_and_not_a_crash(on, package, source, words):
    """B44, B54: renamed entry points, other signatures, broken installs."""
    package("tfstub_vendor", source)
    on(Gpu((9, 0)))
    reason = table_with(Source("tfstub_vendor", "add", needs=("scale",), built_flag="BUILT")).reason(Kind.VENDOR)
    assert all(word in reason for word in words)
    assert "second line" not in reason


def test_only_named_keywords_are_passed():
    """B54: a `**kwargs` that would swallow a keyword does not honour it."""
    seen = []
    entry = Entry(lambda x, scale=1, **kwargs: seen.append((x, scale, kwargs)), frozenset({"x", "scale"}))
    entry.call(1, scale=2, softcap=3)
    assert seen == [(1, 2, {})]
    assert entry.accepts("scale")
    assert not entry.accepts("softcap")


def test_the_next_source_stands_in(on, package):
    """S053: either of two packages will do, and both reasons are told when neither does."""
    package("tfstub_second", "def add(x): return x")
    on(Gpu((9, 0)))
    sources = (Source("tfstub_first", "add", install="pip install first"), Source("tfstub_second", "add"))
    assert table_with(*sources).reason(Kind.VENDOR) is None
    reason = table_with(sources[0], Source("tfstub_third", "add")).reason(Kind.VENDOR)
    assert "tfstub_first is not installed (pip install first)" in reason
    assert "tfstub_third is not installed" in reason


def test_tf_kernel_is_asked_of_the_platform(on, package, monkeypatch):
    """S072."""
    module = types.ModuleType("tf_kernel")
    module.add = lambda x: x + 2

    class WithExtension(Gpu):
        tf_kernel = module

    monkeypatch.setitem(sys.modules, "tf_kernel", module)
    on(WithExtension((9, 0)))
    table = table_with(Source("tf_kernel", "add"))
    assert table.record(Kind.VENDOR).run(table.probe(Kind.VENDOR), 1) == 3
    on(Gpu((9, 0)))
    assert "does not offer tf_kernel" in table.reason(Kind.VENDOR)


def test_one_warning_a_backend_and_kind_then_silence(caplog):
    """S048."""
    table = table_with()
    with caplog.at_level(logging.WARNING):
        for tokens in (20, 21, 22):
            used = table.fall_back(Kind.VENDOR, f"{tokens} tokens are too few", kind="tokens")
            assert used.impl is Kind.PLAIN
    assert [r.getMessage() for r in caplog.records] == [
        "addition: VENDOR cannot be used: 20 tokens are too few. Fallback: PLAIN."
    ]
    table.fall_back(Kind.VENDOR, "it has no backward pass", kind="grad")
    assert len(caplog.records) == 2


def test_strict_raises_with_the_text_of_the_warning():
    with pytest.raises(ValueError, match=r"addition: VENDOR cannot be used: it is gone\. Fallback: PLAIN\."):
        table_with().fall_back(Kind.VENDOR, "it is gone", strict=True)


def test_a_backend_that_fails_twice_and_never_worked_is_left_out(on, package, caplog):
    package("tfstub_vendor", "def add(x): return x")
    on(Gpu((9, 0)))
    table = table_with(Source("tfstub_vendor", "add"))
    error = RuntimeError("no kernel image\nmore")
    for _ in range(2):
        table.mark_failed(Kind.VENDOR, "two numbers", error)
    assert table.reason(Kind.VENDOR) is None
    assert warnings(caplog) == ["addition: VENDOR is left out for two numbers: it failed when called: no kernel image"]
    table.mark_failed(Kind.VENDOR, "three numbers", error)
    assert table.reason(Kind.VENDOR) == "it failed when called: no kernel image"
    assert warnings(caplog)[1:] == ["addition: VENDOR is left out: it failed when called: no kernel image"]
    table.forget()
    assert table.reason(Kind.VENDOR) is None


def test_the_next_backend_runs_where_one_fails(caplog):
    table = table_with()
    ran = []

    def choose(without):
        ok = table.reason(Kind.VENDOR) is None and Kind.VENDOR not in without
        return table.record(Kind.VENDOR if ok else Kind.PLAIN), Entry()

    def compute(record, entry, error=RuntimeError, fails=True):
        ran.append(record.impl)
        if fails and record.impl is Kind.VENDOR:
            raise error("no kernel image")
        return 3

    def always_fails(record, entry):
        raise KeyError(record.impl.name)

    with pytest.raises(RuntimeError, match="no kernel image"):
        table.run(choose, compute, lambda: "a", is_replaceable=False)
    with pytest.raises(torch.OutOfMemoryError):
        table.run(choose, functools.partial(compute, error=torch.OutOfMemoryError), lambda: "a")
    # Neither says that the backend is broken.
    assert caplog.records == []
    ran.clear()
    vendor = (table.record(Kind.VENDOR), Entry())
    assert table.run(choose, compute, lambda: "a", first=vendor) == 3
    assert ran == [Kind.VENDOR, Kind.PLAIN]
    ran.clear()
    # Such a call does not try it again, whoever chose it; another does.
    assert table.run(choose, compute, lambda: "a", first=vendor) == 3
    assert table.run(choose, functools.partial(compute, fails=False), lambda: "b") == 3
    assert ran == [Kind.PLAIN, Kind.VENDOR]
    # It has worked once, so no failure takes it from the calls that it can do.
    for call in "cde":
        assert table.run(choose, compute, lambda call=call: call) == 3
    assert table.reason(Kind.VENDOR) is None
    assert [f"left out for {call}" in text for call, text in zip("acde", warnings(caplog))] == [True] * 4
    with pytest.raises(KeyError, match="PLAIN"):
        table.run(choose, always_fails, lambda: "f")


def test_answers_follow_the_device_and_the_platform(on):
    class TwoGpus(Gpu):
        def cuda_arch(self, device=None):
            return (9, 0) if device is None or device.index == 0 else (8, 0)

    table = table_with(generations=(9,))
    on(TwoGpus((9, 0)))
    kind = platforms.current_platform.device_type
    assert table.reason(Kind.VENDOR, torch.device(kind, 0)) is None
    assert "8.0" in table.reason(Kind.VENDOR, torch.device(kind, 1))
    on(platforms.CpuPlatform())
    assert "cpu" in table.reason(Kind.VENDOR)


def test_a_second_record_for_a_member_is_refused():
    table = table_with()
    with pytest.raises(ValueError, match="VENDOR has a record already"):
        table.register(Backend(Kind.VENDOR, run))


def test_a_folder_without_init_is_no_package(package):
    """flash-attn-4 alone leaves a bare `flash_attn` folder around its own package; that is not FlashAttention 2."""
    package("tfstub_bare.inner", "def add(x): return x")
    assert not is_installed("tfstub_bare")
    assert is_installed("tfstub_bare.inner")
    assert not is_installed("tfstub_bare.other")
    assert not any(name.startswith("tfstub") for name in sys.modules)


def test_finding_a_sub_package_does_not_import_its_parent(package):
    package("tfstub_parent", "raise SystemExit('imported')")
    package("tfstub_parent.inner", "")
    assert is_installed("tfstub_parent.inner")
    assert "tfstub_parent" not in sys.modules


def test_an_import_hook_that_refuses_a_package_hides_it(monkeypatch):
    class Refuse:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "tfstub_blocked":
                raise ImportError("blocked")

    monkeypatch.setattr(sys, "meta_path", [Refuse, *sys.meta_path])
    assert not is_installed("tfstub_blocked")
    monkeypatch.setitem(sys.modules, "tfstub_none", None)
    assert not is_installed("tfstub_none")
