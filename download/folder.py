"""Where a checkpoint folder keeps what is not part of the checkpoint: ledger, lock and partial files."""

from __future__ import annotations

from pathlib import Path

STATE_FOLDER = ".moedock"


class SourceFolder:
    """Paths of one checkpoint folder; nothing is created or read here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / STATE_FOLDER
        self.ledger = self.state / "ledger.jsonl"
        self.lock = self.state / "lock"
        self.parts = self.state / "parts"  # files that are not whole yet
        self.headers = self.state / "headers"  # of shards that are not here: their bytes up to the weights

    def file(self, name: str) -> Path:
        """The final place of a repository's file."""
        return self.folder / name

    def part(self, name: str) -> Path:
        """Where a file grows until it is whole and proved."""
        return self.parts / f"{name}.part"

    def part_facts(self, name: str) -> Path:
        """What is known of the file that a part belongs to."""
        return self.parts / f"{name}.json"

    def header(self, shard: str) -> Path:
        """Where a shard's header is kept."""
        return self.headers / shard
