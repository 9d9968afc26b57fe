"""Remove the lock that a killed Snakemake left in this folder, if no Snakemake runs here.

Snakemake locks its working directory with files and cannot tell a stale lock from a live one.
Here the processes of this machine decide: a lock with no Snakemake running in this folder is stale.
"""

import os
import subprocess
import sys
from pathlib import Path


def running_here(folder: Path) -> list[int]:
    """Ids of the Snakemake processes whose working directory is `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")[:4]
            here = Path(os.readlink(entry / "cwd")) == folder
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if here and any(Path(os.fsdecode(a)).name == "snakemake" for a in arguments):
            found.append(int(entry.name))
    return found


def main() -> int:
    folder = Path.cwd().resolve()
    if not any((folder / ".snakemake" / "locks").glob("*.lock")):
        return 0
    if running := running_here(folder):
        print(
            f"error: Snakemake is already running in this folder (process {running[0]}). "
            "Wait until it has ended, or stop it.",
            file=sys.stderr,
        )
        return 2
    print("The last run was killed: removing its lock and going on from what it finished.")
    return subprocess.run(["snakemake", "--unlock", "--quiet", "all"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
