"""What a benchmark's figures belong to: when, on which machine, beside how much else."""

import datetime
import os
import platform
from pathlib import Path


def processor() -> str:
    """The processor's name, as Linux has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def about(prefix: str = "") -> dict[str, float | str]:
    """`load` (runnable processes, the last minute's mean), `date` and `machine`, each after `prefix`."""
    python = platform.python_version()
    return {
        f"{prefix}load": round(os.getloadavg()[0], 1),
        f"{prefix}date": datetime.date.today().isoformat(),
        f"{prefix}machine": f"{os.cpu_count()} cores, {platform.machine()}, {processor()}, Python {python}",
    }
