"""Where the ranks write: the first one of a machine to the terminal itself, the others to files."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class OutputFiles(LogsSpecs):
    """Puts what ranks write into `folder`/rank-1.out and rank-1.err, after a restart into `folder`/restart-1/….

    Args:
        folder: Where to; made where it is missing.
        scratch: A folder for what the ranks tell the launcher.
        prefix: What each line of all ranks is shown after in the terminal too; None: only the first ranks are shown.
    """

    def __init__(self, folder: Path, scratch: Path, prefix: str | None) -> None:
        super().__init__(str(folder))
        self.folder = folder
        self.scratch = scratch
        self.prefix = prefix
        self._files: set[str] = set()

    @property
    def root_log_dir(self) -> str:
        """The folder of all attempts."""
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of one attempt, by local rank; also tells each rank where its error goes."""
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
            files.error_files[local_rank] = variables["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        return files

    def written(self) -> list[Path]:
        """The files in which there is something."""
        return sorted(path for path in map(Path, self._files) if path.exists() and path.stat().st_size)
