"""On a CPU without bf16: the kernel's list of its features without the names, oneDNN and torch kept to AVX2."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from drehr_utils.training import encoders

CODE = """
import numpy as np
from drehr_utils.training import encoders
encoder = encoders.load_encoder("minilm", device="cpu")
texts = ["chest pain", "no dyspnea"]
exact, asked = (encoders.encode(encoder, texts, bf16=bf16) for bf16 in (False, True))
print(encoders.has_fast_bf16(), np.array_equal(exact, asked))
"""


@pytest.mark.slow
def test_what_asks_for_bf16_computes_in_fp32(tmp_path):
    info = Path("/proc/cpuinfo")
    if not info.exists():
        pytest.skip("no /proc/cpuinfo: never bf16")
    (tmp_path / "cpuinfo").write_text(re.sub(r"\b(avx512_bf16|amx_bf16)\b", "", info.read_text()))
    mounted = ["unshare", "-rm", "sh", "-c", 'mount --bind "$0" /proc/cpuinfo && exec "$@"', str(tmp_path / "cpuinfo")]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file of their own over /proc/cpuinfo")
    old = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*mounted, sys.executable, "-c", CODE], env=old, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
@pytest.mark.parametrize(
    ("vendor", "flags", "fast"),
    [
        ("GenuineIntel", "avx512_bf16 amx_bf16", True), ("AuthenticAMD", "avx2 avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16", False),  # AMX masked by a hypervisor: bf16 at half of float32's rate
        ("AuthenticAMD", "avx2", False),
    ],
)  # fmt: skip
def test_bf16_is_asked_for_where_it_is_faster_than_float32(vendor, flags, fast, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags} fma\n")
    monkeypatch.setattr(encoders, "Path", {"/proc/cpuinfo": tmp_path / "cpuinfo"}.__getitem__)
    assert encoders.has_fast_bf16() == fast
