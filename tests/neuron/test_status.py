"""Status codes of the Neuron runtime and compiler, and what becomes of them."""

from __future__ import annotations

import pytest

from aneuron import ConfigError, DeviceError, DeviceLost, LaunchFailed, OutOfMemory
from aneuron.device.neuron.status import STATUSES, as_config_error, classify, status_of


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("nrt_execute failed: status=4 (Allocation Failure)", 4),
        ("The PyTorch Neuron Runtime reported NRT status 101", 101),
        ("nrt status 1003", 1003),
        ("NRT_RESOURCE: cannot allocate 12 bytes", 4),
        ("NRT_STATUS_QUEUE_FULL", 7),
        ("NRT_TIMEOUT (5)", 5),
        ("status_code: 1006, tensor 3", 1006),
        ("Allocation Failure on nd0:nc1", 4),
        ("NeuronCore(s) not available - Requested:1 Available:0", 1005),
        ("Neuron Core(s) not available", 1005),
        ("Not available: neuron cores 0-1", 1005),
        ("execution queue full", 7),
        ("The execution queue is full: 8 requests", 7),
        ("NRT_FAILURE (1): execution queue full", 7),
        ("nrt status 4; the queue is full", 4),
        ("a queue fuller than others", None),
        ("status 8 of 9 shards", None),  # there is no such code
        ("nothing of the kind in 101 lines", None),
        ("Command 'neuronx-cc compile' returned non-zero exit status 1.", None),
        ("exit_status=4", None),
        ("exitstatus: 7", None),
        ("exit-status 7", None),
        ("nrt_status=7", 7),
        ("HTTP status code 7", None),
        ("expected status 2, got 3", None),
        ("neuronx-cc failed: [NCC_EBVF030] too many instructions, status 4", None),
        ("neuronx-cc failed: [NCC_XYZA123] NRT_RESOURCE", None),
        ("init status 0; nrt_execute status=4", 4),
        ("NRT_FAILURE (1): nrt_load gave status 9", 9),
        ("NRT_FAILURE, and no more", 1),
        ("NRT_EXEC_HW_ERR_NC_UE", 1200),
        ("NRT_EXEC_HW_ERR_NC_UE (1202)", 1200),
        ("nrt status 1202: NRT_EXEC_HW_ERR_NC_UE", 1202),
        ("NRT_INVALID_HANDLE", 3),
        ("NRT_LOAD_NOT_ENOUGH_NC: 3 of 5", 9),
        ("NRT_RESOURCEFUL", None),
        ("NRT_NEW_ONE (5)", 5),
        ("", None),
    ],
)
def test_codes_are_found_in_the_text(text: str, code: int | None) -> None:
    assert status_of(RuntimeError(text)) == code


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, LaunchFailed),
        (4, OutOfMemory),
        (5, DeviceLost),
        (101, DeviceLost),
        (1002, LaunchFailed),
        (1003, DeviceError),
        (1005, DeviceLost),
        (1006, DeviceError),
        (1204, DeviceLost),
    ],
)
def test_a_status_becomes_its_typed_error(code: int, kind: type[DeviceError]) -> None:
    error = classify(RuntimeError(f"nrt status {code}"), "neuron")
    assert type(error) is kind
    assert error.device == "neuron"
    assert STATUSES[code].name in str(error)
    assert STATUSES[code].advice in str(error)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("something new"), DeviceLost),
        (RuntimeError("builtins.ValueError: no model for [2, 3]"), LaunchFailed),
        (RuntimeError("KeyError: 'int32[2, 3]'"), LaunchFailed),
        (KeyError("int32[2, 3]"), LaunchFailed),
        (ValueError("shape"), LaunchFailed),
        (AssertionError("ambiguous"), LaunchFailed),
        (MemoryError(), OutOfMemory),
        (FloatingPointError("the logits hold NaN"), DeviceError),
        (RuntimeError("[NCC_EBVF030] too many instructions"), LaunchFailed),
        (RuntimeError("[NCC_EBVF030] too many instructions; exit status 4"), LaunchFailed),
        (RuntimeError("[NCC_EBVF030] too many instructions; status 4"), LaunchFailed),
        (RuntimeError("[NCC_XYZA123] nobody knows; status 4"), LaunchFailed),
        (RuntimeError("neuronx-cc returned non-zero exit status 1."), LaunchFailed),
        (RuntimeError("compiled by neuronx-cc 2: nrt status 10"), DeviceLost),
    ],
)
def test_what_has_no_status_is_classified_by_what_it_is(
    error: Exception, kind: type[DeviceError]
) -> None:
    assert type(classify(error, "neuron-rank1")) is kind


def test_what_the_compiler_reports_comes_with_advice() -> None:
    failed = RuntimeError("neuronx-cc failed: [NCC_EBVF030] too many; exit status 4")
    assert "smaller buckets" in str(classify(failed, "neuron"))
    assert "log" in str(classify(RuntimeError("[NCC_XYZA123] nobody knows"), "neuron"))


def test_a_compiler_code_comes_with_advice() -> None:
    error = as_config_error(RuntimeError("neuronx-cc: [NCC_EVRF009] exceeds HBM"), param="model")
    assert isinstance(error, ConfigError)
    assert error.param == "model"
    assert "num_kv_blocks" in str(error)
    assert "log" in str(as_config_error(RuntimeError("exit status 70"), param="model"))
