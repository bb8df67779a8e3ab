"""What only a process of its own can show: a runtime that hangs, and a fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.neuron.artifacts import write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)  # its own is the child's
KINDS = ("native", "nxd")
OPENED = """
    import asyncio, os, signal, sys, threading, time
    from aneuron import DeviceLost, Engine, EngineClosed
    from aneuron.device.neuron import NeuronDevice
    from aneuron.device.neuron import device as runtime
    from aneuron.models.neuron.native import NativeModel, native_spec
    from aneuron.testing import ByteTokenizer
    from aneuron.testing.fakes import CountDecoder, FakeNative, FakeNxd, Fault
    from aneuron.testing.fakes.faults import _claimed

    kind, folder = sys.argv[1:]
    decoder = CountDecoder(512, max_model_len=64)

    def engine_over(faults=(), **options):
        if kind == "nxd":
            fake = FakeNxd(faults=faults, decoder=lambda _: decoder)
            device = NeuronDevice(lambda: fake, kind="nxd")
            return fake, Engine(folder, device=device, tokenizer=ByteTokenizer(), **options)
        fake = FakeNative(faults=faults)
        device = NeuronDevice(lambda: fake, kind="native")
        sizes = {"max_num_seqs": 1, "num_tokens_buckets": [64], "num_blocks_buckets": [4],
                 "max_num_batched_tokens": 64, "num_kv_blocks": 8}
        model = NativeModel(native_spec(decoder.config, name="count"), decoder)
        return fake, Engine(model, device=device, **sizes, **options)
"""


async def told(folder: Path, kind: str, code: str) -> list[str]:
    """Run code behind `OPENED` in a process of its own; return what it printed."""
    await asyncio.to_thread(write, folder / "artifact", "blocks")
    child = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(OPENED) + textwrap.dedent(code), kind, "artifact"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


@pytest.mark.parametrize("kind", KINDS)
async def test_case_90_a_hang_while_it_warms_up(tmp_path: Path, kind: str) -> None:
    """It is given up after as long as a compiler may take, as its close is; the process ends."""
    code = """
        async def main():
            runtime.WARM_UP_S = runtime.CLOSE_S = 0.5  # compilers may take long
            _, engine = engine_over([Fault("hang", step=1)], shutdown_s=0.3)
            began_s = time.monotonic()
            try:
                await engine.open()
            except DeviceLost:
                print("lost", time.monotonic() - began_s < 5)

        asyncio.run(main())
        print("end of main", sorted(_claimed))
        """
    assert await told(tmp_path, kind, code) == ["lost True", "end of main [0]"]


@pytest.mark.parametrize("kind", KINDS)
async def test_case_90_a_runtime_that_hangs_while_it_is_closed(tmp_path: Path, kind: str) -> None:
    code = """
        async def main():
            fake, engine = engine_over(shutdown_s=0.3)
            fake.close = threading.Event().wait
            async with engine:
                print((await engine.generate(prompt_token_ids=[10], max_tokens=3)).token_ids)

        asyncio.run(main())
        print("end of main")
        """
    assert await told(tmp_path, kind, code) == ["[11, 12, 13]", "end of main"]


@pytest.mark.parametrize("kind", KINDS)
async def test_rule_20_a_forked_child_has_no_engine(tmp_path: Path, kind: str) -> None:
    """It calls nothing of the runtime; its parent's goes on."""
    code = """
        async def main():
            fake, engine = engine_over()
            async with engine:
                stream = engine.generate(prompt_token_ids=[10], max_tokens=9)
                ids = [(await anext(stream)).token_id]
                if not (pid := os.fork()):
                    signal.alarm(30)
                    try:
                        engine.generate(prompt_token_ids=[10])
                    except EngineClosed:
                        print("refused")
                    try:
                        async for _ in stream:
                            pass
                    except EngineClosed:
                        print("ended", fake.violations, flush=True)
                    await engine.aclose()
                    os._exit(len(fake.violations))
                print("child", (await asyncio.to_thread(os.waitpid, pid, 0))[1])
                ids += [token.token_id async for token in stream]
            print(ids == list(range(11, 20)), fake.violations)

        asyncio.run(main())
        """
    expected = ["refused", "ended []", "child 0", "True []"]
    assert await told(tmp_path, kind, code) == expected
