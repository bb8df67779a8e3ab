"""The seams over AWS's packages: which calls they make, with what, nested how."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo  # noqa: F401  it does not load while torch.device is a function
from torch import nn

from aneuron import ConfigError
from aneuron.device.neuron import nxd_runtime
from aneuron.device.neuron.native_runtime import LITE, TORCH_NEURON, NativeRuntime
from aneuron.device.neuron.nxd_runtime import ModelBuilderCompiler, NxdRuntime
from tests.neuron.stand_ins import Recorder, install, neuron_classes

if TYPE_CHECKING:
    from pathlib import Path

    from aneuron.device.neuron.raw import NativeRaw, NxdCompiler, NxdRaw

WEIGHTS = [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]


def artifact(folder: Path, *, v2: bool = False, **config: Any) -> Path:
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"")
        if v2:
            archive.writestr("model/extra/nxd_torchscript_metadata.json", "{}")
    (folder / "neuron_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def legacy(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """torch_neuronx, and what `torch.jit.load` gives of a legacy artifact."""
    install(monkeypatch, "torch_neuronx")
    model = Recorder(forward=torch.ones(1), forward_async=[["rank 0"], ["rank 1"]])
    monkeypatch.setattr(torch.jit, "load", lambda _: SimpleNamespace(nxd_model=model))
    return model


def test_a_legacy_artifact_is_called_by_rank(legacy: Recorder, tmp_path: Path) -> None:
    raw: NxdRaw = NxdRuntime()
    raw.load(artifact(tmp_path, neuron_config={"tp_degree": 4, "local_ranks_size": 2}))
    assert (raw.layout, raw.ranks) == ("rank_out", 2)
    raw.initialize(WEIGHTS, 6)
    (name, (weights, start_rank), kwargs) = legacy.calls.pop()
    assert (name, weights, kwargs) == ("initialize", WEIGHTS, {})
    assert (start_rank.dtype, start_rank.shape, start_rank.tolist()) == (torch.int32, (1,), [6])
    ids, mask = torch.ones(1), torch.zeros(1)
    assert raw.forward_async(((ids, mask), (ids, mask))) == [["rank 0"], ["rank 1"]]
    (name, (ranked,), kwargs) = legacy.calls.pop()
    assert (name, kwargs) == ("forward_async", {})
    assert ranked == [[ids, mask], [ids, mask]]
    assert all(type(inner) is list for inner in ranked)  # TorchScript takes nothing else
    assert [one.tolist() for one in raw.forward([ids, mask])] == [[1.0]]
    assert legacy.calls.pop() == ("forward", ([ids, mask],), {})


def test_a_v2_artifact_is_called_by_argument(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, "torch_neuronx")
    model = Recorder(forward=[["of rank 0", "of rank 1"]])
    loader = Recorder(load=model)
    install(monkeypatch, "neuronx_distributed.trace.nxd_model.nxd_model", NxDModel=loader)
    raw: NxdRaw = NxdRuntime()
    raw.load(artifact(tmp_path, v2=True, tp_degree=2))
    assert (raw.layout, raw.ranks) == ("out_rank", 2)
    assert not loader.calls  # its ranks are told when it is loaded, and are not known yet
    raw.initialize(WEIGHTS, 6)
    placed = {"start_rank": 6, "local_ranks_size": 2}
    assert loader.calls == [("load", (str(tmp_path / "model.pt"),), placed)]
    assert model.calls == [("set_weights", (WEIGHTS,), {}), ("to_neuron", (), {})]
    model.calls.clear()
    ids, mask = torch.ones(1), torch.zeros(1)
    assert raw.forward_async([[ids, ids], [mask, mask]]) == [["of rank 0", "of rank 1"]]
    assert model.calls.pop() == ("forward", ([ids, ids], [mask, mask]), {"forward_mode": "async"})
    assert raw.forward([ids, mask]) == [["of rank 0", "of rank 1"]]
    assert model.calls.pop() == ("forward", (ids, mask), {})


def test_nxd_reads_memory_and_cores(legacy: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Recorder(get_vnc_memory_stats=(3, 5))
    neuron_classes(monkeypatch, runtime)
    raw: NxdRaw = NxdRuntime()
    assert raw.memory_stats() == (3, 5)
    tensor = Recorder(cpu=torch.ones(1))
    assert raw.to_cpu(tensor).tolist() == [1.0]
    raw.close()
    assert [name for name, _, _ in runtime.calls] == ["get_vnc_memory_stats", "unsafe_close"]
    assert tensor.calls == [("cpu", (), {})]
    assert not legacy.calls


def test_nxd_asks_for_two_launches_before_the_runtime_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depth, ring = "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "NEURON_RT_IO_RING_CACHE_SIZE"
    monkeypatch.setenv(depth, "3")  # as the user has it
    monkeypatch.setenv(ring, "")
    monkeypatch.delenv(ring)  # put back behind the test
    install(monkeypatch, "torch_neuronx")
    NxdRuntime()
    assert (os.environ[depth], os.environ[ring]) == ("3", "2")


class Program:
    """A traced program with two buckets."""

    tag = "token_generation_model"
    inputs = ((torch.zeros(1),), (torch.zeros(2),))
    aliases = ("k", "v")

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def module(self, rank: int) -> nn.Module:
        self.ranks.append(rank)
        module = nn.Module()
        module.lone, module.summed = nn.Module(), nn.Module()
        vars(module.lone)["reduce"], vars(module.summed)["reduce"] = None, print
        module.register_buffer("v", torch.zeros(1))
        module.register_buffer("k", torch.zeros(1))
        return module


class Builder(Recorder):
    """ModelBuilder, of which each call is written down."""

    made: list[Builder] = []  # noqa: RUF012  (emptied by the test)

    def __init__(self, **settings: Any) -> None:
        super().__init__(trace="traced")
        self.settings = settings
        Builder.made.append(self)


class Instance:
    """ModelBuilder's BaseModelInstance."""

    def __init__(self, module_cls: Any, input_output_aliases: Any) -> None:
        self.given = (module_cls, input_output_aliases)


class OlderBuilder(Builder):
    """ModelBuilder as it was before an argument was renamed."""

    def __init__(self, *, logical_neuron_cores: int = 1, **settings: Any) -> None:
        super().__init__(logical_neuron_cores=logical_neuron_cores, **settings)


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*nxd_runtime._CORE_SIZES, nxd_runtime._PLATFORM, "NEURON_CC_FLAGS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "builder", "sizes", "flag"),
    [
        ({}, Builder, {}, ""),  # the compiler's default is the runtime's
        ({}, OlderBuilder, {"logical_neuron_cores": 1}, ""),
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, Builder, {"logical_nc_config": 2}, " --lnc=2"),
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, OlderBuilder, {"logical_neuron_cores": 2}, " --lnc=2"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, Builder, {"logical_nc_config": 2}, " --lnc=2"),
        (
            {"NEURON_RT_VIRTUAL_CORE_SIZE": "2", "NEURON_LOGICAL_NC_CONFIG": "1"},
            Builder,
            {"logical_nc_config": 1},
            " --lnc=1",
        ),
    ],
)
def test_the_compiler_makes_a_model_of_each_bucket(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    builder: type[Builder],
    sizes: dict[str, int],
    flag: str,
) -> None:
    Builder.made.clear()
    clear_environment(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    names = {"ModelBuilder": builder, "BaseModelInstance": Instance}
    install(monkeypatch, "neuronx_distributed.trace.model_builder", **names)
    mappings = {"reduce_from_tensor_model_parallel_region": sum}
    install(monkeypatch, "neuronx_distributed.parallel_layers.mappings", **mappings)
    saved: list[Any] = []
    monkeypatch.setattr(torch.jit, "save", lambda *args: saved.append(args))
    told: list[Any] = []
    program = Program()
    compiler: NxdCompiler = ModelBuilderCompiler()
    compiler.compile(
        [program],
        tmp_path,
        ranks=8,
        progress=lambda *args: told.append(args),
    )
    (made,) = Builder.made
    work = made.settings.pop("compiler_workdir")
    assert not work.startswith(str(tmp_path))  # the artifact has what was compiled, no more
    assert made.settings == {"router": None, "tp_degree": 8, "checkpoint_loader": None, **sizes}
    *added, traced = made.calls
    assert traced == ("trace", (), {"initialize_model_weights": False})
    assert [one["key"] for _, _, one in added] == [f"{program.tag}_{at}" for at in range(2)]
    assert [one["example_inputs"] for _, _, one in added] == [[one] for one in program.inputs]
    assert all(one["compiler_args"].endswith(f" -O2{flag}") for _, _, one in added)
    instance = added[0][2]["model_instance"]
    assert not program.ranks  # the builder says when
    instance.load_module()
    module, aliases = instance.get(0)
    assert not module.training
    assert (module.lone.reduce, module.summed.reduce) == (None, sum)
    assert aliases == {module.k: 1, module.v: 2}  # behind the tokens
    assert saved == [("traced", str(tmp_path / "model.pt"))]
    assert told == [("compile", 0, 1), ("compile", 1, 1)]


def test_a_compiler_s_version_changes_with_what_it_compiles_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clear_environment(monkeypatch)
    chip = tmp_path / "instance_type"
    monkeypatch.setattr(nxd_runtime, "_CHIP", chip)
    versions = [ModelBuilderCompiler().version]
    assert f"torch-{torch.__version__.partition('+')[0]}" in versions[0]
    assert "chip=unknown lnc=default" in versions[0]
    for name in ("Trn1\n", "Trn2\n"):
        chip.write_text(name)
        versions.append(ModelBuilderCompiler().version)
    assert "chip=trn2 lnc=default" in versions[-1]
    for name, value in {
        "NEURON_PLATFORM_TARGET_OVERRIDE": "trn3",
        "NEURON_RT_VIRTUAL_CORE_SIZE": "2",
        "NEURON_LOGICAL_NC_CONFIG": "1",
        "NEURON_CC_FLAGS": "-O3",
    }.items():
        monkeypatch.setenv(name, value)
        versions.append(ModelBuilderCompiler().version)
    assert "chip=trn3 lnc=1" in versions[-1]
    assert len(set(versions)) == 7


@pytest.mark.parametrize("name", nxd_runtime._CORE_SIZES)
@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5"])
def test_a_core_size_that_is_no_number_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} must be a number") as told:
        ModelBuilderCompiler()
    assert told.value.param == name


# ── native PyTorch ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def neuron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.neuron of TorchNeuron, and a torch that has a device of that name."""
    events: list[Recorder] = []
    freed: list[tuple[str, int | None]] = []

    def event() -> Recorder:
        events.append(Recorder())
        return events[-1]

    module = SimpleNamespace(
        Event=event,
        memory_stats=lambda device: {"allocated_bytes.all.current": device.index},
        freed=freed,
        synchronize=lambda device: freed.append(("synchronize", device.index)),
        empty_cache=lambda: freed.append(("empty_cache", None)),
        events=events,
    )
    monkeypatch.setattr(torch, "neuron", module, raising=False)
    monkeypatch.setattr(
        torch, "device", lambda kind, index: SimpleNamespace(type=kind, index=index)
    )
    return module


def test_torch_neuron_is_called_on_its_core(neuron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_(fn: Any, **told: Any) -> Any:
        compiled.append((fn, told))
        return fn

    monkeypatch.setattr(torch, "compile", compile_)
    raw: NativeRaw = NativeRuntime(TORCH_NEURON).at(3)
    assert (raw.index, raw.has_events) == (3, True)
    tensor: Any = Recorder(to="moved")
    assert raw.to_device(tensor) == "moved"
    (name, (device,), kwargs) = tensor.calls.pop()
    assert (name, device.type, device.index, kwargs) == ("to", "neuron", 3, {"non_blocking": True})
    assert raw.to_host(tensor) == "moved"
    assert tensor.calls.pop() == ("to", ("cpu",), {"non_blocking": False})
    assert raw.to_host(tensor, non_blocking=True) == "moved"
    assert tensor.calls.pop() == ("to", ("cpu",), {"non_blocking": True})
    graph = raw.compile(max, options={"a": 1})
    told = {"backend": "neuron", "fullgraph": True, "dynamic": False, "options": {"a": 1}}
    assert compiled == [(max, told)]
    values: Any = (3, 7)
    assert raw.call(graph, *values) == 7
    event = raw.record_event()
    raw.synchronize(event)
    assert event.calls == [("record", (), {}), ("synchronize", (), {})]
    assert len(neuron.events) == 1
    assert raw.memory_stats() == {"allocated_bytes.all.current": 3}
    raw.close()
    assert neuron.freed == [("synchronize", 3), ("empty_cache", None)]


def test_a_core_that_is_lost_is_closed_as_far_as_it_goes(neuron: Any) -> None:
    def lost(_: Any) -> None:
        raise RuntimeError("nrt status 101")

    neuron.synchronize = lost
    with pytest.raises(RuntimeError, match="101"):
        NativeRuntime().close()
    assert neuron.freed == [("empty_cache", None)]


@pytest.mark.usefixtures("neuron")
@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ImportError("no libnrt"), ImportError),
        (OSError("libnrt.so.1: cannot open"), OSError),
        (RuntimeError("nrt status 13"), RuntimeError),
        (AttributeError("torch has no _C"), ImportError),
    ],
)
def test_what_the_lite_package_raises_is_of_a_few_kinds(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, kind: type[Exception]
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "libtorch_neuronx_lite":
                raise raised

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(kind, match=str(raised)):
        NativeRuntime(LITE)


@pytest.mark.usefixtures("neuron")
def test_the_lite_runtime_has_its_backend_and_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = SimpleNamespace(current_device=lambda: 0, is_available=lambda: True)
    monkeypatch.setattr(torch, "neuron", bare)
    install(monkeypatch, "libtorch_neuronx_lite")
    told: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda _, **options: told.append(options))
    raw: NativeRaw = NativeRuntime(LITE)
    raw.compile(max)
    assert told == [
        {"backend": "neuron_libtorch", "fullgraph": True, "dynamic": False, "options": None}
    ]
    assert not raw.has_events
    assert raw.memory_stats() == {}
    raw.close()


@pytest.mark.usefixtures("neuron")
@pytest.mark.parametrize(("asked", "depth"), [("", 8), ("32", 32), ("200", 63), ("many", 8)])
def test_the_queue_is_as_deep_as_the_runtime_makes_it(
    monkeypatch: pytest.MonkeyPatch, asked: str, depth: int
) -> None:
    monkeypatch.setenv("NEURON_RT_XU_COMPUTE_MAX_QUEUED_REQUESTS", asked)
    assert NativeRuntime().queue_depth == depth
