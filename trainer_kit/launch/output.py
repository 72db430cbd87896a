"""Output of the ranks: the first rank of a machine writes to the terminal, the others to files."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class OutputFiles(LogsSpecs):
    """Log files `folder`/rank-1.out and rank-1.err, after a restart in `folder`/restart-1/….

    Args:
        folder: Folder of the files, created if missing.
        scratch: Folder for the files that ranks write for the launcher.
        prefix: Prefix of each line in the terminal, where all ranks are then shown too; None shows only the first rank.
    """

    def __init__(self, folder: Path, scratch: Path, prefix: str | None) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.scratch = scratch
        self.prefix = prefix
        self._files: set[str] = set()

    @property
    def root_log_dir(self) -> str:
        """Folder of all attempts."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of one attempt by local rank, and set the path of each rank's error file.

        Args:
            envs: Environment variables by local rank; gets TORCHELASTIC_ERROR_FILE.
        """
        attempt = envs[0]["TORCHELASTIC_RESTART_COUNT"]
        folder = self.folder if attempt == "0" else self.folder / f"restart-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        files = LogsDest()
        for local_rank, variables in envs.items():
            name = f"rank-{variables['RANK']}"
            has_files = self.prefix is not None or local_rank > 0
            files.stdouts[local_rank] = str(folder / f"{name}.out") if has_files else ""
            files.stderrs[local_rank] = str(folder / f"{name}.err") if has_files else ""
            if self.prefix is not None:
                files.tee_stdouts[local_rank] = files.stdouts[local_rank]
                files.tee_stderrs[local_rank] = files.stderrs[local_rank]
            self._files |= {files.stdouts[local_rank], files.stderrs[local_rank]} - {""}
            error_file = self.scratch / f"{name}-{attempt}.error.json"
            error_file.unlink(missing_ok=True)  # of a newcomer that has ended before it had its place
            files.error_files[local_rank] = variables["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        return files

    def written(self) -> list[Path]:
        """Return the files that are not empty."""
        return sorted(path for path in map(Path, self._files) if path.exists() and path.stat().st_size)
