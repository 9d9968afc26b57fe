"""What is in the repository: sources, and nothing that a run or a machine has left."""

import re
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [REPOSITORY / name for name in listing.stdout.splitlines()]


def test_neither_environment_nor_results_nor_large_files_are_tracked() -> None:
    files = tracked()
    assert REPOSITORY / "Snakefile" in files
    strays = [
        path
        for path in files
        if path.relative_to(REPOSITORY).parts[0] in {".venv", ".snakemake", "results"}
        and path.name != ".gitkeep"
    ]
    assert strays == []
    large = [path for path in files if path.exists() and path.stat().st_size > 1 << 20]
    assert large == []


def test_no_file_names_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.~])/(?:root|home)/\w")
    named = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in tracked()
        if path.suffix in {".py", ".md", ".yaml", ".smk", ".toml", ".sh", ".lock", ""}
        and path.is_file()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert named == []
